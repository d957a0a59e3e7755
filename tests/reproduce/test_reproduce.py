"""Reproductions: every one runs in its tiny form, and what they share: settings, text, pages, the list."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from pathlib import Path

import pytest

from kilolayer import reproduce
from kilolayer.cli.main import main
from kilolayer.evaluate.stack_label import DEAD, as_fraction
from kilolayer.reproduce.base import PAPERS, all_of, get
from kilolayer.reproduce.lab import BRIEF, SMALL, TINY, Lab
from kilolayer.reproduce.landscape import roughness
from kilolayer.reproduce.page import save
from kilolayer.reproduce.pictures import first_by
from tests.reproduce.made_up_runs import two_seeds

NAMES = [each.name for each in all_of()]


QUICK = ("deepnet-figure4",)


EXPECTED = {
    *(f"deepnet-figure{number}" for number in range(1, 10)),
    *(f"deepnet-table{number}" for number in range(1, 12)),
    *(f"admin-{place}" for place in ("figure2", "figure3", "table1", "table3", "table4")),
    *(f"torchscale-figure{number}" for number in range(1, 5)),
}


def test_every_page_of_trained_runs_names_how_runs_are_labelled(tmp_path: Path) -> None:
    trained = get("deepnet-table11")
    cells = [("derived", "derived"), ("one", "derived"), ("derived", "one")]
    runs = [run for a, b in cells for run in two_seeds(2.0, model__recipe__alpha=a, model__recipe__beta=b)]
    save(tmp_path, trained, {"runs": runs}, tiny=False)
    document = json.loads((tmp_path / "found.json").read_text())
    sentence = f"less than {as_fraction(DEAD)} of the largest layer"
    assert sentence in document["instrument"]
    assert sentence in (tmp_path / "page.html").read_text()
    assert document["setting"] == trained.setting
    assert all((each.instrument is None) != each.trains_runs for each in all_of())


def test_no_reproduction_ends_a_run_early() -> None:
    for path in Path(reproduce.__path__[0]).glob("*.py"):
        assert "stop_when_dead" not in path.read_text(), path


def test_all_figures_and_tables_are_there_with_a_claim_a_setting_and_a_rule() -> None:
    assert set(NAMES) == EXPECTED
    for each in all_of():
        assert re.fullmatch(rf"({'|'.join(PAPERS)})-(figure|table)\d+", each.name)
        assert each.claim.endswith(".")
        assert each.setting.endswith(".")
        assert "eld if" in each.rule or "held" in each.rule
        assert "undecided" in each.rule or "otherwise" in each.rule.lower()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES])
def test_the_tiny_form_runs_and_leaves_a_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILOLAYER_DATA", raising=False)
    assert main(["reproduce", name, "--tiny", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "tiny" / name
    document = json.loads((folder / "found.json").read_text())
    assert document["verdict"] in ("held", "not held", "undecided")
    assert document["verdict"] in capsys.readouterr().out
    page = (folder / "page.html").read_text()
    assert document["claim"].split(";")[0].split("'")[0] in page
    assert (tmp_path / "tiny" / "comparisons").exists() == get(name).trains_runs
    # What was found is judged again from the file alone.
    again = get(name).judge(document["found"])
    assert (again.word, again.why) == (document["verdict"], document["why"])


def test_what_a_reproduction_changes_in_its_configuration_is_its_own(tmp_path: Path) -> None:
    before = deepcopy((SMALL, TINY, BRIEF))
    lab = Lab(tmp_path / "any", tiny=True)
    whole = Lab(tmp_path / "any")
    for config in (lab.translation(), lab.language(), whole._sized({}, {})):
        for table in config.values():
            if isinstance(table, dict):
                table |= {"dim": 7, "warmup_steps": 7, "tokens": 7, "method": "other"}
    assert before == (SMALL, TINY, BRIEF)


def test_a_plane_is_smooth_and_hills_are_rough() -> None:
    places = [0.1 * step for step in range(9)]
    plane = [[x + 2 * y for x in places] for y in places]
    bowl = [[x * x + y * y for x in places] for y in places]
    hills = [[math.sin(20 * x) * math.sin(20 * y) for x in places] for y in places]
    rough = [roughness({"x": places, "y": places, "loss": loss}) for loss in (plane, bowl, hills)]
    assert rough[0] == pytest.approx(0.0, abs=1e-12)
    assert rough[0] < rough[1] < rough[2]
    # Second differences of x^2 + y^2 are 2 h^2 along each axis; the height is 2 (0.8)^2.
    assert rough[1] == pytest.approx(2 * 0.01 / (2 * 0.64))


def test_real_text_is_asked_for_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KILOLAYER_DATA", raising=False)
    assert main(["reproduce", "deepnet-table1", "--out", str(tmp_path / "out")]) == 2
    assert "KILOLAYER_DATA is not set" in capsys.readouterr().err
    monkeypatch.setenv("KILOLAYER_DATA", str(tmp_path))
    assert main(["reproduce", "deepnet-table7", "--out", str(tmp_path / "out")]) == 2
    assert "is missing" in capsys.readouterr().err
    assert main(["reproduce", "deepnet-table1", "--parallel", "0"]) == 2


def test_curves_are_those_of_the_first_seeds_in_the_order_of_the_runs() -> None:
    runs = [{"options": {"train.lr": lr, "train.seed": seed}} for lr in (2e-3, 1e-3) for seed in (1, 2)]
    first = first_by(runs, "train.lr")
    assert list(first) == ["0.002", "0.001"]
    assert [run["options"]["train.seed"] for run in first.values()] == [1, 1]


def test_the_list_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    assert capsys.readouterr().out.count("\n") == 2 * len(NAMES)
    assert main(["reproduce", "deepnet-figur4"]) == 2
    assert "deepnet-figure4" in capsys.readouterr().err
    assert main(["reproduce", "figure4"]) == 2
    assert "did you mean 'deepnet-figure4'" in capsys.readouterr().err
    assert main(["reproduce", "deepnet-figure4", "--parallel", "0"]) == 2
    for flag in ("--seconds", "--parallel"):
        capsys.readouterr()
        assert main(["reproduce", "deepnet-figure4", "--tiny", flag, "5"]) == 2
        assert f"{flag} has no effect on deepnet-figure4" in capsys.readouterr().err
    assert main(["reproduce", "--tiny"]) == 2
