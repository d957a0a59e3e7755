"""What the page says about experts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kilolayer.report import experts_section as section
from kilolayer.report.experts_section import expert_faults, experts_section, experts_summary
from kilolayer.report.page import render
from kilolayer.report.panel import Panel
from kilolayer.report.record import Record

EVEN = [0.25, 0.25, 0.25, 0.25]


def entry(step: int, *loads: list[float], **values: Any) -> dict[str, Any]:
    names = [f"decoder {2 * index + 2}" for index in range(len(loads))]
    numbers = {name: [0.05] * len(loads) for name in ("entropy", "dropped", "temperature")}
    return (
        {"step": step, "layers": names, "load": list(loads), "dense_norm": 1.0, "expert_norm": 0.5, "clipped": 2}
        | numbers
        | values
    )


def record(*entries: dict[str, Any], train: dict[str, Any] | None = None, **moe: Any) -> Record:
    return Record("run", config={"model": {"moe": {"top_k": 2, **moe}}, "train": train or {}}, routing=list(entries))


def page(*entries: dict[str, Any]) -> str:
    return render(record(*entries))


def faults(*entries: dict[str, Any], top_k: int = 2) -> str:
    return " ".join(expert_faults(record(*entries, top_k=top_k)))


@pytest.mark.usefixtures("undrawn")
def test_even_loads_are_well() -> None:
    text = page(entry(10, EVEN, [0.1, 0.2, 0.3, 0.4]))
    assert "At step 10 every expert is in use; the busiest takes 1.6 times an even share." in text
    assert "dead" not in text
    assert "collapsed" not in text
    assert text.count("<svg") == 6
    assert "Clipped in 2 of 10 steps." in text


def test_experts_without_tokens_are_named() -> None:
    lines = entry(10, EVEN, [0.5, 0.5, 0.0, 0.002]), entry(20, EVEN, [0.4, 0.6 - 0.001, 0.0, 0.001])
    text = faults(*lines)
    assert text in " ".join(re.sub("<[^>]*>", " ", page(*lines)).split())
    assert "Layer decoder 4: 2 of 4 experts are dead, with almost no tokens: 3, 4." in text
    assert "decoder 2:" not in text
    assert "model.moe.balance" in text


def test_an_expert_that_takes_all_is_a_collapse() -> None:
    text = faults(entry(10, [0.97, 0.01, 0.01, 0.01]), top_k=1)
    assert "Layer decoder 2 has collapsed: expert 1 takes 97% of the tokens." in text
    assert "collapsed" in faults(entry(10, [0.47, 0.2, 0.2, 0.13]), top_k=2)
    assert "collapsed" not in faults(entry(10, [0.4, 0.2, 0.2, 0.2]), top_k=2)
    assert "collapsed" not in faults(entry(10, EVEN), top_k=4)


def test_many_dead_experts_are_not_all_named() -> None:
    text = faults(entry(10, [0.0] * 30 + [0.5, 0.5]))
    assert "30 of 32 experts are dead, with almost no tokens: 1, 2, 3, 4, 5, 6, 7, 8 and others." in text


DEAD = [0.5, 0.5, 0.0, 0.0]


def test_the_advice_is_that_of_the_runs_own_way_to_balance() -> None:
    assert expert_faults(record(entry(10, DEAD)))[-1].startswith("Raise model.moe.balance or set model.moe.loss_free, lower")
    assert expert_faults(record(entry(10, DEAD), loss_free=1e-3))[-1].startswith("Raise model.moe.loss_free, lower")
    frozen = expert_faults(record(entry(10, DEAD), train={"freeze": "experts", "start_from": "runs/base"}, loss_free=1e-3))[-1]
    assert frozen == "Experts and routers are frozen: the faults are those of runs/base. Train without train.freeze."
    fresh = expert_faults(record(entry(10, DEAD), train={"freeze": "experts"}))[-1]
    assert "those of a model that was never trained" in fresh


def test_many_dropped_choices_are_a_fault_of_their_own() -> None:
    found = expert_faults(record(entry(10, EVEN, EVEN, dropped=[0.19, 0.35]), capacity=0.5))
    assert found[:-1] == [
        "Layer decoder 4 drops 35% of the tokens' choices: the experts are full.",
    ]
    assert found[-1].startswith("Raise model.moe.capacity (now 0.5, 1.25 is usual), or balance the loads: raise model.moe.bal")
    assert expert_faults(record(entry(10, EVEN, dropped=[0.2]))) == []
    both = expert_faults(record(entry(10, DEAD, dropped=[0.5]), capacity=1.0, loss_free=1e-3))
    assert both[-2] == "Raise model.moe.capacity (now 1, 1.25 is usual), or balance the loads: raise model.moe.loss_free."
    assert both[-1].startswith("Raise model.moe.loss_free, ")
    frozen = expert_faults(record(entry(10, EVEN, dropped=[0.5]), train={"freeze": "experts"}, capacity=1.0))
    assert frozen[-1] == "Raise model.moe.capacity (now 1, 1.25 is usual)."


def test_choices_were_dropped_in_as_many_lines_as_the_loads_are_of() -> None:
    few, many = ({"choices": [count], "tokens": [count // 2]} for count in (100, 300))
    lines = [entry(1, EVEN, dropped=[0.9], **many), entry(2, EVEN, dropped=[0.0], **many), entry(3, EVEN, dropped=[0.9], **few)]
    assert "drops 22% of" in expert_faults(record(*lines))[0]  # 90 of the 400 choices of the last two


def test_the_dropped_share_is_drawn_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from_zero: dict[str, bool] = {}

    def note(name: str, title: str, *_: Any, **options: Any) -> Panel:
        from_zero[name] = options.get("from_zero", False)
        return Panel(None, title)

    monkeypatch.setattr(section, "chart_panel", note)
    page(entry(10, EVEN))
    assert from_zero["dropped"]


@pytest.mark.parametrize(
    ("loads", "options", "expected"),
    [
        ([EVEN, EVEN], {}, "all in use"),
        ([EVEN, DEAD], {"top_k": 4}, "2 dead"),
        ([EVEN, [0.34, 0.33, 0.33, 0.0]], {}, "1 dead"),
        ([[1.0, 0.0, 0.0, 0.0], DEAD], {"top_k": 1}, "1 layer collapsed, 5 dead"),
        ([DEAD, EVEN], {"top_k": 2}, "1 layer collapsed, 2 dead"),
        ([EVEN, EVEN], {"dropped": [0.1, 0.35]}, "35% dropped"),
        ([EVEN, EVEN], {"choices": [4, 4], "tokens": [2, 2]}, "too few tokens to tell"),
    ],
)
def test_a_tile_says_how_the_experts_are(loads: list[list[float]], options: dict[str, Any], expected: str) -> None:
    found = record(entry(10, *loads, **{k: v for k, v in options.items() if k != "top_k"}), top_k=options.get("top_k", 2))
    assert experts_summary(found) == (expected, "4 in each of 2 layers, step 10")
    assert bool(expert_faults(found)) == (expected not in ("all in use", "too few tokens to tell"))


@pytest.mark.usefixtures("undrawn")
def test_the_tile_stands_at_the_top_of_a_sparse_run_alone() -> None:
    top = render(record(entry(1200, EVEN))).partition("<h2")[0]
    assert "<dt>Experts</dt><dd>all in use<small>4 in 1 layer, step 1,200</small>" in top
    assert "<dt>Experts" not in render(Record("run"))


def counted(step: int, load: list[float], choices: int, tokens: int) -> dict[str, Any]:
    return entry(step, load, choices=[choices], tokens=[tokens])


@pytest.mark.slow
def test_a_collapse_is_found_by_tokens_whatever_the_second_experts_do() -> None:
    alone = page(counted(10, [1.0, 0.0, 0.0, 0.0], choices=5000, tokens=5000))
    assert "expert 1 takes 100% of the tokens" in alone
    some = page(counted(10, [0.5, 0.2, 0.2, 0.1], choices=6000, tokens=5000))  # 3,000 of 5,000 tokens
    assert "collapsed" not in some
    most = page(counted(10, [0.8, 0.1, 0.05, 0.05], choices=6000, tokens=5000))
    assert "expert 1 takes 96% of the tokens" in most


@pytest.mark.slow
def test_chance_kills_no_expert() -> None:
    even, lucky = [counted(step, EVEN, choices=300, tokens=150) for step in (1, 2)], [0.4, 0.4, 0.2, 0.0]
    last = counted(3, lucky, choices=20, tokens=10)
    assert "At step 3 every expert is in use; the busiest takes 1.0 times an even share." in page(*even, last)
    assert "At step 3 too few tokens were routed to tell whether every expert is in use." in page(last)
    assert "1 of 4 experts is dead, with almost no tokens: 4." in page(*even, counted(3, lucky, choices=400, tokens=200))


@pytest.mark.usefixtures("undrawn")
def test_lines_without_a_finite_step_say_nothing_of_experts() -> None:
    text = page(entry(10, EVEN), entry(11, [0.0] * 4))
    assert "At step 10 every expert is in use" in text
    assert experts_section(record(entry(11, [0.0] * 4))) is None


@pytest.mark.parametrize(
    "broken", [{}, {"load": None}, {"load": [[0.5, None]]}, {"load": [EVEN, EVEN]}, {"load": []}, {"layers": "decoder 2"}]
)
def test_an_entry_that_does_not_hold_loads_is_passed_over(broken: dict[str, Any]) -> None:
    assert experts_section(record({"step": 1} if not broken else entry(1, EVEN) | broken)) is None


def test_nothing_is_said_of_a_dense_run() -> None:
    assert experts_section(Record("run")) is None
    assert "Experts" not in render(Record("run"))
