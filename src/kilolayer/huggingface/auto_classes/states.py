"""Any Kilolayer model as a base model for Transformers, without an output layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from kilolayer.errors import InputError
from kilolayer.huggingface.auto_classes.base import output
from kilolayer.huggingface.auto_classes.borrowed_cache import Kept, borrow_cache
from kilolayer.huggingface.auto_classes.encoders import ReadsText
from kilolayer.huggingface.auto_classes.translator import ReadsSources


class KilolayerModel(ReadsSources, ReadsText):
    """Returns the last hidden states of a model of any shape."""

    model: Any

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Kept | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        """Takes the arguments of the class for the model's shape, without labels. last_hidden_state: [batch, length, dim]."""
        if self.config.is_encoder_decoder:
            return self.read_both(
                input_ids,
                attention_mask,
                decoder_input_ids,
                decoder_attention_mask,
                encoder_outputs,
                past_key_values,
                inputs_embeds,
                decoder_inputs_embeds,
                use_cache,
                output_hidden_states,
                output_attentions,
            )[0]
        if self.config.model_config.shape == "encoder":
            out = self.read_text(
                input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions, token_type_ids
            )
            states, weights = out.hidden_states, out.attention
            return output(BaseModelOutput, last_hidden_state=out.states, hidden_states=states, attentions=weights)
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise InputError("no input was given", fix="give input_ids or inputs_embeds")
        kept = self.kept(past_key_values, use_cache)
        cache, real = borrow_cache(kept, self.config.num_hidden_layers, attention_mask, given.shape[1])
        wanted = self.requested_outputs(output_hidden_states, output_attentions)
        out = self.model(input_ids, embeddings=inputs_embeds, mask=real, cache=cache, **wanted)
        return output(
            BaseModelOutputWithPast,
            last_hidden_state=out.states,
            past_key_values=kept,
            hidden_states=out.hidden_states,
            attentions=out.attention,
        )
