"""The table of a comparison: best of each cell, spread over seeds, words for the dead, significance."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from kilolayer.cli.main import main
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.documents import write_documents
from kilolayer.compare.result import Member, is_complete, result_of
from kilolayer.compare.table import as_json, tabulate
from kilolayer.compare.verdicts import against_best
from kilolayer.config import dump
from kilolayer.evaluate.scores import Bleu
from kilolayer.evaluate.significance import paired_bootstrap
from tests.fixtures.small_runs import new_run, new_text_run, table


def write_run(
    folder: Path, config: str, losses: list[float], test: float | None, valid: float | None = None, event: Any = None
) -> None:
    """A run as it lies on the disk, with a row a step."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    rows: list[dict[str, Any]] = [{"kind": "train", "step": step, "nll": loss} for step, loss in enumerate(losses, 1)]
    if valid is not None:
        rows += [{"kind": "valid", "step": step, "loss": valid + 1.0 / step, "bleu": None} for step in range(1, 5)]
    rows += [] if event is None else [event]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if test is not None:
        score = {"name": "BLEU", "value": test, "signature": "none"}
        (folder / "scores.json").write_text(json.dumps({"test": {"bleu": score}, "weights": {}}))


GOOD = [6.0, 5.0, 4.0, 3.5, 3.0, 2.9, 2.8]
BAD = [6.0, 5.0, 4.0, 3.5, 6.0, 6.0, 6.0, 6.0]
SCORES = {  # by recipe, depth, rate, seed: validation loss and BLEU, or None for a run that diverged
    ("pre_ln", 6, 1e-3, 1): (3.0, 20.0),
    ("pre_ln", 6, 1e-3, 2): (3.2, 22.0),
    ("pre_ln", 6, 2e-3, 1): (2.8, 19.0),
    ("pre_ln", 6, 2e-3, 2): (3.0, 18.0),
    ("pre_ln", 18, 1e-3, 1): (2.7, 25.0),
    ("pre_ln", 18, 1e-3, 2): (2.7, 25.0),
    ("pre_ln", 18, 2e-3, 1): (2.2, 30.0),
    ("pre_ln", 18, 2e-3, 2): None,
    ("post_ln", 6, 1e-3, 1): (2.9, 24.0),
    ("post_ln", 6, 1e-3, 2): None,
    ("post_ln", 6, 2e-3, 1): None,
    ("post_ln", 6, 2e-3, 2): None,
    ("post_ln", 18, 1e-3, 1): None,
    ("post_ln", 18, 1e-3, 2): None,
}


@pytest.fixture
def comparison(tmp_path: Path, written: Path) -> Comparison:
    shutil.copytree(written, tmp_path / "comparison")
    return Comparison.open(tmp_path / "comparison")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The comparison whose runs are SCORES; not to be changed."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "base.toml").write_text(dump(table(corpus)))
    made = Comparison.make(folder / "comparison", folder / "base.toml")
    made.members.clear()
    names = ("model.recipe", "layers", "train.lr", "train.seed")
    made.add([dict(zip(names, setting, strict=True)) for setting in SCORES])
    for member, found in zip(made.members, SCORES.values(), strict=True):
        config = dump(made.table_of(member))
        if found is None:
            write_run(member.folder, config, BAD, 3.0, 4.0)
        else:
            write_run(member.folder, config, GOOD, found[1], found[0])
    return made.folder


def test_a_cell_is_the_best_setting_on_the_validation_part_with_its_spread_over_seeds(comparison: Comparison) -> None:
    found = tabulate(comparison)
    assert [measure.title for measure in found.measures] == ["BLEU, test", "validation loss"]
    bleu, loss = found.measures
    cell = found.cell("pre_ln", 6)
    assert cell is not None
    assert (cell.best.options, cell.tried) == ({"train.lr": 2e-3}, 2)  # its BLEU is the lower one: the test does not choose
    assert cell.text(bleu) == f"{mean([19.0, 18.0]):.1f} ± {stdev([19.0, 18.0]):.1f}"
    assert cell.text(loss) == f"{mean([2.8, 3.0]) + 0.25:.3f} ± {stdev([2.8, 3.0]):.3f}"


