from __future__ import annotations

import importlib.util

import pytest

from kilolayer.operators.kernels import why_no_kernels


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why = why_no_kernels.__wrapped__
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why() == "Triton is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert why() == "Triton finds no C compiler"
    monkeypatch.setattr("shutil.which", lambda name: "/bin/gcc" if name == "gcc" else None)
    assert why() is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("CC", "icc")
    assert why() is None
