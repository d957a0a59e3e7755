"""The initial weights that methods start from, before the gains of a recipe: Xavier's, and those of public code."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

from kilolayer.recipes.role import Role

InitName = Literal["xavier", "xavier_uniform", "fairseq", "fairseq_0.8", "torch", "bert"]


@dataclass(frozen=True)
class Draw:
    """The distribution of one matrix, with mean 0.

    deviation: "xavier": sqrt(2 / (fan_in + fan_out)). "linear": that of nn.Linear, 1 / sqrt(3 fan_in). Or a number. joint: the
    projections of one attention to query, key and value count as one matrix, whose fan_out is the sum of theirs. bias: its
    biases are drawn as nn.Linear draws them, uniformly within 1 / sqrt(fan_in), instead of 0.
    """

    deviation: Literal["xavier", "linear"] | float = "xavier"
    shape: Literal["normal", "uniform"] = "uniform"
    factor: float = 1.0
    joint: bool = False
    bias: bool = False

    def std(self, fan_in: int, fan_out: int) -> float:
        """The standard deviation of a matrix [fan_out, fan_in]."""
        match self.deviation:
            case "xavier":
                return self.factor * sqrt(2 / (fan_in + fan_out))
            case "linear":
                return self.factor / sqrt(3 * fan_in)
            case number:
                return self.factor * number


@dataclass(frozen=True)
class Init:
    """How the matrices of a model are drawn. text: in words, with its source. roles: what differs from `usual`.

    table: the standard deviation of the embedding and output tables; None: dim^-1/2.
    """

    text: str
    usual: Draw
    roles: dict[Role, Draw] = field(default_factory=dict)
    table: float | None = None

    def draw(self, role: Role) -> Draw:
        """The distribution of the projections with this role."""
        return self.roles.get(role, self.usual)


_ATTENTION_INPUTS = (Role.QUERY_KEY, Role.VALUE)
INITS: dict[InitName, Init] = {
    "xavier": Init("Matrices start normal with Xavier's deviation, biases at 0.", Draw(shape="normal")),
    "xavier_uniform": Init("Matrices start uniform with Xavier's deviation, biases at 0.", Draw()),
    "fairseq": Init(
        "Matrices start as in fairseq since 0.10 (modules/multihead_attention.py, transformer_layer.py): query, key and value "
        "uniform at 1/sqrt(2) of Xavier's deviation, the attention output at Xavier's, the feed-forward network as nn.Linear "
        "(deviation 1/sqrt(3 fan_in)); biases as nn.Linear, that of the attention output at 0.",
        Draw(),
        {
            **dict.fromkeys(_ATTENTION_INPUTS, Draw(factor=1 / sqrt(2), bias=True)),
            **dict.fromkeys((Role.FFN_IN, Role.FFN_OUT), Draw("linear", bias=True)),
        },
    ),
    "fairseq_0.8": Init(
        "Matrices start as in fairseq up to 0.8, on which Admin's code is built: uniform with Xavier's deviation; query, "
        "key and value as a single matrix that holds all three, which gives each 1/sqrt(2) of what it would have alone. Biases "
        "start at 0.",
        Draw(),
        dict.fromkeys(_ATTENTION_INPUTS, Draw(joint=True)),
    ),
    "torch": Init(
        "Matrices and biases start as in nn.Linear (deviation 1/sqrt(3 fan_in)); so do all those of TorchScale 0.3.0, whose "
        "attention never calls its own reset_parameters.",
        Draw("linear", bias=True),
    ),
    "bert": Init(
        "Matrices and the tables of the vocabulary start normal with deviation 0.02, biases at 0, as in the public code of "
        "BERT and GPT-2.",
        Draw(0.02, "normal"),
        table=0.02,
    ),
}
"""By name."""
