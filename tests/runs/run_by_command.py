"""The command, called in this process, for tests that compare it with Python."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kilolayer.cli.main import main


def printed(*words: object, lines: list[str] | None = None) -> str:
    """What the command prints on standard output; lines: its standard input."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines or []).encode())))
        code = main([str(word) for word in words])
    assert code == 0, err.getvalue()
    return out.getvalue()
