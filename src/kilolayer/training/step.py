"""One training step: forward and backward of each batch, sum over the processes, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.models.model import Model
from kilolayer.models.shards import group_in_step
from kilolayer.models.trainable import StepSums, Trainable
from kilolayer.moe.clip import clipping_norm
from kilolayer.optimizers.optimizer import Optimizer
from kilolayer.parallel.processes import Processes
from kilolayer.runtime.recorder import WorkItem
from kilolayer.runtime.runtime import PLAIN, Runtime
from kilolayer.tasks.task import Batch, DeviceWork, Loss, ModelOutput
from kilolayer.tasks.token_loss import token_loss
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.norms import LayerNorms, Meter
from kilolayer.training.routing_meter import RoutingMeter


@dataclass(frozen=True)
class StepResult:
    """The result of a step; loss and nll are means over the step's labels.

    loss: what is minimized, with label smoothing and, in a sparse model, the router loss. gradient_norm: the norm that is
    clipped; dense_norm and expert_norm: the gradient norms of all other weights and of the experts. fault: what was not finite;
    if it is set, the state was not changed.
    """

    loss: float
    nll: float
    tokens: int
    gradient_norm: float
    dense_norm: float
    expert_norm: float
    clipped: bool
    fault: str | None


LossFunction = Callable[..., Loss]
"""Called with the model, a batch's parts and `hidden_states`, like `Task.loss`."""
Parts = tuple[Tensor, ...]


