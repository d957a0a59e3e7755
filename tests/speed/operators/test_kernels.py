from __future__ import annotations

import importlib.util

import pytest
import torch

from kilolayer.errors import UnknownOptionError
from kilolayer.speed.operators import kernels
from kilolayer.speed.operators.kernels import why_no_kernels


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


GPU = torch.device("cuda")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(kernels, "why_no_kernels", lambda: None)


@pytest.mark.usefixtures("built")
def test_kernels_are_left_out_by_name() -> None:
    assert all(kernels.runs_on(GPU, name) for name in kernels.NAMES)
    with kernels.disabled("residual_norm", "loss"):
        with kernels.disabled("inner_norm"):
            left = {name for name in kernels.NAMES if not kernels.runs_on(GPU, name)}
            assert left == {"residual_norm", "loss", "inner_norm"}
        assert kernels.runs_on(GPU, "inner_norm")
        assert not kernels.runs_on(GPU, "loss")
    assert kernels.runs_on(GPU, "loss")
    assert not kernels.runs_on(torch.device("cpu"), "loss")


def test_a_plan_leaves_them_out_too() -> None:
    with kernels.assumed(), kernels.disabled("few_rows"):
        assert kernels.runs_on(torch.device("meta"), "loss")
        assert not kernels.runs_on(torch.device("meta"), "few_rows")


def test_an_unknown_kernel_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="unknown kernel 'resdual_norm'; did you mean 'residual_norm'"):
        kernels.disabled("resdual_norm").__enter__()
    assert kernels.runs_on(torch.device("cpu"), "loss") is False


@pytest.mark.usefixtures("built")
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_compiled_code_follows_what_is_left_out() -> None:
    ask = torch.compile(lambda x: x if kernels.runs_on(GPU, "inner_norm") else -x, backend="eager", fullgraph=True)
    x = torch.ones(1)
    assert ask(x) == 1
    with kernels.disabled("inner_norm"):
        assert ask(x) == -1
    assert ask(x) == 1
    with kernels.disabled("residual_norm"):
        assert ask(x) == 1
