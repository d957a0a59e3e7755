"""A text to score a run on, other than its own test set."""

from __future__ import annotations

from dataclasses import dataclass

from kilolayer import hints
from kilolayer.errors import OptionError


@dataclass(frozen=True)
class OtherText:
    """Either `test`, in the form of the task's own test option, or `source` and `reference`, two aligned files.

    direction: that of the text, for a translator with several.
    """

    test: tuple[str, ...] = ()
    source: str | None = None
    reference: str | None = None
    direction: str | None = None

    def __post_init__(self) -> None:
        for name, paths in (("test", self.test), ("source", (self.source,)), ("reference", (self.reference,))):
            if "" in paths:
                raise OptionError(f"{name} is empty", where=hints.argument(name), fix="name a file or a folder, or remove it")
        if self.test and (self.source or self.reference):
            raise OptionError("a test set and a source or reference are both given", fix="remove one of them")
        if (self.source is None) != (self.reference is None):
            one, other = ("source", "reference") if self.reference is None else ("reference", "source")
            raise OptionError(f"a {one} is given without a {other}", fix=f"name the {other} too: their lines must correspond")
        if not self.test and self.source is None:
            raise OptionError("no text is given", fix="name a test set, or a source and its reference")

    def files(self, title: str) -> tuple[str, ...]:
        """The files, for a task that does not read pairs of files; title: what its runs are called in errors."""
        if self.source is not None or self.direction is not None:
            name = "direction" if self.source is None else "source"
            raise OptionError(f"{name} has no effect on {title}", fix="name files: test")
        return self.test

    def one(self, title: str, kind: str) -> str:
        """The only file, for a task that reads one at a time; kind: what it is called in errors."""
        first, *others = self.files(title)
        if others:
            raise OptionError(f"{title} is scored on one {kind} at a time", where=hints.argument("test"), fix="name one")
        return first
