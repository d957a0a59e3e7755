"""What makes the steps of a model's training fast: compiled layers, and recordings."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from kilolayer.models.model import Model
from kilolayer.operators.kernels import why_no_kernels
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.recorder import Recorder


def make_step_recorder(model: Model, device: torch.device, say: Callable[[str], None], *, eager: bool) -> Recorder:
    """Compile one layer of each kind for all, and return what runs the steps; with `eager`, or on the CPU, as they are."""
    records = device.type == "cuda" and not eager and _compile(model, say)
    return Recorder(device, "steps run", say, GraphPool(device) if records else None)


def _compile(model: Model, say: Callable[[str], None]) -> bool:
    """Whether steps can be recorded then."""
    if (reason := why_no_kernels()) is not None:
        say(f"steps run one operation at a time, because {reason}")
        return False
    # Advice to the compiler's authors is not for the user.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
    for stack in model.stacks():
        stack.compile_layer()
    if not all(stack.has_fixed_shapes for stack in model.stacks()):
        say("layers with experts run one operation at a time, because processes share these")
        return False
    torch.cuda.empty_cache()  # what building the model left lies on another stream, where no step takes it
    return True
