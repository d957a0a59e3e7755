"""A run is scored on any text, from Python and as typed, and what it keeps of its own test part stays as it is."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.runs import checkpoint
from kilolayer.runs.run import Run
from kilolayer.runs.scoring import score_text
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.training.loop import train
from tests.fixtures.commands import typed
from tests.fixtures.small_classifiers import classify_table
from tests.fixtures.small_runs import SMALL, new_run_of, stop_after, task_of

TEXTS = [task for task in SMALL if task not in ("classify_image", "image_tokenizer", "masked_image", "segment")]
"""The tasks whose test part is a text."""


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each task after one step, without scores."""
    folder = tmp_path_factory.mktemp("scored")
    found = {task: new_run_of(task, folder / task, corpus, train={"steps": 1, "lr": 1e-2}) for task in SMALL}
    for run in found.values():
        assert train(run, task_of(run)) == 0
    return found


def own_test(task: str, corpus: Path) -> str:
    """What names the run's own test part."""
    table = SMALL[task](corpus)
    section = next(name for name in ("data", "text", "examples") if name in table)
    return table[section]["test"]


def tables_of(scores: Mapping[str, Any]) -> list[Any]:
    return [entry for name, entry in scores.items() if name.startswith("test")]


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_loaded_run_is_scored_with_what_it_has_loaded(runs: dict[str, Run], corpus: Path, tmp_path: Path) -> None:
    loaded = kl.load(shutil.copytree(runs["causal_lm"].folder, tmp_path / "run"), device="cpu")
    before = loaded.scores(own_test("causal_lm", corpus))
    shutil.rmtree(loaded.folder / "checkpoints")
    assert loaded.scores(own_test("causal_lm", corpus)) == before


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", TEXTS)
def test_the_own_test_part_by_its_name_has_the_scores_that_the_run_has(
    runs: dict[str, Run], corpus: Path, tmp_path: Path, task: str
) -> None:
    run = runs[task]
    before = files_of(run.folder)
    found = score_text(run, OtherText((own_test(task, corpus),)))
    assert files_of(run.folder) == before
    scored = Run.open(shutil.copytree(run.folder, tmp_path / "run")).scores("cpu")
    assert tables_of(found) == tables_of(scored)
    assert found["weights"] == scored["weights"]
    code, out, err = typed("evaluate", run.folder, "--test", own_test(task, corpus), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert tables_of(document["scores"]) == tables_of(found)
    assert document["weights"] == found["weights"]
    assert files_of(run.folder) == before


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", TEXTS)
def test_another_text_has_other_scores_and_needs_none_of_the_training_text(
    runs: dict[str, Run], corpus: Path, tmp_path: Path, task: str
) -> None:
    run = Run.open(shutil.copytree(runs[task].folder, tmp_path / "run"))
    elsewhere = shutil.copytree(corpus, tmp_path / "elsewhere")
    settings = run.folder / "config.toml"
    settings.write_text(settings.read_text().replace(str(corpus), str(tmp_path / "gone")))
    part = elsewhere / Path(own_test(task, corpus)).name.replace("test", "valid")
    found = score_text(Run.open(run.folder), OtherText((str(part),)))
    assert tables_of(found) != tables_of(score_text(runs[task], OtherText((own_test(task, corpus),))))
    code, out, err = typed("evaluate", run.folder, "--test", part)
    assert code == 0, err
    assert "weights: best, step 1" in out


@pytest.mark.slow
def test_a_source_and_its_reference_have_the_scores_of_what_translate_writes(
    runs: dict[str, Run], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs["translation"]
    source, reference = corpus / "valid.en", corpus / "valid.de"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source.read_bytes())))
    code, out, err = typed("translate", run.folder)
    assert code == 0, err
    expected = BLEU().corpus_score(out.split("\n")[:-1], [reference.read_text().splitlines()]).score
    words = ["evaluate", run.folder, "--source", source, "--reference", reference]
    code, out, err = typed(*words, "--json")
    assert code == 0, err
    score = json.loads(out)["scores"]["test"]["bleu"]
    assert score["value"] == pytest.approx(expected)
    assert score["signature"].startswith("nrefs:1|")
    assert score["value"] == score_text(run, OtherText(source=str(source), reference=str(reference)))["test"]["bleu"]["value"]
    assert kl.load(run.folder).scores(source=source, reference=reference)["test"]["bleu"]["value"] == score["value"]
    code, out, _ = typed(*words)
    assert (code, "BLEU by words in the reference" in out, "frequency in training" in out) == (0, True, False)


