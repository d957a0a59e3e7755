"""What models return.

Logits have the dtype of the output table; where that is 16 bits and no gradient is asked, they are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kilolayer.layers.routing import Routing


@dataclass(frozen=True)
class EncoderOutput:
    """states [batch, length, dim]; logits [batch, length, vocabulary], or of the places that were asked for alone; None without
    a vocabulary. With a head, logits are [batch, outputs].

    hidden_states, on request: the embedded input and the output of each layer. router_loss: to be added to the loss, 0 in a
    dense model. routing: what each layer with experts tells, from the input on; None in a dense model.
    """

    states: Tensor
    logits: Tensor | None
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None


@dataclass(frozen=True)
class DecoderOutput:
    """states [batch, length, dim]; logits [batch, length, vocabulary].

    hidden_states, on request: the embedded input and the output of each layer. router_loss: to be added to the loss, 0 in a
    dense model. routing: what each layer with experts tells, from the input on; None in a dense model.
    """

    states: Tensor
    logits: Tensor
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None


@dataclass(frozen=True)
class EncoderDecoderOutput:
    """states [batch, target, dim]; logits [batch, target, vocabulary]; memory [batch, source, dim], the encoder's states.

    encoder_hidden_states and hidden_states (the decoder's), on request. router_loss: to be added to the loss, 0 in a dense
    model. routing: what each layer with experts tells, the encoder's first; None in a dense model.
    """

    states: Tensor
    logits: Tensor
    memory: Tensor
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
