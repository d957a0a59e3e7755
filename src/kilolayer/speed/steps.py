"""The form of a model that is used for training, and the recorder of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from kilolayer.models.trainable import Trainable
from kilolayer.moe.shard import expert_group
from kilolayer.runtime.recorder import Recorder
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form, unfused_residuals
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.graph_recorder import GraphRecorder
from kilolayer.speed.operators.kernels import why_no_kernels

AnyModel = TypeVar("AnyModel", bound=Trainable)


def training_form(
    model: AnyModel, device: torch.device, say: Callable[[str], None], *, eager: bool, recompute: Recompute
) -> tuple[AnyModel, Recorder]:
    """The fast form of `model` and the recorder that runs its steps; with `eager`, or on the CPU, layers are not compiled."""
    form = fast_form(model, recompute)
    records = device.type == "cuda" and not eager and _compile(form, say)
    return form, GraphRecorder(device, "steps run", say, GraphPool(device)) if records else Recorder(device)


def _compile(form: Trainable, say: Callable[[str], None]) -> bool:
    """Compile the layers; return whether steps can be recorded."""
    if (reason := why_no_kernels()) is not None:
        say(f"steps run in eager mode, because {reason}")
        return False
    for text in unfused_residuals(form):
        say(text)
    compile_layers(form)
    if expert_group(form) is not None:
        say("steps are compiled, but not recorded, because several processes share the experts")
        return False
    torch.cuda.empty_cache()  # memory freed after building the model belongs to another stream, and no step could reuse it
    return True
