"""The command, called in this process, for tests that compare it with Python."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kilolayer.cli.main import main


def printed(*words: object, lines: list[str] | None = None) -> str:
    """What the command prints on standard output; lines: its standard input."""
    code, out, err = _run(words, lines or [])
    assert code == 0, err
    return out


def refusal(*words: object) -> str:
    """What the command says when it refuses to begin."""
    code, _, err = _run(words, [])
    assert code == 2, err
    return err


def _run(words: Sequence[object], lines: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()
