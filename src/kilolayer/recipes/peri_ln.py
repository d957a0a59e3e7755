"""Peri-LN: Pre-LN whose branches are normalized again before they join the residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilolayer.recipes.base import NORM, Depths, NormSpec, Place, Plan, Recipe, Side, Top
from kilolayer.recipes.registry import register


@register
@dataclass(frozen=True)
class PeriLN(Recipe):
    """A norm before and after each function, one on the embeddings and one on top."""

    embedding_norm: bool = True
    """Whether the embeddings, including positions, are normalized; without it the layout is that of Gemma 2 and Sandwich-LN."""

    name: ClassVar[str] = "peri_ln"
    title: ClassVar[str] = "Peri-LN"
    equation: ClassVar[str] = "x_0 = LN(embeddings);  x' = x + LN(f(LN(x)));  final LN on top"
    paper: ClassVar[str] = "Kim et al. 2025, Peri-LN: Revisiting Normalization Layer in the Transformer Architecture (ICML)"
    expect: ClassVar[str] = (
        "The variance of the residual stream grows linearly with depth, whereas Pre-LN's may grow exponentially during "
        "training; tested in the paper at up to 3.2 billion parameters."
    )
    extension: ClassVar[str] = (
        "The equation follows public descriptions of the paper; the paper itself could not be read. It is stated for "
        "decoders. Here cross-attention is treated like self-attention, and each stack of an encoder-decoder normalizes its "
        "own embeddings."
    )

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=NORM, post_norm=NORM)

    def top(self, side: Side, depths: Depths) -> Top:
        return Top(norm=NORM)

    def input_norm(self, side: Side, depths: Depths) -> NormSpec | None:
        return NORM if self.embedding_norm else None
