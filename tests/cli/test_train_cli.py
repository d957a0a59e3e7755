"""From text files to a scored translator, and what can be done with it, as a user types it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kilolayer import recipes
from kilolayer.cli.configuration import read_tables
from kilolayer.config import build, load
from kilolayer.data.tokenizer import train_tokenizer
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.begin import new_run
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run
from kilolayer.tasks import registry, results
from kilolayer.tasks.config import RunConfig
from tests.cli.typed_commands import quietly, refused, translate


def test_training_leaves_everything_in_its_folder(trained: tuple[Path, str, str]) -> None:
    folder, out, err = trained
    files = (
        "config.toml tokenizer.model metrics.jsonl log.txt checkpoints scores.json samples.json report.html test.en-de.txt lock"
        " last_checkpoint.json"
    )
    assert {path.name for path in folder.iterdir()} == set(files.split())
    assert [path.name for path in checkpoint.steps(folder / "checkpoints")] == ["step-00000003", "step-00000006"]
    assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder / "checkpoints"))
    rows = read_metrics(folder)
    kinds = {kind: [row["step"] for row in rows if row["kind"] == kind] for kind in ("train", "valid", "layers", "event")}
    assert kinds == {"train": [2, 4, 6], "valid": [3, 6], "layers": [1, 3, 6], "event": []}
    assert all(row["bleu"] is not None and row["perplexity"] > 1 for row in rows if row["kind"] == "valid")
    assert rows[-1]["directions"].keys() == {"en-de"}
    scores = json.loads((folder / "scores.json").read_text())
    assert "nrefs:1" in scores["test"]["bleu"]["signature"]
    assert scores["frequency_buckets"]
    assert len(json.loads((folder / "samples.json").read_text())) == 10
    assert len((folder / "test.en-de.txt").read_text().splitlines()) == 10
    assert "<html" in (folder / "report.html").read_text()
    # Results on stdout, the way there on stderr and in the log.
    assert out.splitlines()[-1] == f"BLEU {scores['test']['bleu']['value']:.2f}"
    assert "own text" not in err  # it was
    assert "validation loss" in err
    assert "validation loss" in (folder / "log.txt").read_text()
    assert "validation loss" not in out


def test_the_folders_configuration_is_that_of_the_run(trained: tuple[Path, str, str], config: Path) -> None:
    kept, typed = build(RunConfig, load(trained[0] / "config.toml")), build(RunConfig, load(config))
    assert kept.train.lr == 8e-3
    assert (kept.data, kept.tokenizer, kept.batches, kept.search) == (typed.data, typed.tokenizer, typed.batches, typed.search)
    assert kept.model.vocab_size == 90
    assert kept.model.depths == typed.model.depths


@pytest.mark.slow
def test_a_run_from_its_own_configuration_is_the_same_run(trained: tuple[Path, str, str], tmp_path: Path) -> None:
    code, _, err = quietly("train", trained[0] / "config.toml", "--run", tmp_path / "again")
    assert code == 0, err
    again, first = ((folder / "checkpoints" / "step-00000006") for folder in (tmp_path / "again", trained[0]))
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (again / name).read_bytes() == (first / name).read_bytes()


def test_a_finished_run_has_nothing_more_to_do(trained: tuple[Path, str, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (trained[0] / "checkpoints").rglob("*")}
    code, out, err = quietly("train", "--resume", trained[0])
    assert code == 0
    assert "nothing to do" in err
    assert out == trained[1]
    assert {path: path.stat().st_mtime_ns for path in (trained[0] / "checkpoints").rglob("*")} == before


@pytest.mark.slow
def test_interrupted_as_it_scored_the_run_is_scored_again(
    trained: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    for name in ("scores.json", "samples.json", "report.html", "test.en-de.txt"):
        (folder / name).unlink()
    write = results.write

    def interrupted(path: Path, content: str) -> None:
        if path.parent == folder and path.name == "samples.json":
            raise KeyboardInterrupt
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(results, "write", interrupted)
        assert quietly("train", "--resume", folder)[0] == 130
    code, out, err = quietly("train", "--resume", folder)
    assert (code, out) == (0, trained[1]), err
    assert (folder / "scores.json").read_bytes() == (trained[0] / "scores.json").read_bytes()


def test_scores_as_json(trained: tuple[Path, str, str]) -> None:
    code, out, _ = quietly("train", "--resume", trained[0], "--json")
    assert code == 0
    assert json.loads(out) == {"test": json.loads((trained[0] / "scores.json").read_text())["test"]}


def test_folders_that_cannot_be_used_are_refused_in_three_lines(trained: tuple[Path, str, str], config: Path) -> None:
    assert "not empty" in refused("train", config, "--run", trained[0])[0]
    assert "is a file" in refused("train", config, "--run", config)[0]
    for words in (["train", "--resume"], ["translate"], ["evaluate"], ["report"]):
        lines = refused(*words, config.parent)
        assert "not a run" in lines[0]
        assert str(config.parent) in lines[1]


def test_mistakes_are_told_before_any_work_and_leave_no_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    assert "did you mean 'steps'" in refused("train", config, "--run", folder, "--train.stepz", "5")[0]
    assert "did you mean 'cosine'" in refused("train", config, "--run", folder, "--train.schedule", "cosin")[0]
    assert not folder.exists()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
        nowhere = ["--data.folder", "absent"]  # so that whoever looks at the data first says so
        lines = refused("train", config, "--run", folder, "--train.tensorboard", "true", *nowhere)
        assert "tensorboard is not installed" in lines[0]
    assert not folder.exists()
    assert quietly("train", config, "--run", folder, "--data.test", "absent")[0] == 2
    assert quietly("train", config, "--run", folder, "--train.steps", "1")[0] == 0  # the folder is still good for a run
    code, _, err = quietly("train", config, "--resume", folder)
    assert (code, "--resume takes no configuration" in err) == (2, True)


LINES = [b"The dog sleeps.", b"", b"A cat sees the ball.", b"   ", b"\xff\x80 dog", "Zoë\u2028\x0b\x00 漢字".encode(), b"."]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_translations_come_one_a_line_in_order(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, ending: bytes
) -> None:
    long = b"The dog sees the cat. " * 200
    code, out, err = translate(monkeypatch, ending.join([*LINES, long, b"The dog sleeps."]), trained[0])
    assert code == 0, err
    assert len(out) == len(LINES) + 2
    assert out[1] == out[3] == ""
    assert out[0] == out[-1] != ""
    assert err == (
        "1 line longer than --max-source-length tokens: truncated\n"
        "1 line with bytes that are not valid UTF-8: these were read as U+FFFD\n"
    )
    for line, found in zip(LINES, out, strict=False):  # alone as in company
        assert translate(monkeypatch, line, trained[0])[1] == ([] if line == b"" else [found])


@pytest.mark.parametrize("precision", ["bf16", pytest.param("int8", marks=pytest.mark.int8)])
def test_rounded_products_write_nearly_the_same(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr("kilolayer.speed.written.LEAST_INT8", 0)
    typed = ["--n-best", "1", "--greedy"]
    lines = b"The dog sleeps.\nA cat sees the ball.\n"
    (code, exact, _), (other, rounded, err) = (
        translate(monkeypatch, lines, trained[0], *typed, "--precision", each) for each in ("fp32", precision)
    )
    assert (code, other) == (0, 0), err
    scores = [[float(line.split("\t")[1]) for line in found] for found in (exact, rounded)]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], rel=0.01)


@pytest.mark.int8
def test_int8_is_refused_on_a_gpu_and_for_small_matrices(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for typed, told in (((), "add --device cpu"), (("--device", "cpu"), "int8 has no effect")):
        code, _, err = translate(monkeypatch, b"x\n", trained[0], "--precision", "int8", *typed)
        assert code == 2
        assert told in err


def test_no_input_no_output(trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert translate(monkeypatch, b"", trained[0]) == (0, [], "")


def test_several_hypotheses_a_line(trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--beam", "3", "--n-best", "3"]
    code, out, err = translate(monkeypatch, b"The dog sleeps.\n\nA cat.\n", trained[0], *typed)
    assert code == 0, err
    rows = [line.split("\t") for line in out]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "3", "3", "3"]
    assert float(rows[0][1]) >= float(rows[1][1]) >= float(rows[2][1])
    code, plain, err = translate(monkeypatch, b"The dog sleeps.\n", trained[0], "--beam", "3")
    assert (code, plain) == (0, [rows[0][2]]), err


@pytest.mark.slow
def test_the_embedded_default_can_start_from_a_run_of_itself(tmp_path: Path) -> None:
    small = ["--model.encoder_layers=1", "--model.decoder_layers=1"]

    def made(name: str, *typed: str) -> AbstractContextManager[Run]:
        return new_run(tmp_path / name, read_tables(registry.EMBEDDED, [*small, *typed]), Processes(), is_embedded=True)

    with made("first") as first:
        pass
    with made("second", "--train.start_from", str(first.folder)) as second:
        assert second.config.table()["data"]["folder"] == str((tmp_path / "second/data").resolve())
        assert second.vocabulary().digest == first.vocabulary().digest


def test_another_vocabulary_is_refused(trained: tuple[Path, str, str], config: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained[0], tmp_path / "other")
    kept = build(RunConfig, load(config)).tokenizer
    lines = (config.parent / "valid.en").read_text(encoding="utf-8").splitlines()
    (other / "tokenizer.model").write_bytes(train_tokenizer(lines, replace(kept, vocab_size=60)))
    assert "the vocabulary is not the one" in refused("translate", other)[0]


def test_evaluation_and_significance(trained: tuple[Path, str, str], config: Path, tmp_path: Path) -> None:
    code, out, _ = quietly("evaluate", trained[0])
    assert code == 0
    assert "BLEU" in out
    assert "nrefs:1" in out
    other = tmp_path / "other"
    assert quietly("train", config, "--run", other, "--train.steps", "1", "--train.seed", "7")[0] == 0
    code, out, _ = quietly("evaluate", trained[0], "--against", other, "--samples", "50", "--json")
    assert code == 0
    found = json.loads(out)
    assert (
        found["scores"]["test"]["bleu"]["value"]
        == json.loads((trained[0] / "scores.json").read_text())["test"]["bleu"]["value"]
    )
    assert list(found["against"]) == [str(other)]
    code, out, _ = quietly("evaluate", trained[0], "--against", other, "--samples", "50")
    assert (code, f"against {other}" in out) == (0, True)
    assert "compared with itself" in refused("evaluate", other, "--against", trained[0], other)[0]
    third = shutil.copytree(other, tmp_path / "third")
    text = (third / "config.toml").read_text(encoding="utf-8")
    (third / "config.toml").write_text(text.replace('test = "test"', 'test = "valid"'), encoding="utf-8")
    code, _, err = quietly("evaluate", trained[0], "--against", third)
    assert (code, "the test set has changed since the run translated it" in err) == (2, True)
    scores = json.loads((third / "scores.json").read_text())
    del scores["held_out"]  # as an earlier version wrote it
    (third / "scores.json").write_text(json.dumps(scores))
    code, _, err = quietly("evaluate", trained[0], "--against", third)
    assert (code, "different test sets" in err) == (2, True)


def test_the_report_is_written_anew(trained: tuple[Path, str, str]) -> None:
    (trained[0] / "report.html").unlink()
    code, out, _ = quietly("report", trained[0])
    assert code == 0
    assert Path(out.strip()) == trained[0] / "report.html"
    assert recipes.get(recipes.DEFAULT).name in (trained[0] / "report.html").read_text()


@pytest.mark.slow
def test_two_directions_share_a_model(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "both"
    typed = ["--data.directions", '["en-de", "de-en"]', "--train.average", "2"]
    code, out, err = quietly("train", config, "--run", folder, *typed)
    assert code == 0, err
    scores = json.loads((folder / "scores.json").read_text())
    assert {"test en-de", "test de-en"} <= scores.keys()
    assert "test en-de" in out
    assert [len((folder / f"test.{name}.txt").read_text().splitlines()) for name in ("en-de", "de-en")] == [10, 10]
    valid = [row for row in read_metrics(folder) if row["kind"] == "valid"]
    assert all(row["directions"].keys() == {"en-de", "de-en"} for row in valid)
    code, lines, _ = translate(monkeypatch, b"Der Hund lacht.\n\n", folder, "--direction", "de-en")
    assert (code, len(lines), lines[1]) == (0, 2, "")
    code, _, err = translate(monkeypatch, b"x\n", folder)
    assert (code, "--direction" in err) == (2, True)
    code, _, err = translate(monkeypatch, b"x\n", folder, "--direction", "en-fr")
    assert (code, "'en-fr'" in err) == (2, True)


def test_it_all_works_in_a_shell(trained: tuple[Path, str, str]) -> None:
    command = [sys.executable, "-m", "kilolayer", "translate", str(trained[0])]
    done = subprocess.run(command, input=b"\r\n".join(LINES) + b"\r\n", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == len(LINES)
    assert b"\r" not in done.stdout
    done.stdout.decode("utf-8")