class Stepper:
    """Takes training steps with a model and its optimizer. Nothing is read from the device before a step has ended.

    Each of several `processes` has its own batches; the gradients are summed before the update, which is the same on all.
    loss: the task's loss; by default that of tokens. runtime: makes the form of the model that is trained, and the recorder
    that runs the pieces of a step, directly or as captured CUDA graphs. device_work: what is done with each batch before that.
    """

    def __init__(
        self,
        model: Trainable,
        optimizer: Optimizer,
        config: TrainConfig,
        guard: Guard,
        device: torch.device,
        say: Callable[[str], None] = print,
        routing: RoutingMeter | None = None,
        processes: Processes | None = None,
        loss: LossFunction | None = None,
        runtime: Runtime = PLAIN,
        device_work: DeviceWork | None = None,
    ) -> None:
        self.device, self.device_work = device, device_work
        self.model, self.optimizer, self.config = model, optimizer, config
        self.guard = guard
        self.loss = loss or partial(token_loss, smoothing=config.label_smoothing)
        self.processes = processes or Processes()
        self.routing = RoutingMeter(model, device) if routing is None and model.config.moe is not None else routing
        self.sums: list[StepSums] = [each for each in (self.routing, model.step_sums()) if each is not None]
        self.counted_experts = _counted_experts(model, config, say)
        self.totals = torch.zeros(2, device=device)
        self.share = torch.zeros((), dtype=torch.float64, device=device)  # 1 / labels of the step
        self.scale = torch.ones((), dtype=torch.float64, device=device)  # loss scale
        self.measured = torch.zeros(5, dtype=torch.float64, device=device)
        self.buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # with their values before the step
        self.meter, self.measures = Meter(model, optimizer), False
        self.can_restart, self.together = True, group_in_step(model) is not None
        self.form, self.recorder = runtime.training_form(model, device, say, eager=config.eager, recompute=config.recompute)
        self.device_recorder = self.recorder.sharing_pool("work before steps runs")
        if self.recorder.records and not optimizer.records:
            say(f"updates run in eager mode, because {optimizer.rule.title} cannot be recorded")

    def step(self, batches: Sequence[Batch], lr: float, norms: LayerNorms | None = None) -> StepResult:
        """Take one optimizer step on `batches` of all processes; with `norms`, also measure each layer."""
        tokens = self.processes.total(sum(batch.tokens for batch in batches))
        if not tokens:
            raise InputError(
                "nothing in this step can be predicted",
                fix="if the vocabulary knows none of its tokens, take one of this text, or set tokenizer.byte_fallback",
            )
        self.optimizer.lr.fill_(lr)
        self.share.fill_(1 / tokens)
        self.scale.fill_(self.guard.scale)
        self._keep_buffers()
        self.measures, self.can_restart = norms is not None, True
        items = self._work_items([self._parts(batch) for batch in batches])
        self.recorder.run(items, gradients=True, restart=self.restart, around_capture=self._around_capture)
        if norms is not None:
            self.meter.read(norms, len(batches) * self.processes.size, self.guard.scale, self.processes)
        loss, nll, norm, dense, expert = self.measured.tolist()
        fault = next((name for name, value in (("the loss", loss), ("the gradient", norm)) if not math.isfinite(value)), None)
        if fault is not None:
            self._restore_buffers()
        return StepResult(loss, nll, tokens, norm, dense, expert, 0 < self.config.clip_norm < norm, fault)

    def _keep_buffers(self) -> None:
        """Keep what the forward pass of a task's own model may change, such as the running means of a BatchNorm."""
        if not isinstance(self.model, Model):
            each = ((module, *named) for module in self.model.modules() for named in module.named_buffers(recurse=False))
            self.buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in each]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Undo what forward passes have changed since the step began."""
        for module, name, buffer, before in self.buffers:
            setattr(module, name, buffer.copy_(before))

    def _parts(self, batch: Batch) -> Parts:
        """What the loss is given: the batch's parts, or what the task makes of them on the device."""
        if self.device_work is None:
            return batch.parts
        if not self.device_work.recorded:
            return self.device_work(*(each.to(self.device, non_blocking=True) for each in batch.parts))
        parts = self.device_recorder.run([WorkItem("device_work", self.device_work, batch.parts)], restart=lambda: True)
        return tuple(each.clone() for each in parts)  # a recording writes those of the next batch into the same memory

    def _work_items(self, batches: Sequence[Parts]) -> list[WorkItem]:
        """The pieces of a step: one piece for a single batch on one process; otherwise each batch, the sum, and the update.

        An update that cannot be recorded is a piece of its own.
        """
        records = self.optimizer.records
        if len(batches) * self.processes.size == 1 and records:
            return [WorkItem(("step", self.measures), self.accumulate_and_update, batches[0])]
        return [
            *(WorkItem(("accumulate", self.measures), self.accumulate, parts) for parts in batches),
            WorkItem(None, self.sum_over_processes),
            WorkItem(("update", self.measures) if records else None, self.update),
        ]

    def accumulate_and_update(self, *parts: Tensor) -> None:
        """A whole step: one batch on one process."""
        self.accumulate(*parts)
        self.update()

    def accumulate(self, *parts: Tensor) -> None:
        """Forward and backward of one batch; adds to the gradients and to the sums of both losses."""
        with self.meter.recording_logits(self.form) if self.measures else nullcontext():
            loss = self.loss(self.form, parts, hidden_states=self.measures)
        total, out = loss.total, loss.output
        if self.measures:
            self.meter.record_residuals(out)
        if isinstance(out, ModelOutput) and out.router_loss.requires_grad:  # that of a dense model is a constant 0
            # It is a mean over the batch and is weighted, like the batch, by its number of labels.
            total = total + out.router_loss * loss.count
        (total * (self.scale * self.share).to(total.dtype)).backward()
        self.totals += torch.stack([total.detach(), loss.nll.detach()])
        for each in self.sums:
            each.record(out)
        self.optimizer.collect()

    def sum_over_processes(self) -> None:
        """Sum losses and gradients over all processes; expert gradients are already complete where the experts are."""
        left = [self.totals, *self.optimizer.shared_sums()]
        if self.measures:
            left.append(self.meter.residuals)
        for each in self.sums:
            left += each.of_step
        self.can_restart = self.processes.size == 1  # other processes would continue
        self.processes.sum_(left)

    def update(self) -> None:
        """Clip and update if everything is finite; store the mean losses and the gradient norms in `measured`."""
        if self.measures:
            self.meter.record_gradients()
        means = self.totals * self.share
        dense, expert = (norm / self.scale for norm in self.optimizer.norms())
        norm = clipping_norm(dense, expert, self.counted_experts)
        finite = means[0].isfinite() & norm.isfinite()
        factor = 1 / self.scale
        if self.config.clip_norm:
            factor = factor * (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.can_restart = False  # an update must not be repeated
        norms = self.optimizer.update(factor, finite, self.measures)
        if norms is not None:
            self.meter.record_update(norms)
        for each in self.sums:
            each.end_step(finite)
        self.measured.copy_(torch.stack([*means.double(), *(each.double() for each in (norm, dense, expert))]))
        self.totals.zero_()
        self.optimizer.clear()

    @property
    def can_abandon(self) -> bool:
        """Whether the step can still be undone by `restart`: no part of it that includes the update has been replayed."""
        replayed = self.recorder.replaying
        return self.can_restart and (replayed is None or replayed.function == self.accumulate)

    def restart(self) -> bool:
        """Undo what was accumulated; False if it is too late to start the step again, or others would have to as well."""
        if not self.can_restart or self.together:
            return False
        self.optimizer.clear()
        self.totals.zero_()
        self._restore_buffers()
        self.meter.reset()
        for each in self.sums:
            each.discard_step()
        return True

    @contextmanager
    def _around_capture(self) -> Iterator[None]:
        self.can_restart = False  # a capture cannot be abandoned halfway
        try:
            with self.optimizer.recording():
                yield
        finally:
            # Gradients left by a capture have memory in the pool but no values.
            for weight in self.model.parameters():
                weight.grad = None
            self.can_restart = True


def _counted_experts(model: Trainable, config: TrainConfig, say: Callable[[str], None]) -> int:
    """The number of experts that SparseClip assumes; with 1 the norm is the plain one."""
    if model.config.moe is None and config.clip == "sparse":
        say('train.clip = "sparse" has no effect on a model without experts')
    return 1 if model.config.moe is None or config.clip == "plain" else model.config.moe.experts