def test_a_setting_with_fewer_deaths_goes_before_a_better_mean(comparison: Comparison) -> None:
    cell = tabulate(comparison).cell("pre_ln", 18)
    assert cell is not None
    assert cell.best.options == {"train.lr": 1e-3}


def test_deaths_are_told_in_words(comparison: Comparison) -> None:
    found = tabulate(comparison)
    assert found.header(found.measures[0]) == ["recipe", "6L", "18L"]
    assert found.lines(found.measures[0]) == [
        ["pre_ln", "18.5 ± 0.7", "25.0 ± 0.0"],
        ["post_ln", "24.0 (1 of 2 diverged)", "2 of 2 diverged"],
    ]


def test_one_dead_run_tells_its_step(comparison: Comparison) -> None:
    comparison.members = [member for member in comparison.members if member.options["train.seed"] == 1]
    found = tabulate(comparison)
    assert found.lines(found.measures[0])[1] == ["post_ln", "24.0", "diverged at step 5"]


def test_the_best_of_all_is_the_best_on_the_validation_part(comparison: Comparison) -> None:
    found = tabulate(comparison)
    best = found.best()
    assert best is not None
    assert found.title_of(best) == "pre_ln 18L"


def test_a_best_value_at_the_edge_is_told(comparison: Comparison) -> None:
    notes = tabulate(comparison).notes
    assert "pre_ln 6L: its best train.lr, 0.002, is the largest that was tried" in notes
    assert "pre_ln 18L, post_ln 6L: their best train.lr, 0.001, is the smallest that was tried" in notes
    assert not any("post_ln 18L" in note for note in notes)  # none is alive there


def test_a_finished_run_that_does_not_read_its_source_is_named(comparison: Comparison) -> None:
    def validated(place: int, gain: float) -> str:
        member = comparison.members[place]
        with (member.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "valid", "step": 7, "loss": 3.1, "source_gain": gain}) + "\n")
        return member.name

    blind, well, dead = validated(0, 0.01), validated(1, 0.6), validated(7, 0.01)
    notes = "\n".join(tabulate(comparison).notes)
    assert f"{blind}: at step 7 the right source lowers the loss by only 0.010 nats per token" in notes
    assert f"{well}: " not in notes
    assert f"{dead}: " not in notes  # it diverged, which says enough


def test_a_cell_with_one_value_of_an_option_has_no_edge(tmp_path: Path) -> None:
    for recipe, rate in (("pre_ln", 1e-3), ("post_ln", 2e-3)):
        config = f'[model]\nrecipe = "{recipe}"\nlayers = {2 if recipe == "pre_ln" else 3}\n[train]\nlr = {rate}\n'
        write_run(tmp_path / recipe, config, GOOD, 20.0, 3.0)
    found = tabulate(Comparison.of_runs([tmp_path / "pre_ln", tmp_path / "post_ln"]))
    assert [cell.best.options["train.lr"] for cell in found.cells] == [1e-3, 2e-3]
    assert found.notes == ()


