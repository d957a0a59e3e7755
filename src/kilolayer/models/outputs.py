"""The outputs of the three model shapes.

Logits have the dtype of the output table, except that a 16-bit table gives fp32 logits while gradients are disabled.
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
    """The output of an Encoder.

    states: [batch, length, dim].
    logits: [batch, length, vocabulary], or [batch, k, vocabulary] at k requested positions; with a head, [batch, outputs]; None
    without a vocabulary.
    router_loss: to be added to the loss; 0 in a dense model.
    hidden_states: the embedded input and the output of each layer; on request.
    routing: the routing statistics of each layer with experts, in order; None in a dense model.
    attention: the weights of each layer, [batch, heads, length, length]; on request.
    """

    states: Tensor
    logits: Tensor | None
    router_loss: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    routing: tuple[Routing, ...] | None = None
    attention: AttentionWeights | None = None


@dataclass(frozen=True)
class DecoderOutput:
    """The output of a Decoder, or of the decoder of an EncoderDecoder.

    states: [batch, length, dim]. logits: [batch, length, vocabulary].
    router_loss: to be added to the loss; 0 in a dense model.
    hidden_states: the embedded input and the output of each layer; on request.
    routing: the routing statistics of each layer with experts, in order; None in a dense model.
    attention: the weights of each layer, [batch, heads, length, past and new positions]; on request.
    cross_attention: in an EncoderDecoder, the weights over the source, [batch, heads, length, source]; on request.
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
    """The output of an EncoderDecoder.

    states: the decoder's, [batch, target, dim]. logits: [batch, target, vocabulary]. memory: the encoder's states,
    [batch, source, dim].
    router_loss: of both stacks, to be added to the loss; 0 in a dense model.
    hidden_states (the decoder's) and encoder_hidden_states: the embedded input and the output of each layer; on request.
    routing: the routing statistics of each layer with experts, the encoder's first; None in a dense model.
    attention [batch, heads, target, target], cross_attention [batch, heads, target, source] and encoder_attention
    [batch, heads, source, source]: the weights of each layer; on request.
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
    # Lets code that traverses a model's output, such as torch.export and FSDP, find its tensors.
    torch.export.register_dataclass(_output, serialized_type_name=f"kilolayer.{_output.__name__}")
