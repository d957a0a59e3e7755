"""The base class of reproductions: a paper's claim, a small-scale experiment, and a decision rule fixed before the runs."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kilolayer.importing import Registry
from kilolayer.report.table import Table

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

PAPERS = {
    "deepnet": "Wang et al., DeepNet: Scaling Transformers to 1,000 Layers",
    "admin": "Liu et al., Very Deep Transformers for Neural Machine Translation",
    "torchscale": "Ma et al., TorchScale: Transformers at Scale",
}
Found = dict[str, Any]
"""The measurements, as JSON values."""


@dataclass(frozen=True)
class Verdict:
    """Whether a claim held, and the numbers that show it."""

    word: Literal["held", "not held", "undecided"]
    why: str


def held(why: str) -> Verdict:
    """The claim held."""
    return Verdict("held", why)


def not_held(why: str) -> Verdict:
    """The claim did not hold."""
    return Verdict("not held", why)


def undecided(why: str) -> Verdict:
    """The experiment is too small, or had too little time, to decide."""
    return Verdict("undecided", why)


class Reproduction(ABC):
    """One figure or table.

    claim: what the paper concludes from it, in a sentence. setting: the small-scale experiment. rule: how `judge` decides.
    published: the numbers that the paper prints, if any. trains_runs: whether it trains runs, which can be stopped and trained
    in parallel; otherwise it takes a few steps in memory.
    """

    name: ClassVar[str]
    claim: ClassVar[str]
    setting: ClassVar[str]
    rule: ClassVar[str]
    published: ClassVar[Table | None] = None
    trains_runs: ClassVar[bool] = True

    @property
    def source(self) -> str:
        """The paper and its figure or table."""
        paper, _, item = self.name.partition("-")
        kind = item.rstrip("0123456789")
        return f"{PAPERS[paper]}, {kind.capitalize()} {item.removeprefix(kind)}"

    @property
    def instrument(self) -> str | None:
        """How the runs are labelled, in a sentence; None if none are trained."""
        return _labels() if self.trains_runs else None

    @abstractmethod
    def measure(self, lab: Lab) -> Found:
        """Run the experiment. If called again after an interruption, it continues."""

    @abstractmethod
    def judge(self, found: Found) -> Verdict:
        """Decide by the rule alone whether the claim held."""

    @abstractmethod
    def numbers(self, found: Found) -> Table:
        """The measurements as a table."""

    def panels(self, found: Found) -> list[Panel]:
        """The measurements as plots."""
        return []


def _labels() -> str:
    from kilolayer.evaluate.source_use import SOURCE_READ
    from kilolayer.evaluate.stack_label import DEAD, LEVELS, SHARE, as_fraction

    seen = next((level for level in LEVELS if level.share == DEAD and level.seen), None)
    earlier = "" if seen is None else f" (of {seen.seen} runs that were below it on the way, {seen.recovered} recovered)"
    return (
        f"A run is dead if the first layers of a stack get less than {as_fraction(DEAD)} of the largest layer's gradient over "
        f"the last {SHARE:.0%} of its steps, or, in a translator, if the source of another sentence raises its loss by less "
        f"than {SOURCE_READ:g} nats per token at the end; no run is ended early for it{earlier}."
    )


_registry: Registry[type[Reproduction]] = Registry("reproduction")


def register(cls: type[Reproduction]) -> type[Reproduction]:
    """Register a reproduction under its name."""
    return _registry.add(cls.name, cls)


def _import_all() -> None:
    """Import every file of this folder that is named after a paper."""
    package = importlib.import_module("kilolayer.reproduce")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.partition("_")[0] in PAPERS:
            importlib.import_module(f"kilolayer.reproduce.{module.name}")


def all_of() -> list[Reproduction]:
    """All reproductions: by paper, then figures before tables, then by number."""
    _import_all()

    def order(name: str) -> tuple[int, str, int]:
        paper, _, rest = name.partition("-")
        kind = rest.rstrip("0123456789")
        return list(PAPERS).index(paper), kind, int(rest.removeprefix(kind))

    return [_registry[name]() for name in sorted(_registry, key=order)]


def get(name: str) -> Reproduction:
    """A reproduction by its name, such as `deepnet-figure4`; the error for an unknown name suggests the nearest one."""
    _import_all()
    return _registry.find(name)()
