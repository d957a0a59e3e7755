"""The diagnosis of a model: everything that the probes measure on one batch, and the findings that follow from it."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from torch import nn

from kilolayer.display import Displayed
from kilolayer.evaluate.stack_label import DeadStack, first_layers
from kilolayer.files.writing import json_value
from kilolayer.layers.embedding import VocabularyProjection
from kilolayer.models.model import Model
from kilolayer.probe.accumulated import Change
from kilolayer.probe.attention_entropy import attention_entropy
from kilolayer.probe.dead_units import dead_units
from kilolayer.probe.gradients import Gradients, measure_gradients
from kilolayer.probe.hooks import ByKind, ByLayer, compute, forward_hooks
from kilolayer.probe.norm_inputs import norm_inputs
from kilolayer.probe.propagation import Loss
from kilolayer.probe.rank import StateRank, state_rank
from kilolayer.probe.record import RECORDS
from kilolayer.probe.residual import residual_sizes
from kilolayer.probe.updates import UpdateSizes, update_sizes

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class Settings:
    """The training options that the findings depend on. step: the step of the weights, 0 before training; steps: of the run.

    optimizer: its name in texts. uses_eps: whether it adds eps to what it divides the gradient by.
    """

    lr: float = 1e-3
    eps: float = 1e-8
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.98)
    step: int = 0
    steps: int = 100_000
    optimizer: str = "Adam"
    uses_eps: bool = True


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured. title: the model in words; changes: over checkpoints or first steps, if requested.

    output_at_zero: whether the output table is 0, as R-Fixup initializes it: the first step then changes only the table, and
    the layers change from the second step on.
    """

    title: str
    recipe: str
    settings: Settings
    loss: float
    gradients: Gradients
    norm_inputs: ByKind
    residual: ByLayer
    rank: StateRank
    width: int
    entropy: ByKind
    dead_units: ByLayer
    updates: UpdateSizes
    output_at_zero: bool
    changes: tuple[Change, ...] = ()
    dead: tuple[DeadStack, ...] = ()
    """The stacks that are dead at the end of the run; empty before its end."""
    source_gain: float | None = None
    """How much the right source lowers the loss, in nats per token: of the last validation of a run past half of its steps."""
    epochs: float | None = None
    """How often the run has read its text, if its log says so."""

    def table(self) -> dict[str, Any]:
        """The measurements as JSON values; numbers that are not finite become None."""
        return json_value(asdict(self))


@dataclass(frozen=True)
class Finding:
    """A problem in words, with the options to change, written as for the command or for Python, whichever was called.

    value: the measured number, which is beyond `limit`; NaN if the finding comes from the run's log alone.
    """

    kind: str
    where: str
    text: str
    value: float
    limit: float
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis(Displayed):
    """The measurements and the findings that follow from them; the model is healthy if there are none.

    It prints what `kilolayer diagnose` prints; a notebook also shows its first plots.
    """

    _laid_out_by = "kilolayer.probe.diagnosis_page"

    measured: Measurements
    findings: tuple[Finding, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        return not self.findings

    def options(self, most: int = 3) -> list[str]:
        """The options to change, the most important first."""
        return list(dict.fromkeys(option for finding in self.findings for option in finding.options))[:most]

    def verdict(self) -> list[str]:
        """The findings in sentences."""
        if self.healthy:
            return [f"Healthy: {_healthy_summary(self.measured)}"]
        tried = self.options()
        return [*(finding.text for finding in self.findings), *([f"Try: {'; or '.join(tried)}."] if tried else [])]

    def table(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        findings = json_value([asdict(finding) for finding in self.findings])
        said = {"healthy": self.healthy, "verdict": self.verdict(), "options": self.options(), "findings": findings}
        return {**said, "measured": self.measured.table()}


def measure(
    model: Model,
    loss: Loss,
    settings: Settings,
    changes: tuple[Change, ...] = (),
    dead: tuple[DeadStack, ...] = (),
    source_gain: float | None = None,
) -> Measurements:
    """Run all probes on one batch, in fp32 or higher precision. loss: computes the loss of the batch from a model."""
    model, config = in_full_precision(model), model.config
    with forward_hooks(model):
        value = compute(model, loss)
    return Measurements(
        f"{config.recipe.title} {config.depths.title}",
        config.recipe.name,
        settings,
        value,
        measure_gradients(model, loss),
        norm_inputs(model, loss),
        residual_sizes(model, loss),
        state_rank(model, loss),
        config.dim,
        attention_entropy(model, loss),
        dead_units(model, loss),
        update_sizes(model, loss, lr=settings.lr, betas=settings.betas, eps=settings.eps),
        any(isinstance(part, VocabularyProjection) and not part.weight.any() for part in model.modules()),
        changes,
        dead,
        source_gain,
    )


def in_full_precision(model: AnyModule) -> AnyModule:
    """The model itself, or a copy in fp32 if some of its weights have lower precision."""
    return copy.deepcopy(model).float() if any(weight.dtype.itemsize < 4 for weight in model.parameters()) else model


def _healthy_summary(measured: Measurements) -> str:
    shares = {side: first_share(norms) for side, norms in measured.gradients.trained.items()}
    said = [
        f"the gradient of the {side}'s first layers is {share:.0%} of its largest layer's"
        for side, share in shares.items()
        if not math.isnan(share)
    ]
    step = measured.updates
    moved = f"one step of Adam at {step.adam_lr:g} moves the output by {step.adam_all:.2g} of itself."
    if not measured.settings.step:
        moved += f" {RECORDS['start']['none'].sentence('began without a finding')}"
    if measured.output_at_zero:
        said.append("the output table is 0, so that the layers receive a gradient only from the second step on")
    return f"{', '.join(said)}; {moved}" if said else moved


def first_share(norms: tuple[float, ...]) -> float:
    """The mean gradient norm of a stack's first tenth of layers over that of its largest layer; NaN without a gradient."""
    return first_layers(norms) / max(norms) if max(norms) else math.nan
