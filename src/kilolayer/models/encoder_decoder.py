"""An encoder-decoder model: the shape of a translation model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Unpack

from torch import Tensor

from kilolayer import recipes
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.layers.cache import Cache
from kilolayer.layers.context import Sequences
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.options import ModelOptions, takes_options
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput
from kilolayer.recipes.base import Recipe


class EncoderDecoder(Model):
    """An encoder, and a causal decoder that also attends to the encoder's output. The options are those of `ModelConfig`.

    layers: the number of layers of each stack whose own number is not given.
    """

    @takes_options
    def __init__(
        self,
        vocab_size: int,
        dim: int,
        heads: int,
        ffn_dim: int,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        recipe: str | Recipe = recipes.DEFAULT,
        *,
        layers: int | None = None,
        source_vocab_size: int | None = None,
        tie_embeddings: bool | Literal["output"] | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        config = ModelConfig.of("encoder_decoder", {**locals(), **options})
        if layers is None and (encoder_layers is None or decoder_layers is None):
            fix = "give layers for both stacks, or encoder_layers and decoder_layers"
            raise OptionError("the number of layers is missing", where="in EncoderDecoder(...)", fix=fix)
        self._build(config, options.get("device"), options.get("dtype"))

    def _allocate(self) -> None:
        config, vocab_size = self.config, self.config.vocab_size
        assert vocab_size is not None
        if config.tie_embeddings is True:
            self.embedding = self._embedding(vocab_size, "encoder")
            self.source_embedding = None
        else:
            self.source_embedding = self._embedding(config.source_vocab_size or vocab_size, "encoder")
            self.embedding = self._embedding(vocab_size, "decoder")
        self.encoder = self._stack("encoder")
        self.decoder = self._stack("decoder")
        self.vocabulary = None if config.tie_embeddings else self._vocabulary(vocab_size)
        self.output_bias = self._output_bias()

    def forward(
        self,
        source: Tensor | None = None,
        target: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        source_segments: Tensor | None = None,
        target_segments: Tensor | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> EncoderDecoderOutput:
        """Compute the logits of the next target token at each target position, [batch, target, vocabulary].

        source: int64 [batch, source]; or embeddings: [batch, source, dim], used without scaling; positions are added.
        target: int64 [batch, target], shifted right by the caller: the decoder's input, not the labels.
        source_mask, target_mask: bool [batch, length], True at real positions; by default, where ids are not `pad_id`.
        source_segments, target_segments: int [batch, length], the document of each position; given together.
        hidden_states, attention_weights: return them too. With attention_weights, no fast form of the layers is used.
        """
        if target is None:
            raise InputError("no target was given", fix="call model(source, target), or model.encode(source)")
        if (source_segments is None) != (target_segments is None):
            raise InputError("source_segments and target_segments belong together", fix="give both or neither")
        inputs = self._read(self.source_embedding or self.embedding, source, embeddings, source_mask, source_segments)
        encoded = self.encoder(inputs, hidden_states=hidden_states, attention_weights=attention_weights)
        memory = replace(inputs, states=encoded.states)
        decoded = self._decode(
            target,
            memory,
            target_mask,
            segments=target_segments,
            hidden_states=hidden_states,
            attention_weights=attention_weights,
        )
        return EncoderDecoderOutput(
            decoded.states,
            decoded.logits,
            memory.states,
            encoded.router_loss + decoded.router_loss,
            decoded.hidden_states,
            encoded.hidden_states,
            ((encoded.routing or ()) + (decoded.routing or ())) or None,
            decoded.attention,
            decoded.cross_attention,
            encoded.attention,
        )

    def encode(
        self, source: Tensor | None = None, *, embeddings: Tensor | None = None, mask: Tensor | None = None
    ) -> Sequences:
        """Run the encoder; return its states [batch, source, dim] with their padding mask, as `decode` takes them."""
        inputs = self._read(self.source_embedding or self.embedding, source, embeddings, mask, None)
        return replace(inputs, states=self.encoder(inputs).states)

    def decode(
        self,
        target: Tensor,
        memory: Sequences,
        *,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        attention_weights: bool = False,
    ) -> DecoderOutput:
        """Run the decoder on `target`, int64 [batch, target], which continues the sequences in `cache`, if one is given.

        memory: from `encode`. mask: bool [batch, target], True at real positions; by default, where ids are not `pad_id`.
        """
        return self._decode(target, memory, mask, cache=cache, attention_weights=attention_weights)

    def scores(self, states: Tensor) -> Tensor:
        """Logits from the decoder's output: [batch, target, dim] to [batch, target, vocabulary]."""
        return self._finish_scores(self.embedding.scores(states) if self.vocabulary is None else self.vocabulary(states))

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for step-by-step decoding of up to `capacity` target positions."""
        return Cache(self.config.depths.decoder, capacity)

    def _decode(
        self,
        target: Tensor,
        memory: Sequences,
        mask: Tensor | None,
        *,
        cache: Cache | None = None,
        segments: Tensor | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> DecoderOutput:
        if not isinstance(memory, Sequences):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"memory is {shown(type(memory))}", fix="give what model.encode(source) returns")
        inputs = self._read(self.embedding, target, None, mask, segments)
        if inputs.states.shape[0] != memory.states.shape[0]:
            raise InputError(
                f"{inputs.states.shape[0]} targets for {memory.states.shape[0]} sources", fix="give the same number of both"
            )
        out = self.decoder(inputs, memory=memory, cache=cache, hidden_states=hidden_states, attention_weights=attention_weights)
        return DecoderOutput(
            out.states,
            self.scores(out.states),
            out.router_loss,
            out.hidden_states,
            out.routing,
            out.attention,
            out.cross_attention,
        )
