"""Whether a trained translator reads its source, from its validations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SOURCE_READ = 0.05
"""Nats per token by which its own source must lower the loss of a sentence, compared with the source of another one.

A translator of 2L-2L, dim 32, gains 0.2 within 200 steps and 0.7 within 1,500; one whose encoder has died gains 0
(benchmarks/diagnose/source_gain.json).
"""


def source_gain(validations: Sequence[Mapping[str, Any]]) -> float | None:
    """The rise of the loss with the source of another sentence, at the last validation; None if it was not measured."""
    gain = validations[-1].get("source_gain") if validations else None
    return float(gain) if isinstance(gain, int | float) else None


def in_words(gain: float) -> str:
    """What the right source does to the loss, if that is too little."""
    return "does not lower the loss" if gain < 0.0005 else f"lowers the loss by only {gain:.3f} nats per token"


def unread_source(validations: Sequence[Mapping[str, Any]], train: Sequence[Mapping[str, Any]]) -> str | None:
    """A warning if the last validation shows that the source is not read. train: the rows of training, which have the epoch."""
    gain = source_gain(validations)
    if gain is None or not gain < SOURCE_READ:
        return None
    what = f"at step {int(validations[-1]['step']):,} the right source {in_words(gain)}"
    epoch = train[-1].get("epoch") if train else None
    if isinstance(epoch, int | float) and epoch < 1:
        return f"{what}, but the run is short: it has read only {epoch:.2g} of its text; train longer before you judge it"
    return f"{what}: the decoder models the target language and does not read the encoder"
