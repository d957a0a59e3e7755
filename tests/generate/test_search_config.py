"""The [search] table refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from kilolayer.config import build, help_texts
from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "beem"}, "did you mean 'beam'"),
        ({"beam": 0}, "beam is 0"),
        ({"beam": 2.5}, "beam is 2.5"),
        ({"length_penalty": -1.0}, "length_penalty is -1.0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 31.0}, "length_penalty is 31.0"),
        ({"method": "greedy", "beam": 4}, "beam has no effect with method 'greedy'"),
        ({"method": "sample", "length_penalty": 1.0}, "length_penalty has no effect"),
        ({"top_k": 3}, "top_k has no effect with method 'beam'"),
        ({"method": "sample", "top_k": 0}, "top_k is 0"),
        ({"method": "sample", "top_p": 0.0}, "top_p is 0.0"),
        ({"method": "sample", "top_p": 1.1}, "top_p is 1.1"),
        ({"method": "sample", "temperature": 0.0}, "temperature is 0.0"),
        ({"method": "sample", "temperature": float("inf")}, "temperature is inf"),
        ({"method": "sample", "seed": -1}, "seed is -1"),
        ({"n_best": 6}, "n_best is 6, but method beam finds only 5"),
        ({"n_best": 2, "method": "greedy"}, "n_best is 2, but method greedy finds only 1"),
        ({"max_length_factor": 0.0, "max_length_extra": 0}, "both 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"window": 0}, "window is 0"),
        ({"max_source_length": 0}, "max_source_length is 0"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SearchConfig(**options)


def test_the_largest_length_to_the_largest_penalty_is_a_number() -> None:
    ends = {each.name: each.metadata["range"].most for each in dataclasses.fields(SearchConfig) if "range" in each.metadata}
    longest = ends["max_length_factor"] * ends["max_source_length"] + ends["max_length_extra"]
    assert math.isfinite(int(longest) ** float(ends["length_penalty"]))


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'length_penalty'"):
        build(SearchConfig, {"lenght_penalty": 1.0}, "search")


def test_every_option_is_explained() -> None:
    assert set(help_texts(SearchConfig)) == {field.name for field in dataclasses.fields(SearchConfig)}


def test_the_configuration_imports_no_torch() -> None:
    probe = "import sys, kilolayer.generate.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.parametrize(
    ("factor", "extra", "source", "most"), [(2.0, 16, 5, 26), (1.5, 0, 3, 4), (0.1, 0, 3, 1), (0.0, 7, 3, 7)]
)
def test_the_longest_length_follows_the_source(factor: float, extra: int, source: int, most: int) -> None:
    assert SearchConfig(max_length_factor=factor, max_length_extra=extra).max_length(source) == most