def test_no_setting_is_shown_as_the_best_of_a_cell_in_which_all_died(
    comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison.add([{"model.recipe": "post_ln", "layers": 18, "train.lr": 2e-3, "train.seed": 1}])
    write_run(comparison.members[-1].folder, dump(comparison.table_of(comparison.members[-1])), BAD, 3.0, 4.0)
    assert main(["compare", str(comparison.folder)]) == 0
    out = capsys.readouterr().out
    chosen = out[out.index("the best of each cell") :]
    assert "post_ln 6L" in chosen
    assert "post_ln 18L" not in chosen


def test_a_run_added_without_an_option_is_shown_at_the_value_of_its_configuration(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "base.toml").write_text(dump(table(corpus)))  # its rate is 0.01, its recipe the default
    made = Comparison.make(tmp_path / "made", tmp_path / "base.toml", settings=[{"model.recipe": "post_ln"}])
    made.add([{"model.recipe": "pre_ln", "train.lr": 0.02}, {"train.lr": 0.03}])
    for member, (valid, test) in zip(made.members, ((3.0, 10.0), (2.9, 11.0), (2.0, 12.0)), strict=True):
        write_run(member.folder, dump(made.table_of(member)), GOOD, test, valid)
    found = tabulate(Comparison.open(made.folder))
    assert found.header(found.measures[0]) == ["recipe", "lr 0.01", "lr 0.02", "lr 0.03"]
    assert found.lines(found.measures[0]) == [
        ["post_ln", "10.0", "", ""],
        ["pre_ln", "", "11.0", ""],
        ["deepnorm", "", "", "12.0"],
    ]
    best = found.best()
    assert best is not None
    assert found.title_of(best) == "deepnorm lr 0.03"
    write_documents(made)
    document = json.loads((made.folder / "comparison.json").read_text())
    assert document["axes"] == {"model.recipe": ["post_ln", "pre_ln", "deepnorm"], "train.lr": [0.01, 0.02, 0.03]}


def test_a_run_added_with_and_without_an_option_counts_once(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "base.toml").write_text(dump(table(corpus)))  # its rate is 0.01, its dim 16
    settings = [
        {option: value, "train.seed": seed} for option, value in (("train.lr", 0.01), ("model.dim", 16)) for seed in (1, 2)
    ]
    made = Comparison.make(tmp_path / "made", tmp_path / "base.toml", settings=settings)
    for member in made.members:
        test = {1: 10.0, 2: 14.0}[member.options["train.seed"]]
        write_run(member.folder, dump(made.table_of(member)), GOOD, test, 3.0)
    found = tabulate(made)
    assert found.lines(found.measures[0]) == [["0.01", f"12.0 ± {stdev([10, 14]):.1f}"]]


def test_runs_that_wait_or_are_under_way_are_no_deaths(comparison: Comparison) -> None:
    comparison.add([{"model.recipe": "sub_ln", "layers": 6, "train.lr": 1e-3, "train.seed": 1}])
    cell = tabulate(comparison).cell("sub_ln", 6)
    assert cell is not None
    assert cell.text(tabulate(comparison).measures[0]) == "waiting"


def test_json_has_every_cell_and_run_and_the_page_shows_them(comparison: Comparison) -> None:
    found, _ = write_documents(comparison)
    document = json.loads((comparison.folder / "comparison.json").read_text())
    assert len(document["runs"]) == len(SCORES)
    assert {run["outcome"]["text"] for run in document["runs"]} == {"finished", "diverged at step 5"}
    assert document["runs"][0]["folder"] == f"runs/{comparison.members[0].name}"
    assert document["table"] == json.loads(json.dumps(as_json(found)))
    assert document["table"]["cells"][0]["measures"]["test bleu"]["values"] == [19.0, 18.0]
    page = (comparison.folder / "comparison.html").read_text()
    for text in ("18.5 ± 0.7", "24.0 (1 of 2 diverged)", "diverged at step 5", "Each cell is the best of up to 2 settings"):
        assert text in page
    assert (comparison.folder / "grid.svg").read_text().startswith("<svg")


def test_significance_is_that_of_the_kept_translations(tmp_path: Path, corpus: Path) -> None:
    references = (corpus / "test.de").read_text().splitlines()
    generator = random.Random(1)
    folders, lines = [], []
    for name, spoiled in (("good", 0.0), ("worse", 0.5)):
        run = new_run(tmp_path / name, corpus, model={"layers": 2 if name == "good" else 3})
        kept = [" ".join(w for w in line.split() if generator.random() >= spoiled) for line in references]
        (run.folder / "test.en-de.txt").write_text("".join(f"{line}\n" for line in kept))
        rows = [{"kind": "train", "step": step, "nll": loss} for step, loss in enumerate(GOOD, 1)]
        rows += [{"kind": "valid", "step": 4, "loss": 2.0 + spoiled}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        score = {"name": "BLEU", "value": Bleu().score(kept, references).value, "signature": "none"}
        (run.folder / "scores.json").write_text(json.dumps({"test": {"bleu": score}, "weights": {}}))
        folders.append(run.folder)
        lines.append(kept)
    compared = Comparison.of_runs(folders)
    (verdict,) = against_best(tabulate(compared))
    assert verdict.significance == paired_bootstrap(lines[0], lines[1], references)
    assert verdict.significance.verdict == "-"
    assert (verdict.title, verdict.run, verdict.best) == ("3L deepnorm", "worse", "good")


def test_runs_that_exist_are_told_apart_by_what_differs(tmp_path: Path, corpus: Path) -> None:
    first = new_text_run(tmp_path / "a" / "run", corpus, model={"recipe": "pre_ln"}, train={"lr": 1e-3})
    other = new_text_run(tmp_path / "b" / "run", corpus, model={"recipe": "post_ln", "layers": 3}, train={"lr": 2e-3})
    compared = Comparison.of_runs([first.folder, other.folder, first.folder])
    assert [member.name for member in compared.members] == ["run", "run-2"]
    assert [member.options for member in compared.members] == [
        {"model.recipe": "pre_ln", "train.seed": 1, "train.lr": 1e-3, "layers": 2},
        {"model.recipe": "post_ln", "train.seed": 1, "train.lr": 2e-3, "layers": 3},
    ]


def test_runs_that_differ_in_nothing_are_told_by_name(tmp_path: Path, corpus: Path) -> None:
    runs = [new_text_run(tmp_path / name, corpus) for name in ("one", "two")]
    compared = Comparison.of_runs([run.folder for run in runs])
    assert [member.options["run"] for member in compared.members] == ["one", "two"]
    assert len(tabulate(compared).cells) == 2


def test_runs_of_different_tasks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", 'task = "translation"\n[model]\nrecipe = "pre_ln"\n', GOOD, 20.0, 3.0)
    write_run(tmp_path / "two", 'task = "causal_lm"\n[model]\nrecipe = "pre_ln"\n', GOOD, 20.0, 2.0)
    compared = Comparison.of_runs([tmp_path / "one", tmp_path / "two"])
    assert [member.options["task"] for member in compared.members] == ["translation", "causal_lm"]
    assert len(tabulate(compared).cells) == 2
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(tmp_path / "out")]) == 0
    assert "causal_lm" in capsys.readouterr().out


