"""What Python prints of a result is what the command prints, and a notebook shows it as HTML with the plots of its page."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import kilolayer as kl
from kilolayer.compare import queue
from kilolayer.config import dump
from kilolayer.errors import OptionError
from tests.fixtures.small_runs import SMALL, table, text_table
from tests.runs.run_by_command import printed

FAKE = Path(__file__).parents[1] / "compare" / "fake_train.py"
IMAGE = "data:image/svg+xml;base64,"


class Fragment(HTMLParser):
    """The tags, the text and the images of a fragment of HTML, all of whose elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.images: list[ElementTree.Element] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            source = dict(attrs)["src"] or ""
            self.images.append(ElementTree.fromstring(base64.b64decode(source.removeprefix(IMAGE))))
        elif tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(result: Any) -> Fragment:
    return Fragment(result._repr_html_())


def is_drawing(image: ElementTree.Element) -> bool:
    return image.tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.matrix(3)
@pytest.mark.parametrize("task", SMALL)
def test_a_run_prints_what_the_command_printed_at_its_end(task: str, trained: dict[str, Path]) -> None:
    assert f"{kl.load(trained[task])}\n" == trained[task].with_suffix(".txt").read_text() != ""


def test_a_run_without_scores_says_how_far_it_is(trained: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained["causal_lm"], tmp_path / "run"))
    (folder / "scores.json").unlink()
    assert f'step 4 of 4, not scored yet; continue with: kl.train(resume="{folder}")' in str(kl.load(folder))


def test_a_run_in_a_notebook_has_its_scores_and_its_curves(trained: dict[str, Path]) -> None:
    found = shown(kl.load(trained["translation"]))
    assert "BLEU" in found.text
    assert "table" in found.tags
    assert len(found.images) == 2
    assert all(map(is_drawing, found.images))
    assert "script" not in found.tags


def test_text_of_a_run_is_no_markup(trained: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained["translation"], tmp_path / "run"))
    hostile = "<script>alert(1)</script><img src=x>"
    samples = json.loads((folder / "samples.json").read_text())
    (folder / "samples.json").write_text(json.dumps([dict.fromkeys(samples[0], hostile)]))
    found = shown(kl.load(folder))
    assert "script" not in found.tags
    assert hostile in found.text


def test_a_diagnosis_prints_what_the_command_prints(trained: dict[str, Path], tmp_path: Path) -> None:
    found = kl.diagnose(trained["causal_lm"])
    assert f"{found}\n" == printed("diagnose", trained["causal_lm"], "--out", tmp_path / "page.html")
    notebook = shown(found)
    assert all(line in notebook.text for line in found.verdict())
    assert len(notebook.images) == 2
    assert all(map(is_drawing, notebook.images))


@pytest.mark.slow
def test_a_forecast_prints_what_the_command_prints(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(dump(text_table(corpus, model={"layers": 1})))
    found = kl.forecast(tmp_path / "small.toml")
    assert f"{found}\n" == printed("forecast", tmp_path / "small.toml")
    assert "Largest learning rate" in shown(found).text


def test_a_comparison_prints_what_the_command_prints(trained: dict[str, Path], tmp_path: Path) -> None:
    places = [trained["causal_lm"], Path(shutil.copytree(trained["causal_lm"], tmp_path / "again"))]
    found = kl.compare_runs(places)
    assert f"{found}\n" == printed("compare", *places, "--out", tmp_path / "out")
    notebook = shown(found)
    assert "causal_lm" in notebook.text
    assert notebook.images
    assert all(map(is_drawing, notebook.images))


@pytest.fixture
def _fake_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "TRAIN", (str(FAKE),))
    monkeypatch.setattr(queue, "POLL_SECONDS", 0.02)
    monkeypatch.setenv("FAKE_EVENTS", str(tmp_path / "events.jsonl"))


@pytest.mark.usefixtures("_fake_runs")
def test_a_comparison_takes_what_train_takes_and_tells_its_progress(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = text_table(corpus, model={"recipe": "sub_ln"})
    whole = {**small, "model": {**small["model"], "recipe": kl.recipes.get("sub_ln")}}
    compared = kl.run_comparison(whole, {"train.lr": [0.01, 5.0]}, folder=tmp_path / "out", train={"steps": 3})
    said = capsys.readouterr().err
    assert "2 of 2 runs to train" in said
    assert [said.count(f"{member.name}: started") for member in compared.members] == [1, 1]
    (tmp_path / "small.toml").write_text(dump(small))
    printed("compare", tmp_path / "small.toml", "--set", "train.lr=0.01,5.0", "--train.steps", "3", "--out", tmp_path / "typed")
    configs = [
        [json.dumps(each.config_of(member).table(), default=str) for member in each.members]
        for each in (compared, kl.run_comparison(tmp_path / "typed"))
    ]
    assert configs[0] == configs[1]
    longer = kl.run_comparison(tmp_path / "out", {"train.lr": [0.02]})
    assert [row["train.lr"] for row in longer.rows()] == [0.01, 5.0, 0.02]


@pytest.mark.usefixtures("_fake_runs")
def test_the_rows_of_a_comparison_are_plain_values(corpus: Path, tmp_path: Path) -> None:
    compared = kl.run_comparison(text_table(corpus), {"train.lr": [0.01, 5.0]}, folder=tmp_path / "out", train={"steps": 3})
    rows = json.loads(json.dumps(compared.rows()))
    document = json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"]
    assert [row["run"] for row in rows] == [run["name"] for run in document]
    assert [row["outcome"] for row in rows] == [run["outcome"]["kind"] for run in document] == ["finished", "diverged"]
    assert [row["train.lr"] for row in rows] == [0.01, 5.0]
    assert rows[0]["validation loss"] == min(row["loss"] for row in document[0]["valid"])
    assert len({tuple(row) for row in rows}) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"config": {"task": "causal_lm"}, "axes": {"train.seed": [1]}}, "no folder is given"),
        ({"config": None, "folder": "out"}, "there is nothing to compare"),
        ({"config": 5, "axes": {"train.seed": [1]}, "folder": "out"}, "the configuration is 5"),
        ({"axes": {"train.seed": [1]}, "folder": "out", "options": {"train.lr": 1}}, "options"),
    ],
)
def test_a_comparison_that_cannot_begin_says_what_is_missing(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=words):
        kl.run_comparison(**given)
    assert not list(tmp_path.iterdir())


def test_printing_needs_no_plots() -> None:
    probe = "import sys, kilolayer.report.run_parts; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_folder_that_is_no_comparison_is_refused(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "small.toml").write_text(dump(table(corpus)))
    with pytest.raises(OptionError, match="has its own folder"):
        kl.run_comparison(tmp_path, folder=tmp_path / "out")
