"""An encoder-only model: the shape of BERT, and the trunk of an image model."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer import recipes
from kilolayer.errors import InputError, shown
from kilolayer.layers.context import Sequences
from kilolayer.layers.embedding import TokenTypes, check_range
from kilolayer.models.config import ModelConfig
from kilolayer.models.head import Head
from kilolayer.models.model import Model
from kilolayer.models.options import ModelOptions, takes_options
from kilolayer.models.output import OutputTransform
from kilolayer.models.outputs import EncoderOutput
from kilolayer.models.sequence_head import SequenceHead
from kilolayer.recipes.base import Recipe
from kilolayer.renamed import renamed_arguments


class Encoder(Model):
    """A stack in which every position attends to every other. The options are those of `ModelConfig`."""

    @takes_options
    def __init__(
        self,
        vocab_size: int | None,
        dim: int,
        heads: int,
        ffn_dim: int,
        layers: int,
        recipe: str | Recipe = recipes.DEFAULT,
        *,
        multiway: int | None = None,
        tie_embeddings: bool | None = None,
        token_types: int | None = None,
        output_transform: bool = False,
        head: Head | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        self._build(ModelConfig.of("encoder", {**locals(), **options}), options.get("device"), options.get("dtype"))

    def _allocate(self) -> None:
        config, vocab_size = self.config, self.config.vocab_size
        self._allocate_input()
        self.encoder = self._stack("encoder")
        self.transform = OutputTransform(config) if config.output_transform else None
        of_decoder = config.patch_decoder is not None
        self.vocabulary = None if vocab_size is None or config.tie_embeddings or of_decoder else self._vocabulary(vocab_size)
        self.output_bias = None if of_decoder else self._output_bias()
        first = 0 if config.image is None else config.image.first_patch
        self.head = None if config.head is None else SequenceHead(config, config.head, first)

    def _allocate_input(self) -> None:
        config, vocab_size = self.config, self.config.vocab_size
        self.embedding = None if vocab_size is None else self._embedding(vocab_size, "encoder")
        self.token_types = None if config.token_types is None else TokenTypes(config.token_types, config.dim)

    @renamed_arguments(places="positions")
    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        split: int | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> EncoderOutput:
        """Encode a batch: states [batch, length, dim], and logits over the vocabulary or from the head.

        tokens: int64 [batch, length]; or embeddings: [batch, length, dim], used without scaling; positions are added.
        mask: bool [batch, length], True at real positions; by default, where tokens are not `pad_id`.
        segments: int [batch, length], the document of each position; documents do not see each other.
        types: int64 [batch, length], the type of each token, such as its sentence in a pair; by default all are 0.
        positions: int64 [batch, k], the positions to predict; logits are then [batch, k, vocabulary].
        split: with `multiway`, the number of positions of the first modality, 0 to length, in every sequence of the batch. With
        it, embeddings and tokens can both be given: the embeddings come first, and the split is their number.
        hidden_states, attention_weights: return them too. With attention_weights, no fast form of the layers is used.
        """
        if self.config.multiway and tokens is not None and embeddings is not None:
            tokens, embeddings, mask, split = None, *self._joined(tokens, embeddings, mask, split)
        inputs = self._typed(self._read(self.embedding, tokens, embeddings, mask, segments), types)
        inputs = replace(inputs, split=self._checked(split, inputs.states.shape[1]))
        if positions is not None:
            self._check_positions(positions, inputs.states)
        return self._encode(inputs, positions, hidden_states=hidden_states, attention_weights=attention_weights)

    def _encode(
        self, inputs: Sequences, positions: Tensor | None, *, hidden_states: bool, attention_weights: bool
    ) -> EncoderOutput:
        out = self.encoder(inputs, hidden_states=hidden_states, attention_weights=attention_weights)
        logits = self._logits(out.states, inputs.real, positions)
        return EncoderOutput(out.states, logits, out.router_loss, out.hidden_states, out.routing, out.attention)

    def _check_positions(self, positions: Tensor, states: Tensor) -> None:
        if not self._has_scores or self.head is not None:
            absent = "with a head" if self._has_scores else "without a vocabulary"
            raise InputError(f"positions has no effect on a model {absent}", fix="read .states at these positions")
        if positions.dtype != torch.int64 or positions.dim() != 2 or len(positions) != len(states):
            raise InputError(
                f"positions are {positions.dtype} of shape {list(positions.shape)}",
                fix=f"give int64 of shape [batch, k], here [{len(states)}, k]",
            )
        check_range("positions", positions, states.shape[1])

    def _joined(
        self, tokens: Tensor, embeddings: Tensor, mask: Tensor | None, split: int | None
    ) -> tuple[Tensor, Tensor | None, int]:
        """Embeddings and tokens as one sequence of embeddings, with its mask and its split."""
        embedded = self._read(self.embedding, tokens, None, None, None)
        given = self._read(None, None, embeddings, None, None)
        count = given.states.shape[1]
        if len(embeddings) != len(tokens):
            raise InputError(
                f"embeddings of {len(embeddings)} sequences, and tokens of {len(tokens)}", fix="give as many of both"
            )
        if split not in (None, count):
            raise InputError(f"split is {split}, and there are {count} embeddings before the tokens", fix="remove split")
        if mask is None and embedded.real is not None:
            mask = torch.cat([embedded.real.new_ones(len(tokens), count), embedded.real], dim=1)
        return torch.cat([given.states, embedded.states], dim=1), mask, count

    def _checked(self, split: int | None, length: int) -> int | None:
        if self.config.multiway is None:
            if split is not None:
                raise InputError(
                    "this model has one set of weights for all positions", fix="remove split, or build it with multiway=2"
                )
        elif not isinstance(split, int) or not 0 <= split <= length:
            raise InputError(
                f"split is {shown(split)}",
                fix=f"give the number of positions of the first modality, here 0 to {length}, or build it without multiway",
            )
        return split

    def _typed(self, inputs: Sequences, types: Tensor | None) -> Sequences:
        if self.token_types is not None:
            return replace(inputs, states=self.token_types(inputs.states, types))
        if types is not None:
            raise InputError("this model has no token types", fix="remove types, or build it with token_types=2")
        return inputs

    @property
    def _has_scores(self) -> bool:
        return self.embedding is not None or self.vocabulary is not None

    def _logits(self, states: Tensor, real: Tensor | None, positions: Tensor | None) -> Tensor | None:
        if self.head is not None:
            return self.head(states, real)
        return self._scores(states if positions is None else states_at(states, positions))

    def _scores(self, states: Tensor) -> Tensor | None:
        table = self.vocabulary if self.embedding is None or self.vocabulary is not None else self.embedding.scores
        if table is None:
            return None
        return self._finish_scores(table(states if self.transform is None else self.transform(states)))


def states_at(states: Tensor, positions: Tensor) -> Tensor:
    """Select the states at `positions`, int64 [batch, k], of each row: [batch, length, dim] to [batch, k, dim]."""
    rows = torch.arange(len(states), device=states.device)[:, None] * states.shape[1] + positions
    # Unlike `gather`, a lookup does not keep all states for the backward pass.
    return F.embedding(rows, states.flatten(0, 1))