def test_a_run_without_layers_is_compared_with_one_that_has_them(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 'task = "image_tokenizer"\n[model]\ncodes = 16\n', GOOD, None, 3.0)
    write_run(tmp_path / "two", 'task = "classify_image"\n[model]\nlayers = 3\n', GOOD, None, 2.0)
    found = tabulate(Comparison.of_runs([tmp_path / "one", tmp_path / "two"]))
    assert found.header(found.measures[0])[1:] == ["none", "3L"]


def test_no_task_is_better_than_another(tmp_path: Path) -> None:
    for task, recipe, layers, loss in (
        ("translation", "pre_ln", 2, 3.0),
        ("causal_lm", "pre_ln", 2, 2.0),
        ("causal_lm", "post_ln", 3, 2.5),
    ):
        config = f'task = "{task}"\n[model]\nrecipe = "{recipe}"\nlayers = {layers}\n'
        write_run(tmp_path / f"{task}-{recipe}", config, GOOD, 20.0, loss)
    found = tabulate(Comparison.of_runs(sorted(tmp_path.iterdir())))
    assert found.rows is not None
    assert found.rows.name == "task"
    assert [cell.tried for cell in found.cells] == [1, 1, 1]
    assert found.best() is None


def write_classifier(folder: Path, metric: str, value: float, loss: float, seed: int, part: str = "test") -> None:
    config = f'task = "classify"\n[model]\nrecipe = "pre_ln"\n[examples]\nmetric = "{metric}"\n[train]\nseed = {seed}\n'
    write_run(folder, config, GOOD, None, loss)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "valid", "step": 9, "loss": loss, "metric": value}) + "\n")
    score = {"name": metric, "value": value, "signature": "none"}
    (folder / "scores.json").write_text(json.dumps({part: {"metric": score}}))


