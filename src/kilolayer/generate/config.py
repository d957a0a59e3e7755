"""The search configuration, `[search]`: how output is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kilolayer.config import bounded, check
from kilolayer.errors import OptionError, UnusedOptionError

Method = Literal["greedy", "beam", "sample"]
OPTIONS_OF: dict[Method, tuple[str, ...]] = {
    "greedy": (),
    "beam": ("beam", "length_penalty"),
    "sample": ("temperature", "top_k", "top_p", "seed"),
}


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The decoding method, its options, and how much is read and decoded at once."""

    method: Method = "beam"
    """greedy: the most probable token at each step; beam: beam search; sample: random sampling. Default: the method whose
    options are set, or beam."""
    beam: int | None = bounded(None, least=1, most=10_000)
    """Beam size. Default: 5."""
    length_penalty: float | None = bounded(None, least=0, most=30)
    """Beam search ranks hypotheses by log-probability / length^length_penalty; length includes the end token. Default: 1."""
    temperature: float | None = bounded(None, above=0, most=1e6)
    """Sampling divides the logits by this: below 1 is safer, above 1 more varied; instead of 0, use greedy. Default: 1."""
    top_k: int | None = bounded(None, least=1, most=2**24)
    """Sample from this many of the most probable tokens. Default: from all."""
    top_p: float | None = bounded(None, above=0, most=1)
    """Sample from the smallest set of most probable tokens whose total probability reaches this. Default: from all."""
    seed: int | None = bounded(None, least=0, most=2**63 - 1)
    """Seed for sampling: the same seed and line give the same result, whatever else is in the batch. Default: 0."""
    n_best: int = bounded(1, least=1, most=10_000)
    """Number of hypotheses to return per line: the best of a beam, best first, or this many samples, in the order drawn."""
    max_length_factor: float = bounded(2.0, least=0, most=1000)
    """A hypothesis has at most max_length_factor x source length + max_length_extra tokens."""
    max_length_extra: int = bounded(16, least=0, most=10**6)
    """See max_length_factor."""
    max_source_length: int = bounded(1024, least=1, most=10**6)
    """Maximum number of tokens in a source line; longer lines are truncated, and counted."""
    batch_tokens: int = bounded(8192, least=1, most=10**9)
    """Maximum number of source tokens decoded at once, counting padding and hypotheses; at least one sentence is always
    decoded."""
    window: int = bounded(1024, least=1, most=10**7)
    """Number of lines read ahead and sorted by length before decoding; 1 answers line by line."""

    @classmethod
    def complete(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table with the method that its options belong to, if it sets none."""
        asked = [method for method, names in OPTIONS_OF.items() if any(table.get(name, "none") != "none" for name in names)]
        return {"method": asked[0], **table} if asked else table

    def __post_init__(self) -> None:
        check(self)
        self._check_method()
        most = {"greedy": 1, "beam": self.width, "sample": self.n_best}[self.method]
        if self.n_best > most:
            raise OptionError(
                f"n_best is {self.n_best}, but method {self.method} finds only {most}", fix="lower n_best, or use a larger beam"
            )
        if self.max_length_factor == 0 and self.max_length_extra == 0:
            raise OptionError("max_length_factor and max_length_extra are both 0", fix="allow at least one token")

    @property
    def width(self) -> int:
        """Hypotheses per sentence that are decoded in parallel."""
        if self.method == "beam":
            return 5 if self.beam is None else self.beam
        return self.n_best

    def max_length(self, source: int) -> int:
        """The maximum length of a hypothesis, end token included, for `source` tokens; at least 1."""
        return max(1, int(self.max_length_factor * source) + self.max_length_extra)

    def _check_method(self) -> None:
        for method, names in OPTIONS_OF.items():
            for name in names:
                if method != self.method and getattr(self, name) is not None:
                    raise UnusedOptionError(
                        f"{name} has no effect with method {self.method!r}",
                        fix=f"remove it, or use method = {method!r}",
                        unused=name,
                        beside=("method", *OPTIONS_OF[self.method]),
                        either=True,
                    )
