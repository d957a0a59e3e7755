"""A line of a question set's file, with checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kilolayer.errors import InputError, shown
from kilolayer.files.reading import parse_json, replace_surrogates


@dataclass(frozen=True)
class Row:
    """A JSON object with named columns. where: its file and line, for errors. columns: those that the set needs."""

    fields: dict[str, Any]
    where: str
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, line: str, where: str, columns: tuple[str, ...]) -> Row:
        """Parse a line of JSON."""
        try:
            value = parse_json(line)
        except ValueError as error:
            raise cls({}, where, columns).error(f"the line is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise cls({}, where, columns).error("the line is no JSON object")
        return cls(value, where, columns)

    def text(self, name: str) -> str:
        """The text in a column."""
        value = self._column(name)
        if not isinstance(value, str):
            raise self.error(f"the column {name!r} is {shown(value)} and not text")
        return replace_surrogates(value)

    def texts(self, name: str) -> list[str]:
        """The list of two or more texts in a column."""
        return self._texts(self._column(name), name)

    def choices(self) -> tuple[list[str], list[str]]:
        """The texts and the labels of a column `choices` = {"text": [...], "label": [...]}."""
        value = self._column("choices")
        if not isinstance(value, dict) or not {"text", "label"} <= set(value):
            raise self.error("the column 'choices' is no object with the lists 'text' and 'label'")
        texts, labels = (self._texts(value[part], f"choices.{part}") for part in ("text", "label"))
        if len(texts) != len(labels):
            raise self.error(f"the column 'choices' has {len(texts)} texts and {len(labels)} labels")
        return texts, labels

    def answer(self, name: str, labels: Sequence[object]) -> int:
        """The index of the label that a column holds, as text or as a number: `"3"` or `3`."""
        value, known = self._column(name), [str(label) for label in labels]
        if str(value).strip() not in known:
            raise self.error(f"the column {name!r} is {shown(value)}, and the choices are {', '.join(known)}")
        return known.index(str(value).strip())

    def error(self, what: str) -> InputError:
        """The error for this line."""
        return InputError(what, where=self.where, fix=f"each line is a JSON object with {', '.join(self.columns)}")

    def _column(self, name: str) -> Any:
        if name not in self.fields:
            raise self.error(f"the column {name!r} is missing")
        return self.fields[name]

    def _texts(self, value: Any, name: str) -> list[str]:
        if not isinstance(value, list) or len(value) < 2 or not all(isinstance(each, str) for each in value):
            raise self.error(f"the column {name!r} is no list of two texts or more")
        return list(map(replace_surrogates, value))
