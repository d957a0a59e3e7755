"""What people see: all of a text, and none of its orders."""

from __future__ import annotations

import io
import sys

import pytest

from kilolayer.terminal import printable, say


def test_text_that_people_write_stays() -> None:
    text = "Grüße, 日本語, עברית, हिन्दी, 👩‍👩‍👧 and\ttabs\n"
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb", "a\\rb"),
        ("\x00\x7f\x08", "\\x00\\x7f\\x08"),
        ("\u202egpj.exe", "\\u202egpj.exe"),
        ("file\udce9", "file\\udce9"),
    ],
)
def test_what_a_terminal_would_obey_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_nobody_has_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    say("one")
    say("two")
    sys.stderr.close()
    monkeypatch.setattr(sys, "stderr", None)
    say("three")


def test_a_narrow_encoding_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    say("Grüße")
    assert raw.getvalue() == b"Gr\\xfc\\xdfe\n"