def test_a_metric_that_was_chosen_is_told_by_its_name(tmp_path: Path) -> None:
    for seed, value in ((1, 60.0), (2, 70.0)):
        write_classifier(tmp_path / str(seed), "Matthews correlation", value, 0.5, seed)
    found = tabulate(Comparison.of_runs([tmp_path / "1", tmp_path / "2"]))
    titles = ["Matthews correlation, test", "Matthews correlation, validation", "validation loss"]
    assert [measure.title for measure in found.measures] == titles
    assert found.cells[0].text(found.measures[0]) == f"{mean([60, 70]):.2f} ± {stdev([60, 70]):.2f}"


def test_scores_of_the_validation_set_are_not_those_of_a_test(tmp_path: Path) -> None:
    for seed, value in ((1, 60.0), (2, 70.0)):  # as for GLUE, whose test sets have no labels
        write_classifier(tmp_path / str(seed), "Matthews correlation", value, 0.5, seed, part="validation")
    found = tabulate(Comparison.of_runs([tmp_path / "1", tmp_path / "2"]))
    assert [measure.title for measure in found.measures] == ["Matthews correlation, validation", "validation loss"]
    assert found.cells[0].text(found.measures[0]) == f"{mean([60, 70]):.2f} ± {stdev([60, 70]):.2f}"


def test_runs_with_several_metrics_are_compared_by_their_loss(tmp_path: Path) -> None:
    write_classifier(tmp_path / "1", "accuracy", 80.0, 0.6, 1)
    write_classifier(tmp_path / "2", "Matthews correlation", 60.0, 0.3, 1)
    found = tabulate(Comparison.of_runs([tmp_path / "1", tmp_path / "2"]))
    assert [measure.title for measure in found.measures] == ["validation loss"]
    best = found.best()
    assert best is not None
    assert best.row == "Matthews correlation"


def test_a_run_that_lacks_the_measure_of_the_others_can_be_the_best(tmp_path: Path) -> None:
    for recipe, loss in (("pre_ln", 3.0), ("post_ln", 2.0)):
        write_run(tmp_path / recipe, f'task = "translation"\n[model]\nrecipe = "{recipe}"\n', GOOD, 20.0, loss)
    with (tmp_path / "pre_ln" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "valid", "step": 9, "loss": 3.0, "bleu": 15.0}) + "\n")  # train.valid_bleu
    found = tabulate(Comparison.of_runs([tmp_path / "pre_ln", tmp_path / "post_ln"]))
    best = found.best()
    assert best is not None
    assert (best.row, found.chosen_by.title) == ("post_ln", "validation loss")


def test_a_run_whose_scores_cannot_be_read_is_not_complete(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "", GOOD, 20.0, 3.0)
    member = Member("run", {}, tmp_path / "run")
    assert is_complete(member)
    for broken in ("", "garbage", "{}", "[]"):
        (member.folder / "scores.json").write_text(broken)
        assert not is_complete(member)
        assert result_of(member).outcome.kind == "unfinished"


def test_a_member_of_a_broken_folder_is_a_result_too(tmp_path: Path, corpus: Path) -> None:
    run = new_text_run(tmp_path / "run", corpus)
    (run.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "nll": {}}\n[]\n{"kind": "valid", "st')
    (run.folder / "scores.json").write_text('{"test": [], "validation": {"bits_per_byte": 3}, "weights": 1}')
    comparison = Comparison(tmp_path / "out", [Member("run", {"layers": 2}, run.folder)])
    write_documents(comparison)
    assert (tmp_path / "out" / "comparison.html").exists()