@pytest.mark.slow
def test_two_runs_are_compared_on_one_text(runs: dict[str, Run], corpus: Path, tmp_path: Path) -> None:
    run = runs["translation"]
    other = shutil.copytree(run.folder, tmp_path / "other")
    before = files_of(tmp_path)
    words = ["evaluate", run.folder, "--against", other, "--samples", "20", "--json"]
    code, out, err = typed(*words, "--test", "valid")
    assert code == 0, err
    found = json.loads(out)
    assert found["scores"].keys() == {"test valid"}
    assert found["against"][str(other)]["baseline"]["value"] == pytest.approx(found["scores"]["test valid"]["bleu"]["value"])
    code, out, err = typed(*words, "--source", corpus / "valid.en", "--reference", corpus / "valid.de")
    assert code == 0, err
    assert json.loads(out)["against"] == found["against"]
    assert files_of(tmp_path) == before


@pytest.mark.slow
def test_several_sets_are_scored_apart_and_a_direction_is_asked_for(corpus: Path, tmp_path: Path) -> None:
    run = new_run_of("translation", tmp_path / "run", corpus, data={"directions": ["en-de", "de-en"]}, train={"steps": 1})
    assert train(run, task_of(run)) == 0
    sets = ("valid", str(corpus / "test"))
    assert {name for name in score_text(run, OtherText(sets)) if name.startswith("test")} == {
        f"test {name} {direction}" for name in ("valid", "test") for direction in ("en-de", "de-en")
    }
    assert "test valid" in score_text(run, OtherText(("valid",), direction="de-en"))
    pair: dict[str, Any] = {"source": str(corpus / "valid.de"), "reference": str(corpus / "valid.en")}
    with pytest.raises(OptionError, match="several directions") as caught:
        score_text(run, OtherText(**pair))
    assert 'direction="en-de"' in caught.value.fix
    one_way = score_text(run, OtherText(**pair, direction="de-en"))
    assert one_way["test"] == score_text(run, OtherText(("valid",), direction="de-en"))["test valid"]
    with pytest.raises(OptionError, match="unknown direction 'en-fr'"):
        score_text(run, OtherText(**pair, direction="en-fr"))


def test_a_language_model_reads_another_text_with_another_stride(runs: dict[str, Run], corpus: Path) -> None:
    run = runs["causal_lm"]
    code, out, err = typed(
        "evaluate", run.folder, "--test", corpus / "valid.en", corpus / "valid.de", "--stride", "4", "--json"
    )
    assert code == 0, err
    scores = json.loads(out)["scores"]["test"]
    assert "stride:4" in scores["bits_per_byte"]["signature"]
    (short := corpus.parent / "short.txt").write_text("a")
    code, _, err = typed("evaluate", run.folder, "--test", short)
    assert code == 0, err


def error_lines(*words: object) -> list[str]:
    code, out, err = typed(*words)
    assert (code, out) == (2, ""), err
    lines = err.splitlines()
    assert len(lines) == 3, err
    return lines


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("task", "other"), [*permutations(SMALL, 2)])
def test_runs_of_different_tasks_are_not_compared(runs: dict[str, Run], task: str, other: str) -> None:
    lines = error_lines("evaluate", runs[task].folder, "--against", runs[other].folder)
    if task == "translation":
        assert lines[0] == f"kilolayer: a translator cannot be compared with {runs[other].registration.title}"
        assert str(runs[other].folder) in lines[1]
        assert "name translators" in lines[2]
    else:
        assert lines[0] == f"kilolayer: --against has no effect on {runs[task].registration.title}"
        assert "it applies to a translator" in lines[2]


def test_a_text_that_cannot_be_scored_is_refused_before_the_model_is_read(
    runs: dict[str, Run], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "load_model", lambda *_: pytest.fail("the model was read"))
    (few := tmp_path / "few.de").write_text("eins\n")
    (empty := tmp_path / "empty.txt").write_text("")
    translator, source = ["evaluate", runs["translation"].folder], ["--source", corpus / "valid.en"]
    assert "not aligned: 10 lines and 1 line" in error_lines(*translator, *source, "--reference", few)[0]
    assert "the file is empty" in error_lines(*translator, *source, "--reference", empty)[0]
    lines = error_lines(*translator, "--test", "newstest")
    assert "the corpus 'newstest' has no text for en-de" in lines[0]
    assert "expected newstest.en and newstest.de" in lines[2]
    assert "--source has no effect on a language model" in error_lines("evaluate", runs["causal_lm"].folder, *source)[0]
    assert "the file is empty" in error_lines("evaluate", runs["masked_lm"].folder, "--test", empty)[0]
    lines = error_lines("evaluate", runs["causal_lm"].folder, "--test", "absent.txt")
    assert ("does not exist" in lines[0], "--test: absent.txt" in lines[1]) == (True, True)
    assert "label" in error_lines("evaluate", runs["classify"].folder, "--test", corpus / "bare.tsv")[0]


