"""How a tokenizer's codes are used, and when it counts as collapsed: nearly all patches share a few codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLLAPSED = 0.1
"""Share of the largest possible perplexity below which the codebook has collapsed."""


def perplexity(counts: Sequence[int] | np.ndarray) -> float:
    """exp(entropy) of the distribution of counts [codes]: the number of codes, if all that are used were used alike."""
    uses = np.asarray(counts, np.float64)
    shares = uses[uses > 0] / max(uses.sum(), 1)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def used_share(counts: Sequence[int] | np.ndarray) -> float:
    """The share of codes that are used at all."""
    return float(np.mean(np.asarray(counts) > 0))


def has_collapsed(found: float, codes: int, patches: int) -> bool:
    """Whether a perplexity is that of a collapsed codebook; patches: how many were encoded, which may be fewer than codes."""
    return found < COLLAPSED * min(codes, patches)


def collapse_text(found: float, codes: int) -> str:
    """What is said of a collapsed codebook."""
    fix = "raise model.restart, lower model.codes or lower train.lr"
    return f"the codebook has collapsed: {codes:,} codes are used like {found:,.1f}; {fix}"
