"""Token embeddings, and the projection from states to logits over the vocabulary.

    x = sqrt(dim) * E[ids],    logits = states U^T

E and U are tables [vocabulary, dim]; U is E if embeddings are tied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.layers.initialize import KeyedGenerator


class Embedding(nn.Module):
    """A table [vocabulary, dim], initialized from N(0, gain^2/dim). With `scaled`, input vectors are multiplied by sqrt(dim).

    The row of `pad_id` is initialized to 0 and receives no gradient from the input.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        pad_id: int | None,
        *,
        scaled: bool = True,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.pad_id, self.gain = pad_id, gain
        self.states_dtype: torch.dtype | None = None
        self.scale = dim**0.5 if scaled else 1.0
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.gain * self.weight.shape[1] ** -0.5)
        if self.pad_id is not None:
            self.weight[self.pad_id].zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Int [batch, length] to [batch, length, dim]; in `states_dtype` if `Model.cast_weights` has set one."""
        self._check(ids)
        return F.embedding(ids, self.weight, padding_idx=self.pad_id).to(self.states_dtype or self.weight.dtype) * self.scale

    def scores(self, states: Tensor) -> Tensor:
        """Use the table as output projection: [batch, length, dim] to logits [batch, length, vocabulary]."""
        return scores_of(states, self.weight)

    def _check(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 2:
            raise InputError(
                f"token ids are {ids.dtype} of shape {list(ids.shape)}", fix="give int64 ids of shape [batch, length]"
            )
        if 0 in ids.shape:
            raise InputError(f"the batch is empty: shape {list(ids.shape)}", fix="give at least one sequence of one token")
        check_range("token ids", ids, len(self.weight), f" (vocab_size={len(self.weight)})")


class VocabularyProjection(nn.Module):
    """An output table [vocabulary, dim] that is not tied to the input; initialized from N(0, gain^2/dim), without bias."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.gain = gain
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.gain * self.weight.shape[1] ** -0.5)

    def forward(self, states: Tensor) -> Tensor:
        """[batch, length, dim] to [batch, length, vocabulary]."""
        return scores_of(states, self.weight)


class TokenTypes(nn.Module):
    """x + table[type], where the type may say to which sentence of a pair a token belongs; table [types, dim], N(0, 1/dim)."""

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(types, dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, types: Tensor | None = None) -> Tensor:
        """[batch, length, dim] to the same shape; types: int64 [batch, length], all 0 by default."""
        if types is None:
            return x + self.weight[0]
        if types.dtype != torch.int64 or types.shape != x.shape[:2]:
            raise InputError(
                f"types are {types.dtype} of shape {list(types.shape)}",
                fix=f"give int64 of shape [batch, length], here {list(x.shape[:2])}",
            )
        check_range("types", types, len(self.weight))
        return x + F.embedding(types, self.weight)


def check_range(what: str, ids: Tensor, count: int, note: str = "") -> None:
    """Raise unless all ids are 0 to count - 1; what, note: how the error names them, and what it adds.

    Only on the CPU: reading values back from an accelerator would stall it, and there the look-up itself asserts the range.
    """
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = (int(bound) for bound in torch.aminmax(ids))
        if low < 0 or high >= count:
            raise InputError(f"{what} range from {low} to {high}", fix=f"allowed: 0 to {count - 1}{note}")


def scores_of(states: Tensor, table: Tensor) -> Tensor:
    """Logits = states table^T: [..., dim] to [..., vocabulary]; table [vocabulary, dim].

    With a 16-bit table the logits have its dtype while gradients are enabled, to save memory in training, and are fp32
    otherwise: between 8 and 16, bf16 numbers are 1/16 apart, and a search that compares such scores chooses other tokens.
    """
    states = states.to(table.dtype)
    if torch.is_grad_enabled() or table.dtype not in (torch.bfloat16, torch.float16):
        return F.linear(states, table)
    return F.linear(states.float(), table.float())
