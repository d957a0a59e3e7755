"""What models return.

Logits have the dtype of the output table; where that is 16 bits and no gradient is asked, they are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.export
from torch import Tensor

from kilolayer.layers.routing import Routing
from kilolayer.layers.stack import AttentionWeights


@dataclass(frozen=True)
class EncoderOutput:
    """states [batch, length, dim]; logits [batch, length, vocabulary], or of the places that were asked for alone; None without
    a vocabulary. With a head, logits are [batch, outputs].

    hidden_states, on request: the embedded input and the output of each layer. router_loss: to be added to the loss, 0 in a
    dense model. routing: what each layer with experts tells, from the input on; None in a dense model. attention, on request:
    the weights of each layer, [batch, heads, length, length].
    """

    states: Tensor
    logits: Tensor | None
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None


@dataclass(frozen=True)
class DecoderOutput:
    """states [batch, length, dim]; logits [batch, length, vocabulary].

    hidden_states, on request: the embedded input and the output of each layer. router_loss: to be added to the loss, 0 in a
    dense model. routing: what each layer with experts tells, from the input on; None in a dense model. attention, on request:
    the weights of each layer, [batch, heads, length, all that was read]; cross_attention, of a decoder that reads a source:
    [batch, heads, length, source].
    """

    states: Tensor
    logits: Tensor
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None
    cross_attention: AttentionWeights | None = None


@dataclass(frozen=True)
class EncoderDecoderOutput:
    """states [batch, target, dim]; logits [batch, target, vocabulary]; memory [batch, source, dim], the encoder's states.

    encoder_hidden_states and hidden_states (the decoder's), on request. router_loss: to be added to the loss, 0 in a dense
    model. routing: what each layer with experts tells, the encoder's first; None in a dense model. On request, the weights of
    each layer: attention and cross_attention (the decoder's), [batch, heads, target, target] and [batch, heads, target,
    source], and encoder_attention, [batch, heads, source, source].
    """

    states: Tensor
    logits: Tensor
    memory: Tensor
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None
    cross_attention: AttentionWeights | None = None
    encoder_attention: AttentionWeights | None = None


for _output in (EncoderOutput, DecoderOutput, EncoderDecoderOutput):
    # What walks over a model's output, as torch.export and FSDP do, sees its tensors.
    torch.export.register_dataclass(_output, serialized_type_name=f"kilolayer.{_output.__name__}")
