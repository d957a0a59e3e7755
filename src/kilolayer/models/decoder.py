"""A decoder-only model: the shape of a language model."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from kilolayer import recipes
from kilolayer.layers.cache import Cache
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.options import ModelOptions, takes_options
from kilolayer.models.outputs import DecoderOutput
from kilolayer.recipes.base import Recipe


class Decoder(Model):
    """A stack with causal attention: no position attends to later ones. The options are those of `ModelConfig`."""

    @takes_options
    def __init__(
        self,
        vocab_size: int,
        dim: int,
        heads: int,
        ffn_dim: int,
        layers: int,
        recipe: str | Recipe = recipes.DEFAULT,
        *,
        tie_embeddings: bool | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        self._build(ModelConfig.of("decoder", {**locals(), **options}), options.get("device"), options.get("dtype"))

    def _allocate(self) -> None:
        config, vocab_size = self.config, self.config.vocab_size
        assert vocab_size is not None
        self.embedding = self._embedding(vocab_size, "decoder")
        self.decoder = self._stack("decoder")
        self.vocabulary = None if config.tie_embeddings else self._vocabulary(vocab_size)
        self.output_bias = self._output_bias()

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> DecoderOutput:
        """Compute the logits of the next token at each position, [batch, length, vocabulary].

        tokens: int64 [batch, length]; or embeddings: [batch, length, dim], used without scaling; positions are added.
        mask: bool [batch, length], True at real positions; by default, where tokens are not `pad_id`.
        segments: int [batch, length], the document of each position; documents do not see each other.
        cache: from `new_cache`; `tokens` then continue the sequences that it holds.
        hidden_states, attention_weights: return them too. With attention_weights, no fast form of the layers is used.
        """
        inputs = self._read(self.embedding, tokens, embeddings, mask, segments)
        out = self.decoder(inputs, cache=cache, hidden_states=hidden_states, attention_weights=attention_weights)
        logits = self.scores(out.states)
        return DecoderOutput(out.states, logits, out.router_loss, out.hidden_states, out.routing, out.attention)

    def scores(self, states: Tensor) -> Tensor:
        """Logits from the decoder's output: [batch, length, dim] to [batch, length, vocabulary]."""
        return self._finish_scores(self.embedding.scores(states) if self.vocabulary is None else self.vocabulary(states))

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for step-by-step decoding of up to `capacity` positions."""
        return Cache(self.config.depths.decoder, capacity)
