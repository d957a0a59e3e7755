"""One training step: forward, backward, guard, clip, update. On a GPU it is recorded once for each batch shape."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from kilolayer.data.tokenizer import PAD
from kilolayer.models.model import Model
from kilolayer.moe.clip import clipping_norm
from kilolayer.operators.graph import Graphs
from kilolayer.operators.kernels import why_no_kernels
from kilolayer.parallel.processes import Processes
from kilolayer.tasks.loss import token_losses
from kilolayer.tasks.task import Batch
from kilolayer.training.config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.norms import LayerNorms, Meter
from kilolayer.training.optimizer import Optimizer
from kilolayer.training.routing_meter import RoutingMeter


@dataclass(frozen=True)
class StepResult:
    """loss (what is minimised: smoothed, with a sparse model's router loss) and nll: means over the step's labels.

    gradient_norm: as it is clipped; dense_norm and expert_norm: of the gradient of experts, and of all others.
    fault: what was not finite; the state is untouched then.
    """

    loss: float
    nll: float
    tokens: int
    gradient_norm: float
    dense_norm: float
    expert_norm: float
    clipped: bool
    fault: str | None


class Stepper:
    """Runs steps on a model and its optimizer. Nothing is read back from the device before a step has ended.

    Each of several `processes` reads batches of its own; what they leave is summed before the update, which all make alike.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        config: TrainConfig,
        guard: Guard,
        device: torch.device,
        say: Callable[[str], None] = print,
        routing: RoutingMeter | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.guard, self.device, self.say = guard, device, say
        self.processes = processes or Processes()
        self.routing = RoutingMeter(model, device) if routing is None and model.config.moe is not None else routing
        self.counted_experts = _counted_experts(model, config, say)
        self.totals = torch.zeros(2, device=device)
        self.share = torch.zeros((), dtype=torch.float64, device=device)  # 1 / labels of the step
        self.scale = torch.ones((), dtype=torch.float64, device=device)  # of the loss
        self.measured = torch.zeros(5, dtype=torch.float64, device=device)
        self.graphs: Graphs | None = None
        self.seen: set[Hashable] = set()
        self.meter, self.measures = Meter(model, optimizer), False
        for stack in model.stacks():
            stack.recompute = config.recompute
        if device.type == "cuda" and not config.eager:
            self._compile()

    def step(self, batches: Sequence[Batch], lr: float, norms: LayerNorms | None = None) -> StepResult:
        """One update from `batches`, of all processes; with `norms`, also measure each layer."""
        tokens = self.processes.total(sum(batch.tokens for batch in batches))
        self.optimizer.lr.fill_(lr)
        self.share.fill_(1 / tokens)
        self.scale.fill_(self.guard.scale)
        self.measures = norms is not None
        if self.graphs is None:
            self._step_eagerly(batches)
        elif not self.seen.issuperset(map(self._sight, batches)):
            self._step_beside_graphs(self.graphs, batches)
        else:
            self._step_by_graphs(self.graphs, batches)
        if norms is not None:
            self.meter.read(norms, len(batches) * self.processes.size, self.guard.scale)
        loss, nll, norm, dense, expert = self.measured.tolist()
        fault = next((name for name, value in (("the loss", loss), ("the gradient", norm)) if not math.isfinite(value)), None)
        return StepResult(loss, nll, tokens, norm, dense, expert, 0 < self.config.clip_norm < norm, fault)

    def _compile(self) -> None:
        """One compiled layer for all layers, and room for recordings."""
        if (reason := why_no_kernels()) is not None:
            self.say(f"steps run one operation at a time, because {reason}")
            return
        # Advice to the compiler's authors is not for the user.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
        for stack in self.model.stacks():
            stack.compile_layer()
        if expert_group(self.model) is None:
            self.graphs = Graphs()
            torch.cuda.empty_cache()  # what building the model left lies on another stream, where no step takes it
        else:
            self.say("layers with experts run one operation at a time, because processes share these")

    def _step_eagerly(self, batches: Sequence[Batch]) -> None:
        """Also what a shape needs before it is recorded: kernels are compiled and chosen when they first run."""
        for batch in batches:
            self._read(*(part.to(self.device, non_blocking=True) for part in batch.parts))
            self.seen.add(self._sight(batch))
        self._join()
        self._update()

    def _step_beside_graphs(self, graphs: Graphs, batches: Sequence[Batch]) -> None:
        taken = float(self.optimizer.taken)
        with graphs.warm_up():
            try:
                self._step_eagerly(batches)
            except torch.OutOfMemoryError:
                if not graphs.recordings or float(self.optimizer.taken) != taken:  # no update is made twice
                    raise
                # There is no room for a step beside the recordings' pool: they are made anew when they are needed.
                graphs.recordings.clear()
                self._forget()
                torch.cuda.empty_cache()
                self._step_eagerly(batches)

    def _step_by_graphs(self, graphs: Graphs, batches: Sequence[Batch]) -> None:
        """One graph for a step of one batch; for several, here or elsewhere, one for each batch and one for the update."""
        if len(batches) * self.processes.size == 1:
            work = [(self._read_and_update, batches[0].parts)]
        else:
            work = [*((self._read, batch.parts) for batch in batches), (self._update, ())]
        keys = [(function.__name__, self.measures, *(tuple(part.shape) for part in parts)) for function, parts in work]
        try:
            for key, (function, parts) in zip(keys, work, strict=True):
                if key not in graphs.recordings:
                    self._record(graphs, key, function, parts)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.say(f"steps run one operation at a time, because recording failed: {str(error).splitlines()[0]}")
            self.graphs = None
            self._forget()
            self._step_eagerly(batches)
            return
        *reads, (last, (_, inputs)) = zip(keys, work, strict=True)
        for key, (_, parts) in reads:
            graphs.replay(key, parts)
        self._join()
        graphs.replay(last, inputs)

    def _record(self, graphs: Graphs, key: Hashable, function: Callable[..., None], parts: tuple[Tensor, ...]) -> None:
        assert self.optimizer.kernel is not None
        try:
            with self.optimizer.kernel.recording():
                graphs.record(key, function, parts)
        finally:
            # What a recording left behind has a place in the pool but no value.
            for weight in self.model.parameters():
                weight.grad = None

    def _forget(self) -> None:
        """Begin the step anew."""
        self.optimizer.clear()
        self.totals.zero_()
        self.meter.found.zero_()
        if self.routing is not None:
            self.routing.forget_step()

    def _sight(self, batch: Batch) -> Hashable:
        """What has to be run once before it is recorded."""
        return self.measures, *(tuple(part.shape) for part in batch.parts)

    def _read_and_update(self, *parts: Tensor) -> None:
        self._read(*parts)
        self._update()

    def _read(self, *parts: Tensor) -> None:
        """Forward and backward of one batch: adds to the gradients and to the sums of both losses."""
        *inputs, labels = parts
        with self.meter.watch() if self.measures else nullcontext():
            out = self.model(*inputs)
        loss, nll = token_losses(out.logits, labels, self.config.label_smoothing)
        if out.router_loss.requires_grad:  # a dense model's is a constant 0
            # A mean over the batch, which counts as the batch does: by its labels.
            loss = loss + out.router_loss * (labels != PAD).sum()
        (loss * (self.scale * self.share).to(loss.dtype)).backward()
        self.totals += torch.stack([loss.detach(), nll.detach()])
        if self.routing is not None:
            self.routing.note(out.routing)
        self.optimizer.collect()

    def _join(self) -> None:
        """Sum what the batches left over the processes; the gradients of experts are whole where the experts are."""
        left = [self.totals, *self.optimizer.shared_sums()]
        if self.measures:
            left.append(self.meter.residuals)
        if self.routing is not None:
            left += self.routing.of_step
        self.processes.sum_(left)

    def _update(self) -> None:
        """Clip and update where all is finite; leave the means of both losses and the gradient's norms in `measured`."""
        if self.measures:
            self.meter.note_gradients()
        means = self.totals * self.share
        dense, expert = (norm / self.scale for norm in self.optimizer.norms())
        norm = clipping_norm(dense, expert, self.counted_experts)
        finite = means[0].isfinite() & norm.isfinite()
        factor = 1 / self.scale
        if self.config.clip_norm:
            factor = factor * (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        factors = self.optimizer.update(factor, finite)
        if self.measures:
            self.meter.note_update(factors)
        if self.routing is not None:
            self.routing.end_step(finite)
        self.measured.copy_(torch.stack([*means.double(), *(each.double() for each in (norm, dense, expert))]))
        self.totals.zero_()
        self.optimizer.clear()


def _counted_experts(model: Model, config: TrainConfig, say: Callable[[str], None]) -> int:
    """As how many experts SparseClip counts them; with 1 the norm is the plain one."""
    if model.config.moe is None and config.clip == "sparse":
        say('train.clip = "sparse" clips a model without experts like any other')
    return 1 if model.config.moe is None or config.clip == "plain" else model.config.moe.experts
