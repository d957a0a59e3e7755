"""Multiple-choice question sets that a language model answers by likelihood, after zero, one or more solved examples."""

from kilolayer.evaluate.shots import completions, coreference, knowledge, reading
from kilolayer.evaluate.shots.registry import SETS

__all__ = ["SETS", "completions", "coreference", "knowledge", "reading"]
