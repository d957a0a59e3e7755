"""What the page says about experts."""

from __future__ import annotations

from typing import Any

import pytest

from kilolayer.report.experts import experts
from kilolayer.report.record import Record

EVEN = [0.25, 0.25, 0.25, 0.25]


def entry(step: int, *loads: list[float], **values: Any) -> dict[str, Any]:
    names = [f"decoder {2 * index + 2}" for index in range(len(loads))]
    numbers = {name: [0.5] * len(loads) for name in ("entropy", "dropped", "temperature")}
    return (
        {"step": step, "layers": names, "load": list(loads), "dense_norm": 1.0, "expert_norm": 0.5, "clipped": 2}
        | numbers
        | values
    )


def page(*entries: dict[str, Any], top_k: int = 2) -> str:
    return experts(Record("run", config={"model": {"moe": {"top_k": top_k}}}, routing=list(entries)))


def test_even_loads_are_well() -> None:
    text = page(entry(10, EVEN, [0.1, 0.2, 0.3, 0.4]))
    assert "At step 10 every expert works; the busiest has 1.6 times an even share." in text
    assert "dead" not in text
    assert "collapsed" not in text
    assert text.count("<svg") == 6
    assert "Clipped in 2 of 10 steps." in text


def test_experts_without_tokens_are_named() -> None:
    text = page(entry(10, EVEN, [0.5, 0.5, 0.0, 0.002]), entry(20, EVEN, [0.4, 0.6 - 0.001, 0.0, 0.001]))
    assert "Layer decoder 4: 2 of 4 experts are dead, with next to no tokens: 3, 4." in text
    assert "decoder 2:" not in text
    assert "model.moe.balance" in text


def test_an_expert_that_takes_all_is_a_collapse() -> None:
    text = page(entry(10, [0.97, 0.01, 0.01, 0.01]), top_k=1)
    assert "Layer decoder 2 has collapsed: expert 1 takes 97% of the tokens." in text
    assert "collapsed" in page(entry(10, [0.47, 0.2, 0.2, 0.13]), top_k=2)
    assert "collapsed" not in page(entry(10, [0.4, 0.2, 0.2, 0.2]), top_k=2)
    assert "collapsed" not in page(entry(10, EVEN), top_k=4)


def test_many_dead_experts_are_not_all_named() -> None:
    text = page(entry(10, [0.0] * 30 + [0.5, 0.5]))
    assert "30 of 32 experts are dead, with next to no tokens: 1, 2, 3, 4, 5, 6, 7, 8 and others." in text


def counted(step: int, load: list[float], choices: int, tokens: int) -> dict[str, Any]:
    return entry(step, load, choices=[choices], tokens=[tokens])


def test_a_collapse_is_told_by_tokens_whatever_the_second_experts_do() -> None:
    alone = page(counted(10, [1.0, 0.0, 0.0, 0.0], choices=5000, tokens=5000))
    assert "expert 1 takes 100% of the tokens" in alone
    some = page(counted(10, [0.5, 0.2, 0.2, 0.1], choices=6000, tokens=5000))  # 3,000 of 5,000 tokens
    assert "collapsed" not in some
    most = page(counted(10, [0.8, 0.1, 0.05, 0.05], choices=6000, tokens=5000))
    assert "expert 1 takes 96% of the tokens" in most


def test_chance_kills_no_expert() -> None:
    even, lucky = [counted(step, EVEN, choices=300, tokens=150) for step in (1, 2)], [0.4, 0.4, 0.2, 0.0]
    last = counted(3, lucky, choices=20, tokens=10)
    assert "At step 3 every expert works; the busiest has 1.0 times an even share." in page(*even, last)
    assert "At step 3 too few tokens were routed to tell whether every expert works." in page(last)
    assert "1 of 4 experts are dead" in page(*even, counted(3, lucky, choices=400, tokens=200))


def test_lines_without_a_finite_step_say_nothing_of_experts() -> None:
    text = page(entry(10, EVEN), entry(11, [0.0] * 4))
    assert "At step 10 every expert works" in text
    assert page(entry(11, [0.0] * 4)) == ""


@pytest.mark.parametrize(
    "broken", [{}, {"load": None}, {"load": [[0.5, None]]}, {"load": [EVEN, EVEN]}, {"load": []}, {"layers": "decoder 2"}]
)
def test_an_entry_that_does_not_hold_loads_is_passed_over(broken: dict[str, Any]) -> None:
    assert page({"step": 1} if not broken else entry(1, EVEN) | broken) == ""


def test_nothing_is_said_of_a_dense_run() -> None:
    assert experts(Record("run")) == ""
