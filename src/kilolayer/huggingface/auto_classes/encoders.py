"""An encoder as a masked language model or a classifier for Transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from kilolayer.errors import InputError, OptionError
from kilolayer.huggingface.auto_classes.base import KilolayerPreTrainedModel, output, token_loss
from kilolayer.huggingface.auto_classes.configuration import KilolayerConfig
from kilolayer.huggingface.auto_classes.padding import real_positions
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.models.encoder import Encoder
from kilolayer.models.head import Head
from kilolayer.models.outputs import EncoderOutput


class ReadsText(KilolayerPreTrainedModel):
    """The base of the encoder classes."""

    model: Encoder

    def read_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        token_type_ids: Tensor | None,
    ) -> EncoderOutput:
        """Run the encoder.

        input_ids: int64 [batch, length], or inputs_embeds: [batch, length, dim].
        attention_mask: 0 at padding.
        token_type_ids: int64 [batch, length], for a model with token types; by default all 0.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise InputError("no input was given", fix="give input_ids or inputs_embeds")
        _, real = real_positions(attention_mask, 0, given.shape[1])
        wanted = self.requested_outputs(output_hidden_states, output_attentions)
        return self.model(input_ids, embeddings=inputs_embeds, mask=real, types=token_type_ids, **wanted)


class KilolayerForMaskedLM(ReadsText):
    """A masked language model: logits over the vocabulary at each position."""

    shapes: ClassVar[tuple[Shape, ...]] = ("encoder",)

    @classmethod
    def model_config(cls, config: KilolayerConfig) -> ModelConfig:
        """The configuration of the wrapped model; raises if it has no output over the vocabulary."""
        found = super().model_config(config)
        if found.head is not None or found.vocab_size is None:
            raise OptionError(
                "this model has no token scores", fix="load it as AutoModelForSequenceClassification or AutoModel"
            )
        return found

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> MaskedLMOutput:
        """Logits at all positions, and the loss if labels are given.

        input_ids: int64 [batch, length], or inputs_embeds: [batch, length, dim].
        attention_mask: 0 at padding.
        token_type_ids: int64 [batch, length], for a model with token types; by default all 0.
        labels: int64 [batch, length], -100 where nothing was masked. In training, the loss includes the routers' auxiliary
        loss.
        """
        out = self.read_text(input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions, token_type_ids)
        assert out.logits is not None
        loss = None if labels is None else token_loss(out.logits, labels) + (out.router_loss if self.training else 0)
        states, weights = out.hidden_states, out.attention
        return output(MaskedLMOutput, loss=loss, logits=out.logits, hidden_states=states, attentions=weights)


class KilolayerForSequenceClassification(ReadsText):
    """A class or a number for each text. An encoder without a head is given a new one with `num_labels` outputs."""

    shapes: ClassVar[tuple[Shape, ...]] = ("encoder",)

    @classmethod
    def model_config(cls, config: KilolayerConfig) -> ModelConfig:
        """The configuration of the wrapped model, with its head."""
        found = super().model_config(config)
        if found.head is not None and found.head.outputs == config.num_labels:
            return found
        # The output over the vocabulary would be unused.
        without = {"tie_embeddings": True, "output_transform": False, "output_bias": False, "first_predicted": 0}
        return replace(found, head=replace(found.head or Head(), outputs=config.num_labels), **without)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> SequenceClassifierOutput:
        """Logits of the classes, or predicted numbers, and the loss if labels are given.

        input_ids: int64 [batch, length], or inputs_embeds: [batch, length, dim].
        attention_mask: 0 at padding.
        token_type_ids: int64 [batch, length], for a model with token types; by default all 0.
        labels: int64 [batch], the classes, or, with problem_type "regression", numbers [batch]. In training, the loss includes
        the routers' auxiliary loss.
        """
        out = self.read_text(input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions, token_type_ids)
        assert out.logits is not None
        loss = None if labels is None else self._loss(out.logits.float(), labels) + (out.router_loss if self.training else 0)
        states, weights = out.hidden_states, out.attention
        return output(SequenceClassifierOutput, loss=loss, logits=out.logits, hidden_states=states, attentions=weights)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.config.num_labels == 1 or self.config.problem_type == "regression":
            return F.mse_loss(logits.squeeze(-1), labels.view(logits.squeeze(-1).shape).to(logits.dtype))
        return F.cross_entropy(logits, labels.view(-1))
