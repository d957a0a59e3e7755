"""Registers the derivations of the numbers of a page, one for each section, and writes numbers as the pages do."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.derivations.page import WORDS

ROOT = Path(__file__).parents[2]
README, RESULTS = "README.md", "docs/results.md"
SHOWN = {
    "post_ln": "Post-LN",
    "pre_ln": "Pre-LN",
    "sub_ln": "Sub-LN",
    "deepnorm": "DeepNorm",
    "admin": "Admin",
    "ds_init": "DS-Init",
    "rezero": "ReZero",
    "r_fixup": "R-Fixup",
    "t_fixup": "T-Fixup",
    "dlcl": "DLCL",
    "normformer": "NormFormer",
}
Pieces = Iterator[str]
Data = dict[str, Any]


@dataclass(frozen=True)
class Derivation:
    """The numbers of one section.

    heading: a part of the section's heading, without numbers. files: those in benchmarks that the numbers come from. given:
    pieces with settings that are in no such file, and with what papers say. pieces: makes all others from the files.
    """

    heading: str
    files: Sequence[str]
    given: Sequence[str]
    pieces: Callable[..., Iterable[str]]

    def all_pieces(self, read: Callable[[str], Any]) -> list[str]:
        """The derived pieces and the given ones."""
        return [*self.pieces(*map(read, self.files)), *self.given]


DERIVATIONS: dict[str, list[Derivation]] = {README: [], RESULTS: []}


def section(
    heading: str, *files: str, given: Sequence[str] = (), page: str = RESULTS
) -> Callable[[Callable[..., Pieces]], Callable[..., Pieces]]:
    """Register a derivation, which is called with the content of its files."""

    def register(pieces: Callable[..., Pieces]) -> Callable[..., Pieces]:
        DERIVATIONS[page].append(Derivation(heading, files, given, pieces))
        return pieces

    return register


@cache
def read(file: str) -> Any:
    """A file of results, or the configuration of its runs."""
    text = (ROOT / "benchmarks" / file).read_text()
    return tomllib.loads(text) if file.endswith(".toml") else json.loads(text)


def word(count: int) -> str:
    """The word for a count from one to twenty."""
    return "one" if count == 1 else WORDS[count - 2]


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def rate(value: float) -> str:
    """0.0025 is 2.5e-3."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def two_digits(value: float) -> str:
    """0.0109 is 0.011, and 0.00000251 is 2.5e-6."""
    return re.sub(r"e([+-])0+", r"e\1", f"{value:.2g}")


def share(value: float) -> str:
    """In percent, with a decimal below one."""
    return f"{value:.1%}" if value < 0.01 else f"{value:.0%}"


def listed(values: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = values
    return f"{', '.join(first)} and {last}" if first else last


def both_sides(layers: int) -> str:
    return f"{layers}L-{layers}L"