def test_what_is_missing_or_too_much_is_named() -> None:
    for options, what in {
        (("source", "a"),): "a source is given without a reference",
        (("reference", "a"),): "a reference is given without a source",
        (("test", ("a",)), ("source", "b")): "both given",
        (): "no text is given",
    }.items():
        with pytest.raises(OptionError, match=what) as caught:
            OtherText(**dict(options))  # type: ignore[arg-type]
        assert caught.value.fix
    with pytest.raises(OptionError, match="source has no effect on a language model"):
        OtherText(source="a", reference="b").files("a language model")


def test_examples_need_labels_and_the_classes_of_the_run(runs: dict[str, Run], corpus: Path, tmp_path: Path) -> None:
    run = runs["classify"]
    text = Path(classify_table(corpus)["examples"]["test"]).read_text().splitlines(keepends=True)
    (odd := tmp_path / "odd.tsv").write_text("".join([*text[:3], "so so\tyes\tnever seen\t0\n"]))
    with pytest.raises(InputError, match="there is no class 'never seen'"):
        score_text(run, OtherText((str(odd),)))
    with pytest.raises(OptionError, match="one file at a time"):
        score_text(run, OtherText((str(odd), str(odd))))
    with pytest.raises(InputError):
        score_text(run, OtherText((str(tmp_path / "absent.tsv"),)))


def test_a_task_without_a_way_to_read_says_so(runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    from kilolayer.tasks.masked_lm.task import MaskedLMTask
    from kilolayer.tasks.task import Task

    monkeypatch.setattr(MaskedLMTask, "read_text", Task.__dict__["read_text"])
    with pytest.raises(InputError, match="is scored on its own test set only"):
        score_text(replace(runs["masked_lm"]), OtherText(("a",)))


@pytest.mark.parametrize("task", ["causal_lm", "translation"])
def test_scoring_a_run_before_its_end_leaves_it_unfinished(
    task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with scores counts as finished, which a comparison would not train any more."""
    run = new_run_of(task, tmp_path / "run", corpus, train={"steps": 6, "save_every": 2, "lr": 1e-2})
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(run, task_of(run)) == 143
    before = files_of(run.folder)
    code, out, err = typed("evaluate", run.folder, "--json")
    assert (code, bool(tables_of(json.loads(out)["scores"]))) == (0, True)
    assert "is not finished: these scores are of the weights so far, and are not kept" in err
    assert kl.load(run.folder, device="cpu").scores().keys() >= {"test", "weights"}
    assert files_of(run.folder) == before
    assert not run.is_trained
    assert train(run, task_of(run), resume=True) == 0
    assert run.is_trained
    assert typed("evaluate", run.folder)[0] == 0
    assert (run.folder / "scores.json").exists()


def test_a_run_that_ran_out_of_patience_is_trained(corpus: Path, tmp_path: Path) -> None:
    options = {"steps": 500, "valid_every": 1, "patience": 2, "lr": 10.0, "save_every": 100}
    run = new_run_of("causal_lm", tmp_path / "run", corpus, train=options)
    assert train(run, task_of(run)) == 0
    assert checkpoint.step_of(checkpoint.steps(run.checkpoints)[-1]) < 500
    assert run.is_trained


def test_translations_are_not_scored_against_another_test_set(corpus: Path, tmp_path: Path) -> None:
    data = shutil.copytree(corpus, tmp_path / "data")
    runs = [new_run_of("translation", tmp_path / name, data, train={"steps": 1, "lr": 1e-2}) for name in ("a", "b")]
    for run in runs:
        assert train(run, task_of(run)) == 0
        assert typed("evaluate", run.folder)[0] == 0
    assert typed("evaluate", runs[0].folder, "--against", runs[1].folder)[0] == 0
    config = runs[0].config
    assert isinstance(config, TranslationConfig)
    assert task_of(runs[0]).answers(config, runs[0].folder, tmp_path / "cache") is not None
    for path in data.glob("test.??"):
        path.write_text("".join(reversed(path.read_text(encoding="utf-8").splitlines(keepends=True))), encoding="utf-8")
    for words in ([], ["--against", runs[1].folder], ["--json"]):
        code, _, err = typed("evaluate", runs[0].folder, *words)
        assert (code, "the test set has changed since the run translated it" in err) == (2, True)
    with pytest.raises(InputError, match="test set has changed"):
        task_of(runs[0]).answers(config, runs[0].folder, tmp_path / "cache")
