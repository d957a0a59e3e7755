"""What a diagnosis says of earlier runs is what benchmarks/diagnose/errors.json has, and what the rules make of it."""

from __future__ import annotations

import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kilolayer.probe.record import DEAD_ENCODERS, FADED, RECORDS, UNREAD, Record, faded, record_of
from kilolayer.probe.verdict import VANISHED

ROOT = Path(__file__).parents[2]


@cache
def document() -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks/diagnose/errors.json").read_text())


@cache
def table() -> dict[str, Any]:
    """The functions of benchmarks/diagnose/errors_table.py."""
    return runpy.run_path(str(ROOT / "benchmarks/diagnose/errors_table.py"))


def test_records_are_those_of_the_measured_runs() -> None:
    counts = {
        moment: {kind: [own.runs, own.failed, own.learned] for kind, own in records.items()}
        for moment, records in RECORDS.items()
    }
    assert counts == document()["records"]
    failed = table()["FAILED"]
    below = {(row["part"], row["below"]): row for row in document()["faded"]}
    for (part, share), row in below.items():
        assert FADED[part][share] == Record(row["seen"], sum(row[label] for label in failed), row["finished"])
    assert sum(map(len, FADED.values())) == len(below)
    assert document()["dead_encoders"] == {"seen": DEAD_ENCODERS, "source_not_read": UNREAD}


def test_records_follow_from_the_measurements_and_the_limits_of_the_rules() -> None:
    assert {moment: table()["records"](document(), moment) for moment in RECORDS} == document()["records"]


@pytest.mark.parametrize("moment", ["start", "half"])
def test_the_page_has_the_error_rates(moment: str) -> None:
    page = (ROOT / "docs/diagnose.md").read_text()
    assert [row for row in table()["rule_rows"](document(), moment) if row not in page] == []


def test_the_advice_of_a_lower_rate_has_its_record() -> None:
    found = document()["slower"]
    said = f"of {found['seen']} dead runs of benchmarks/dead, {found['not_dead']} are not dead at a quarter of the rate, and"
    assert f"{said} {found['live']} learn" in (ROOT / "src/kilolayer/probe/verdict.py").read_text()


def test_the_page_has_the_record_of_fading_gradients() -> None:
    page = (ROOT / "docs/diagnose.md").read_text()
    for part, records in FADED.items():
        cells = (f"{own.runs}, {own.failed}, {own.learned}" for own in records.values())
        assert f"| {part:.0%} | {' | '.join(cells)} |" in page


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    bound = table()["bound"]
    assert bound(0, 248) == pytest.approx(1 - 0.05 ** (1 / 248), abs=1e-5)
    assert bound(3, 20) == pytest.approx(0.3437, abs=1e-4)  # scipy.stats.beta.ppf(0.95, 4, 17)
    assert bound(5, 5) == 1.0


def test_a_record_is_that_of_the_nearest_moment() -> None:
    start, half = RECORDS["start"]["collapsed states"], RECORDS["half"]["collapsed states"]
    assert record_of("collapsed states", 0, 100) == start.sentence("began so")
    assert record_of("collapsed states", 30, 100) == half.sentence("were so after half of their steps")
    assert record_of("collapsed states", 90, 100).startswith(
        f"Of {RECORDS['end']['collapsed states'].runs} runs that ended so, "
    )
    every = RECORDS["start"]["all"].runs
    assert (
        record_of("exploding gradient", 0, 100) == f"None of {every} measured runs began so: what becomes of it is not known."
    )
    assert faded(40, 100, 1e-3) == (0.5, FADED[0.5][1e-3])
    assert faded(1, 100, 1e-2) == (0.1, FADED[0.1][1e-2])


def test_the_page_has_the_test_of_the_limit_on_the_first_layers_gradient() -> None:
    found = json.loads((ROOT / "benchmarks/diagnose/vanishing.json").read_text())
    first = {row["series"]: row["first"] for row in found["before"].values()}
    runs = [(first[row["series"]], row["label"]) for row in found["runs"].values()]
    below, above = ([label for share, label in runs if (share < VANISHED) == side] for side in (True, False))
    models = len({row["series"] for row in found["runs"].values()})
    page = " ".join((ROOT / "docs/diagnose.md").read_text().split())
    assert f"tested on {len(runs)} runs of {models} other models" in page
    for side, title in ((below, "below the limit"), (above, "between the limit and a half")):
        dead, idle, learned = (side.count(label) for label in ("dead", "no_progress", "finished"))
        assert dead + idle + learned == len(side)
        counts = f"{dead} were dead( at the end)?, {idle} made no progress and {learned} learned"
        assert re.search(f"Of the {len(side)} runs {title}, {counts}", page)
