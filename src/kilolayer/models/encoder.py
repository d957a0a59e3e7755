"""An encoder alone: BERT's shape, and the trunk of an image model."""

from __future__ import annotations

import torch
from torch import Tensor

from kilolayer import recipes
from kilolayer.config import strict
from kilolayer.layers.options import Activation, Norm, Positions
from kilolayer.models.config import ModelConfig
from kilolayer.models.head import Head
from kilolayer.models.model import Model
from kilolayer.models.outputs import EncoderOutput
from kilolayer.models.sequence_head import SequenceHead
from kilolayer.moe.config import MoE
from kilolayer.recipes.base import Recipe


class Encoder(Model):
    """Every position looks at every other. The options are those of `ModelConfig`, where each is explained."""

    @strict
    def __init__(
        self,
        vocab_size: int | None,
        dim: int,
        heads: int,
        ffn_dim: int,
        layers: int,
        recipe: str | Recipe = recipes.DEFAULT,
        *,
        kv_heads: int | None = None,
        activation: Activation = "relu",
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        positions: Positions = "sinusoidal",
        max_length: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        drop_path: float = 0.0,
        pad_id: int | None = 0,
        tie_embeddings: bool = True,
        scale_embeddings: bool = True,
        final_norm: bool | None = None,
        moe: MoE | None = None,
        head: Head | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._build(ModelConfig.of("encoder", locals()), device, dtype)

    def _allocate(self) -> None:
        config, vocab_size = self.config, self.config.vocab_size
        self.embedding = None if vocab_size is None else self._embedding(vocab_size, "encoder")
        self.encoder = self._stack("encoder")
        self.vocabulary = None if vocab_size is None or config.tie_embeddings else self._vocabulary(vocab_size)
        self.head = None if config.head is None else SequenceHead(config.dim, config.head)

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        hidden_states: bool = False,
    ) -> EncoderOutput:
        """Encode a batch.

        tokens: int64 [batch, length]; or embeddings: [batch, length, dim], taken as they are, positions added.
        mask: bool [batch, length], True at real positions; by default, where tokens are not `pad_id`.
        segments: int [batch, length], the document of each position; documents do not see each other.
        """
        inputs = self._read(self.embedding, tokens, embeddings, mask, segments)
        out = self.encoder(inputs, hidden_states=hidden_states)
        logits = self._scores(out.states) if self.head is None else self.head(out.states, inputs.real)
        return EncoderOutput(out.states, logits, out.router_loss, out.hidden_states, out.routing)

    def _scores(self, states: Tensor) -> Tensor | None:
        if self.vocabulary is not None:
            return self.vocabulary(states)
        return None if self.embedding is None else self.embedding.scores(states)
