"""A decoder as a causal language model for Transformers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from kilolayer.errors import InputError
from kilolayer.huggingface.auto_classes.base import KilolayerPreTrainedModel, output, token_loss
from kilolayer.huggingface.auto_classes.borrowed_cache import Kept, borrow_cache
from kilolayer.models.config import Shape
from kilolayer.models.decoder import Decoder


class KilolayerForCausalLM(KilolayerPreTrainedModel, GenerationMixin):
    """A causal language model: logits of the next token at each position."""

    shapes: ClassVar[tuple[Shape, ...]] = ("decoder",)
    model: Decoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Kept | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits at all new positions, and the loss if labels are given.

        input_ids: int64 [batch, length], or inputs_embeds: [batch, length, dim], following what past_key_values holds.
        attention_mask: [batch, past and new length], 0 at padding, on either side; padding takes up no position.
        labels: int64 [batch, length], the tokens themselves, -100 to ignore. In training, the loss includes the routers'
        auxiliary loss.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise InputError("no input was given", fix="give input_ids or inputs_embeds")
        kept = self.kept(past_key_values, use_cache)
        cache, real = borrow_cache(kept, self.config.num_hidden_layers, attention_mask, given.shape[1])
        wanted = self.requested_outputs(output_hidden_states, output_attentions)
        out = self.model(input_ids, embeddings=inputs_embeds, mask=real, cache=cache, **wanted)
        loss = None
        if labels is not None:
            loss = token_loss(out.logits[:, :-1], labels[:, 1:]) + (out.router_loss if self.training else 0)
        return output(
            CausalLMOutputWithPast,
            loss=loss,
            logits=out.logits,
            past_key_values=kept,
            hidden_states=out.hidden_states,
            attentions=out.attention,
        )
