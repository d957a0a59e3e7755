"""An encoder-decoder as a sequence-to-sequence model for Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils.generic import can_return_tuple

from kilolayer.errors import InputError
from kilolayer.huggingface.auto_classes.base import IGNORED, KilolayerPreTrainedModel, output, read, token_loss
from kilolayer.huggingface.auto_classes.borrowed_cache import Kept, borrow_cache
from kilolayer.huggingface.auto_classes.padding import real_positions
from kilolayer.layers.context import Sequences
from kilolayer.layers.stack import StackOutput
from kilolayer.models.config import Shape
from kilolayer.models.encoder_decoder import EncoderDecoder


@dataclass(frozen=True)
class Source:
    """The encoded source, and which of its positions are not padding: bool [batch, source], or None."""

    output: StackOutput
    real: Tensor | None


def encode(
    model: EncoderDecoder, ids: Tensor | None, attention_mask: Tensor | None, embeddings: Tensor | None, wanted: dict[str, bool]
) -> Source:
    """Encode sources: ids int64 [batch, source], or embeddings [batch, source, dim]. wanted: what else the encoder returns."""
    given = ids if ids is not None else embeddings
    _, real = real_positions(attention_mask, 0, 0 if given is None else given.shape[1])
    inputs = read(model.embedding if model.source_embedding is None else model.source_embedding, ids, embeddings, real)
    return Source(model.encoder(inputs, **wanted), inputs.real)


class SourceReader(nn.Module):
    """The encoder alone, as `generate` calls it. It owns no weights, which keep their names in the model."""

    main_input_name = "input_ids"
    model: EncoderDecoder

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)
        self.training = model.training

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """The encoder's states [batch, source, dim]."""
        wanted = {"hidden_states": bool(output_hidden_states), "attention_weights": bool(output_attentions)}
        found = encode(self.model, input_ids, attention_mask, inputs_embeds, wanted).output
        states, weights = found.hidden_states, found.attention
        return output(BaseModelOutput, last_hidden_state=found.states, hidden_states=states, attentions=weights)


class ReadsSources(KilolayerPreTrainedModel):
    """The base of both encoder-decoder classes: reads a source, then a target."""

    model: EncoderDecoder

    def get_encoder(self, modality: str | None = None) -> Any:
        """A module that encodes a source; decoding continues from its output."""
        return SourceReader(self.model)

    def read_both(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input_ids: Tensor | None,
        decoder_attention_mask: Tensor | None,
        encoder_outputs: Any,
        past_key_values: Kept | None,
        inputs_embeds: Tensor | None,
        decoder_inputs_embeds: Tensor | None,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> tuple[Seq2SeqModelOutput, Tensor]:
        """The states of source and target, and the routers' auxiliary loss, a scalar."""
        wanted = self.requested_outputs(output_hidden_states, output_attentions)
        target = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
        if target is None:
            raise InputError("no target was given", fix="give decoder_input_ids, or labels, or call generate")
        if encoder_outputs is None:
            source = encode(self.model, input_ids, attention_mask, inputs_embeds, wanted)
        else:
            names = ("last_hidden_state", "hidden_states", "attentions")
            given = encoder_outputs if isinstance(encoder_outputs, dict) else dict(zip(names, encoder_outputs, strict=False))
            states, *others = (given.get(name) for name in names)
            assert states is not None
            _, real = real_positions(attention_mask, 0, states.shape[1])
            source = Source(StackOutput(states, others[0], attention=others[1]), real)
        kept = self.kept(past_key_values, use_cache)
        cache, real = borrow_cache(kept, self.config.num_hidden_layers, decoder_attention_mask, target.shape[1])
        out = self.model.decoder(
            read(self.model.embedding, decoder_input_ids, decoder_inputs_embeds, real),
            memory=Sequences(source.output.states, source.real),
            cache=cache,
            **wanted,
        )
        found = output(
            Seq2SeqModelOutput,
            last_hidden_state=out.states,
            past_key_values=kept,
            decoder_hidden_states=out.hidden_states,
            encoder_last_hidden_state=source.output.states,
            encoder_hidden_states=source.output.hidden_states,
            decoder_attentions=out.attention,
            cross_attentions=out.cross_attention,
            encoder_attentions=source.output.attention,
        )
        return found, source.output.router_loss + out.router_loss


class KilolayerForSeq2SeqLM(ReadsSources, GenerationMixin):
    """Logits of the next target token at each target position."""

    shapes: ClassVar[tuple[Shape, ...]] = ("encoder_decoder",)

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
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Logits at all new target positions, and the loss if labels are given.

        input_ids: int64 [batch, source], or inputs_embeds, or encoder_outputs.
        attention_mask: 0 at the source's padding.
        decoder_input_ids: int64 [batch, target], following what past_key_values holds; by default the labels shifted by one.
        labels: int64 [batch, target], -100 to ignore. In training, the loss includes the routers' auxiliary loss.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        out, router_loss = self.read_both(
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
        )
        logits = self.model.scores(out["last_hidden_state"])
        loss = None if labels is None else token_loss(logits, labels) + (router_loss if self.training else 0)
        others = {name: value for name, value in out.items() if name != "last_hidden_state"}
        return output(Seq2SeqLMOutput, loss=loss, logits=logits, **others)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The start token, then all labels but the last: int64 [batch, target], with padding for ignored labels."""
        start, padding = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or padding is None:
            raise InputError("the configuration does not set decoder_start_token_id and pad_token_id", fix="set both")
        moved = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], dim=1)
        return moved.masked_fill(moved == IGNORED, padding)
