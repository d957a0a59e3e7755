"""One training step: forward, backward, guard, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kilolayer.data.batches import Batch
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.tasks.translation import token_losses
from kilolayer.train.clip import clip_gradients
from kilolayer.train.config import TrainConfig
from kilolayer.train.guard import Guard
from kilolayer.train.norms import LayerNorms, copy_layers, gradient_norms, update_norms, watch_residuals
from kilolayer.train.optimizer import set_learning_rate

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """loss (smoothed) and nll: means over the step's target tokens. fault: what was not finite; the state is untouched then."""

    loss: float
    nll: float
    tokens: int
    gradient_norm: float
    clipped: bool
    fault: str | None


class Stepper:
    """Runs steps on a model and its optimizer."""

    def __init__(
        self, model: EncoderDecoder, optimizer: torch.optim.Optimizer, config: TrainConfig, guard: Guard, device: torch.device
    ) -> None:
        self.model, self.optimizer, self.config, self.guard, self.device = model, optimizer, config, guard, device

    def step(self, batches: Sequence[Batch], lr: float, norms: LayerNorms | None = None) -> StepResult:
        """One update from `batches`; with `norms`, also measure each layer."""
        tokens = sum(batch.tokens for batch in batches)
        with nullcontext() if norms is None else watch_residuals(self.model, norms):
            loss, nll = self._accumulate(batches, tokens)
        if self.guard.scale != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.guard.scale)
        if norms is not None:
            norms.gradient = gradient_norms(self.model)
        norm = float(clip_gradients(self.model, self.config.clip))
        fault = next((name for name, value in (("the loss", loss), ("the gradient", norm)) if not math.isfinite(value)), None)
        if fault is None:
            before = None if norms is None else copy_layers(self.model)
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            if norms is not None and before is not None:
                norms.update = update_norms(self.model, before)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, nll, tokens, norm, 0 < self.config.clip < norm, fault)

    def _accumulate(self, batches: Sequence[Batch], tokens: int) -> tuple[float, float]:
        """Add up the gradients of all batches, each token with the same weight; return the means of both losses."""
        losses = []
        for batch in batches:
            source, target, labels = (
                part.to(self.device, non_blocking=True) for part in (batch.source, batch.target, batch.labels)
            )
            with self._precision():
                logits = self.model(source, target).logits
            loss, nll = token_losses(logits, labels, self.config.label_smoothing)
            (loss * (self.guard.scale / tokens)).backward()
            losses.append(torch.stack([loss.detach(), nll.detach()]))
        mean = torch.stack(losses).sum(dim=0) / tokens
        return float(mean[0]), float(mean[1])

    def _precision(self) -> AbstractContextManager[object]:
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.config.precision])
