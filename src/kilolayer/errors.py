"""All errors that a user or the machine can cause; each says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, Self

from kilolayer.foreign_options import answers
from kilolayer.renamed import renamed_names

LONGEST_SHOWN = 100
"""Maximum number of characters of a wrong value that an error shows."""


class KilolayerError(Exception):
    """The base class of all errors raised on purpose by this package."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__("\n".join(line for line in (what, where, fix) if line))

    def at(self, where: str) -> Self:
        """The same error with its location added."""
        return type(self)(self.what, where=", ".join(part for part in (self.where, where) if part), fix=self.fix)


class OptionError(KilolayerError, ValueError):
    """An option has a value that is not allowed, or contradicts another."""


class UnusedOptionError(OptionError):
    """An option has no effect in combination with others, or contradicts them.

    unused, beside: the names of the option and of the others, within the table that `where` names. either: they are alternative
    ways to say the same thing, so that any of them may be kept.
    """

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", unused: str = "", beside: tuple[str, ...] = (), either: bool = False
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.unused, self.beside, self.either = unused, beside, either

    def at(self, where: str) -> Self:
        error = super().at(where)
        error.unused, error.beside, error.either = self.unused, self.beside, self.either
        return error

    def below(self, table: str) -> Self:
        """The same error with names that start in the parent table."""
        error = self.at("")
        error.unused, *beside = (f"{table}.{name}" for name in (self.unused, *self.beside))
        error.beside = tuple(beside)
        return error


class UnknownOptionError(OptionError, TypeError):
    """A name that is not an option; also a TypeError, as Python raises for unknown keywords."""


class InputError(KilolayerError, ValueError):
    """Something given cannot be used: a batch that does not fit the model, a file that cannot be read."""


class UnreadableError(InputError):
    """A file exists but the system does not allow it to be read, so that its contents are not known."""


class WriteError(KilolayerError):
    """A file cannot be written."""


class FoldError(KilolayerError, ValueError):
    """The model has no exact plain Post-LN form."""


FILE_FIXES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "it belongs to another user, or its permissions forbid it: change them, or use another folder",
    errno.EPERM: "it belongs to another user, or its permissions forbid it: change them, or use another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOSPC: "free some space there, or use another folder",
    errno.EDQUOT: "free some space there, or use another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "remove the symbolic link, which points to itself or is in the place of one of our files",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.EISDIR: "it is a folder: name a file",
    errno.EEXIST: "something else already exists there: remove it, or choose another name",
    errno.EMFILE: "raise the limit on open files: ulimit -n 4096",
}


def file_fault(error: OSError | ValueError) -> tuple[str, str]:
    """The system's description of a file error, and what to do about it."""
    if isinstance(error, OSError) and error.errno is not None:
        return str(error.strerror).lower(), FILE_FIXES.get(error.errno, "check the disk and the path")
    return str(error), "check the path"  # a name with a NUL or an invalid character


def shown(value: Any) -> str:
    """A value as shown in an error, shortened if it is long: it may have thousands of digits or brackets."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print integers of more than 4,300 digits, nor endless nesting
        return "a number of thousands of digits" if isinstance(value, int) else "a value that is nested too deeply"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def edit_distance(a: str, b: str) -> int:
    """The number of insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and other == a[i - 2]:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name with the fewest edits; from three edits on, one that contains all that was typed is preferred.

    None if it shares too little with what was typed to be a slip of the fingers.
    """
    typed = name[:LONGEST_SHOWN].lower()

    def distance(candidate: str) -> tuple[bool, bool, int]:
        edits, holds = edit_distance(typed, candidate.lower()), len(typed) > 2 and typed in candidate.lower()
        return edits > 2, edits > 2 and not holds, edits

    found = min(sorted(valid), key=distance)
    edits, longest = distance(found)[2], max(len(typed), len(found))
    is_slip = edits <= max(2, longest // 3) and edits < longest
    return found if is_slip or (len(typed) > 2 and typed in found.lower()) else None


def unknown(
    name: str,
    valid: Iterable[str],
    *,
    kind: str = "option",
    where: str = "",
    beside: Iterable[str] = (),
    keywords: bool = False,
) -> UnknownOptionError:
    """The error for a name that does not exist, with the nearest one that does, or with ours for an option of another library.

    name: may be something that is no name. beside: other unknown options of the same table. keywords: they are arguments in
    Python, not names in a configuration.
    """
    valid = sorted(set(valid))
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        return UnknownOptionError(f"{shown(name)} is not the name of any {kind}", where=where, fix=f"valid: {', '.join(valid)}")
    if kind == "option" and (foreign := answers((name, *beside), valid, keywords=keywords)):
        names, s = ", ".join(map(shown, foreign)), "s" if len(foreign) > 1 else ""
        fix = "; ".join(f"{theirs}: {text}" for theirs, text in foreign.items())
        return UnknownOptionError(f"unknown option{s} {names}, known from other libraries", where=where, fix=fix)
    if not valid:
        return UnknownOptionError(f"unknown {kind} {shown(name)}", where=where, fix=f"there is no {kind} here: remove it")
    ending = [each for each in valid if each.endswith(f"_{name}")]
    near = ending if len(ending) == 2 else [each for each in [nearest(name, valid)] if each is not None]
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnknownOptionError(f"unknown {kind} {shown(name)}{guess}", where=where, fix=f"valid: {', '.join(valid)}")


__getattr__ = renamed_names(__name__, {"IdleOptionError": "UnusedOptionError"})
