"""Token frequencies, and the loss of a model that predicts every token from its frequency alone."""

from __future__ import annotations

import numpy as np

from kilolayer.data.mixing import Mixture
from kilolayer.data.token_text import TokenText

MOST_TOKENS, CHUNK = 1 << 22, 1 << 16
MOST_PAIRS = 1 << 17


def frequency_loss(counts: np.ndarray) -> float:
    """The entropy of a token distribution in nats per token, -sum p log p; counts [vocabulary] need not be integers."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def count_tokens(text: TokenText) -> np.ndarray:
    """int64 [largest token + 1]: how often each token occurs; a long text is sampled in evenly spaced pieces."""
    width = min(CHUNK, len(text))
    pieces = min(-(-len(text) // width), MOST_TOKENS // width)
    # The last piece ends with the text's last token, so pieces of a short text may overlap slightly.
    starts = np.linspace(0, len(text) - width, pieces).astype(np.int64)
    counts = np.zeros(0, np.int64)
    for start in starts:
        counts = _sum(counts, np.bincount(text.read(np.array([start]), width)[0]))
    return counts


def count_targets(mixture: Mixture) -> np.ndarray:
    """float [largest token + 1]: how often each token is a target in an epoch, estimated from a sample of each part if
    large."""
    counts = np.zeros(0)
    for part, quota in zip(mixture.parts, mixture.quotas, strict=True):
        some = min(len(part.pairs), max(1, round(MOST_PAIRS * quota / len(mixture))))
        chosen = np.linspace(0, len(part.pairs) - 1, some).astype(np.int64)
        tokens, index = part.pairs.fetch(chosen, read=some < len(part.pairs))
        lengths = index["target"].astype(np.int64)
        starts = index["start"].astype(np.int64) + index["source"]
        # The offset of element j of the concatenated targets within its own target.
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        counts = _sum(counts, np.bincount(tokens[np.repeat(starts, lengths) + inside]) * (quota / some))
    return counts


def _sum(some: np.ndarray, more: np.ndarray) -> np.ndarray:
    longer, shorter = (some, more) if len(some) > len(more) else (more, some)
    longer = longer.copy()
    longer[: len(shorter)] += shorter.astype(longer.dtype)
    return longer
