"""The runtime of a model: everything about how its work is run that can be done faster than plainly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.block import Block
from kilolayer.layers.context import Sequences
from kilolayer.layers.modules import shallow_copy
from kilolayer.layers.stack import Stack
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.trainable import Trainable
from kilolayer.runtime.activations import Kept, kept_by_plain_layer
from kilolayer.runtime.reader import PAD, BeamSteps, Reader, Reads
from kilolayer.runtime.recorder import Recorder

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyModel = TypeVar("AnyModel", bound=Trainable)
Generator = TypeVar("Generator", bound=EncoderDecoder | Decoder)
Recompute = Literal["none", "selective", "layer"]


class Runtime:
    """Runs a model plainly: its own modules, torch's own operations. A faster runtime overrides what it has a faster form of.

    What it returns has the same weights and computes the same function, up to the rounding of sums in another order.
    """

    def bind(self, model: AnyModule) -> AnyModule:
        """The model with this runtime: a second model that shares all modules and weights."""
        if runtime_of(model) is self:
            return model
        return shallow_copy(model, runtime=self)

    def training_form(
        self, model: AnyModel, device: torch.device, say: Callable[[str], None], *, eager: bool, recompute: Recompute
    ) -> tuple[AnyModel, Recorder]:
        """The form of `model` that is trained, and the recorder that runs its steps.

        eager: compile and record nothing. recompute: what the backward pass recomputes to save memory.
        """
        if recompute != "none":
            say(f"everything is kept for the backward pass: plain layers do not recompute ({recompute!r})")
        return self.bind(model), Recorder(device)

    def decoding_form(self, model: Generator, *, int8: bool = False) -> Generator:
        """The form of `model` with its current weights that decodes; a decoding form is its own.

        int8: compute large products in 8-bit integers, which changes the function slightly.
        """
        if int8:
            raise OptionError("plain layers cannot compute in int8", fix="use fp32")
        return model

    def reader(self, model: EncoderDecoder | Decoder, source: Tensor, *, width: int, max_length: int) -> Reads:
        """What a search reads from: `width` hypotheses of each source, int64 [batch, length]."""
        return Reader(self.decoding_form(model), source, width=width, max_length=max_length)

    def beam_steps(self, model: EncoderDecoder | Decoder, source: Tensor, *, beam: int, max_length: int) -> BeamSteps | None:
        """A beam search that chooses on the device; None: the search reads and chooses step by step."""
        return None

    def token_losses(self, logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """The smoothed loss and the negative log-likelihood, each summed over all labels that are not padding.

        logits [batch, length, vocabulary]; labels int64 [batch, length]. The smoothed target has 1 - smoothing on the label and
        the rest spread evenly over the vocabulary. The backward pass may overwrite the logits with their gradient.
        """
        log_probabilities = F.log_softmax(logits.flatten(0, 1).float(), dim=-1)
        nll = F.nll_loss(log_probabilities, labels.flatten(), reduction="none")
        spread = -log_probabilities.mean(dim=-1) if smoothing else nll
        return sum_losses(nll, spread, labels.flatten(), smoothing)

    def kept_by_layer(self, stack: Stack, block: Block, inputs: Sequences, memory: Sequences | None) -> Kept:
        """Bytes that a layer of a stack on the meta device keeps for the backward pass, and bytes that all layers share."""
        return kept_by_plain_layer(stack, block, inputs, memory)

    def update_kernel(self, groups: list[Any]) -> Any:
        """A kernel for the gradients and updates of an optimizer's groups; None: the optimizer computes them by lists."""
        return None


def sum_losses(nll: Tensor, spread: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The smoothed loss and the negative log-likelihood, summed over the labels int64 [rows] that are not padding.

    nll: - log p(label) [rows]. spread: the mean of - log p over the vocabulary [rows].
    """
    nll, spread = (each.masked_fill(labels == PAD, 0.0).sum() for each in (nll, spread))
    return ((1 - smoothing) * nll + smoothing * spread if smoothing else nll), nll


PLAIN = Runtime()


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime that a model is bound to; the plain one if it is bound to none."""
    return vars(model).get("runtime", PLAIN)
