"""From a text file to a language model that writes, as a user types it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kilolayer.config import build, load
from kilolayer.data.grammar import pairs
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks.config import RunConfig
from tests.cli.typed_commands import quietly, refused

CONFIG = """\
task = "causal_lm"

[model]
layers = 2
dim = 16
heads = 2
ffn_dim = 32

[text]
train = "{text}"
valid_share = 0.1
test_share = 0.1
length = 32

[tokenizer]
kind = "{kind}"
{size}

[batches]
tokens = 128

[train]
steps = 6
lr = 1e-2
warmup_steps = 3
log_every = 2
layers_every = 3
valid_every = 3
save_every = 3
device = "cpu"
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(german for _, german in pairs(200, seed=1, unseen=False)), encoding="utf-8")
    return path


def write_config(text: Path, kind: str) -> Path:
    path = text.with_name(f"{kind}.toml")
    path.write_text(CONFIG.format(text=text, kind=kind, size="" if kind == "bytes" else "vocab_size = 330"))
    return path


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str, str]]:
    """A finished run of each kind, trained when it is first wanted, and what it printed."""

    @cache
    def finished(kind: str) -> tuple[Path, str, str]:
        folder = tmp_path_factory.mktemp("runs") / kind
        code, out, err = quietly("train", write_config(text, kind), "--run", folder)
        assert code == 0, err
        return folder, out, err

    return finished


@pytest.fixture(params=["bytes", pytest.param("bpe", marks=pytest.mark.slow)])
def written(request: pytest.FixtureRequest, runs: Callable[[str], tuple[Path, str, str]]) -> tuple[Path, str, str]:
    return runs(request.param)


@pytest.fixture
def of_bytes(runs: Callable[[str], tuple[Path, str, str]]) -> Path:
    return runs("bytes")[0]


@pytest.mark.slow
def test_another_text_is_learned_from_the_weights_and_the_vocabulary_of_a_run(
    runs: Callable[[str], tuple[Path, str, str]], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = runs("bpe")[0]
    other = tmp_path / "other.txt"
    other.write_text("\n".join(english for english, _ in pairs(200, seed=2, unseen=False)), encoding="utf-8")
    words = ["train", write_config(text, "bpe"), "--run", tmp_path / "run", "--text.train", other, "--train.start_from"]
    monkeypatch.chdir(base.parent)
    lines = refused(*words, base.name, "--tokenizer.vocab_size", "340", "--model.vocab_size", "340")
    assert lines[0] == "kilolayer: the vocabulary is not that of the run to start from"
    assert str(base / "config.toml") in lines[2]
    assert "the checkpoint does not fit the configuration" in refused(*words, base.name, "--model.ffn_dim", "64")[0]
    sparse = refused(*words, base.name, "--model.moe.experts", "4")
    assert sparse[0] == "kilolayer: the run to start from has no experts per layer, but this one has 4"
    code, _, err = quietly(*words, base.name)
    assert code == 0, err
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()
    assert load(tmp_path / "run" / "config.toml")["train"]["start_from"] == str(base.resolve())
    found, before = (
        next(row["loss"] for row in read_metrics(run) if row["kind"] == "train") for run in (tmp_path / "run", base)
    )
    assert found < before


def test_training_leaves_everything_in_its_folder(written: tuple[Path, str, str]) -> None:
    folder, out, err = written
    files = {"config.toml", "metrics.jsonl", "log.txt", "checkpoints", "scores.json", "samples.json", "report.html", "lock"}
    files.add("last_checkpoint.json")
    assert {path.name for path in folder.iterdir()} == files | ({"tokenizer.model"} if folder.name == "bpe" else set())
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if row["kind"] == "valid"] == [3, 6]
    assert all(row["bits_per_byte"] > 0 for row in rows if row["kind"] == "valid")
    layers = next(row for row in rows if row["kind"] == "layers")
    assert {side: len(values) for side, values in layers["gradient"].items()} == {"decoder": 2}
    scores = json.loads((folder / "scores.json").read_text())["test"]
    assert out.splitlines()[-1] == f"bits per byte {scores['bits_per_byte']['value']:.4f}"
    assert "bits per byte" in err
    assert f'kilolayer generate {folder} --prompt "..."' in err
    page = (folder / "report.html").read_text(encoding="utf-8")
    for shown in (
        "Bits per byte on the validation set",
        "Sample continuations",
        "how the model continues",
        "Gradient norm, decoder",
    ):
        assert shown in page
    for absent in ("BLEU", "encoder", "translation"):
        assert absent not in page.partition("<h2>Configuration")[0]
    assert f"{scores['bits_per_byte']['value']:.4f}" in page


@pytest.mark.slow
def test_a_run_from_its_own_configuration_is_the_same_run(written: tuple[Path, str, str], tmp_path: Path) -> None:
    kept = build(RunConfig, load(written[0] / "config.toml"))
    assert kept.task == "causal_lm"
    assert "[data]" not in (written[0] / "config.toml").read_text()
    code, _, err = quietly("train", written[0] / "config.toml", "--run", tmp_path / "again")
    assert code == 0, err
    weights = [folder / "checkpoints/step-00000006/model.safetensors" for folder in (tmp_path / "again", written[0])]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, out, err = quietly("train", "--resume", written[0])
    assert (code, out, "nothing to do" in err) == (0, written[1], True)


def test_evaluation_shows_the_scores_and_other_strides(written: tuple[Path, str, str]) -> None:
    folder = written[0]
    code, out, _ = quietly("evaluate", folder, "--json")
    kept = json.loads((folder / "scores.json").read_text())
    assert (code, json.loads(out)) == (0, {"scores": {"test": kept["test"]}, "weights": kept["weights"]})
    assert kept["weights"] == {"chosen": "best", "steps": [6], "passed_over": []}
    code, out, _ = quietly("evaluate", folder, "--stride", "8", "--json")
    other = json.loads(out)["scores"]["test"]["bits_per_byte"]
    assert "stride:8|" in other["signature"]
    assert json.loads(out)["weights"] == json.loads((folder / "scores.json").read_text())["weights"]
    assert other["value"] != kept["test"]["bits_per_byte"]["value"]
    assert json.loads((folder / "scores.json").read_text()) == kept
    assert f"{other['value']:.4f}" in quietly("evaluate", folder, "--stride", "8")[1]
    (folder / "scores.json").unlink()
    assert quietly("evaluate", folder)[0] == 0
    assert json.loads((folder / "scores.json").read_text()) == kept


def test_what_evaluation_cannot_do_is_told_in_three_lines(of_bytes: Path, trained: tuple[Path, str, str]) -> None:
    for flags in (["--against", of_bytes], ["--samples", 10], ["--meteor"], ["--tokenised"]):
        assert f"{flags[0]} has no effect on a language model" in refused("evaluate", of_bytes, *flags)[0]
    assert "1 to text.length, 32" in refused("evaluate", of_bytes, "--stride", "33")[2]
    assert "no effect on a translator" in refused("evaluate", trained[0], "--stride", "8")[0]


def generate(monkeypatch: pytest.MonkeyPatch, data: bytes, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return quietly("generate", *words)


def test_a_prompt_is_continued(written: tuple[Path, str, str]) -> None:
    folder = written[0]
    code, out, err = quietly("generate", folder, "--prompt", "Der Hund", "--max-tokens", "60")
    assert code == 0, err
    assert out.startswith("Der Hund")
    assert len(out) > 20
    assert quietly("generate", folder, "--prompt", "Der Hund", "--max-tokens", "60")[1] == out
    assert quietly("generate", folder, "--prompt", "Der Hund", "--max-tokens", "60", "--seed", "1")[1] != out
    document = json.loads(quietly("generate", folder, "--prompt", "Der Hund", "--max-tokens", "60", "--json")[1])
    assert document[0]["prompt"] + document[0]["continuations"][0]["text"] == out.removesuffix("\n")  # as it was streamed
    assert quietly("generate", folder, "--prompt", "", "--greedy", "--max-tokens", "5")[0] == 0


@pytest.mark.int8
def test_a_prompt_is_continued_in_int8(written: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.written.LEAST_INT8", 0)
    words = ["generate", written[0], "--prompt", "Der Hund", "--greedy", "--max-tokens", "1", "--json", "--precision"]
    (exact,), (rounded,) = (json.loads(quietly(*words, precision)[1])[0]["continuations"] for precision in ("fp32", "int8"))
    assert rounded["log_probability"] != exact["log_probability"]
    assert rounded["log_probability"] == pytest.approx(exact["log_probability"], abs=0.1)


def test_prompts_come_from_standard_input_a_line_each(written: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "Der Hund\r\n\nEine Frau \u2028 ß日\n".encode()
    words = [written[0], "--samples", "2", "--max-tokens", "7", "--top-k", "20", "--top-p", "0.9", "--temperature", "0.8"]
    code, out, err = generate(monkeypatch, lines, *words, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert [each["prompt"] for each in document] == ["Der Hund", "", "Eine Frau \u2028 ß日"]
    assert all(len(each["continuations"]) == 2 for each in document)
    _, plain, _ = generate(monkeypatch, lines, *words)
    expected = [each["prompt"] + one["text"] for each in document for one in each["continuations"]]
    assert plain == "\n---\n".join(expected) + "\n"
    assert generate(monkeypatch, b"", *words) == (0, "", "")


def test_of_a_long_prompt_the_last_part_is_read(of_bytes: Path) -> None:
    prompt = "Der Hund schläft. " * 10
    code, out, err = quietly("generate", of_bytes, "--prompt", prompt, "--greedy", "--max-tokens", "9")
    assert code == 0
    assert "32 tokens at once" in err
    _, short, quiet = quietly("generate", of_bytes, "--prompt", prompt.encode()[-32:].decode(), "--greedy", "--max-tokens", "9")
    assert out.removeprefix(prompt) == short.removeprefix(prompt.encode()[-32:].decode())
    assert quiet == ""


def test_bad_prompts_options_and_runs_are_told_in_three_lines(
    of_bytes: Path, trained: tuple[Path, str, str], config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = refused("generate", of_bytes, "--prompt", "caf\udce9")  # how the shell's bytes arrive
    assert ("byte 0xe9" in lines[0], "--prompt, byte 4" in lines[1]) == (True, True)
    code, out, err = generate(monkeypatch, b"fine\n\xff\xfe\n", of_bytes, "--json")
    assert (code, out, len(err.splitlines())) == (2, "", 3)
    assert "standard input, line 2, byte 1" in err
    for words, what in {
        ("--temperature", "0"): "--temperature is 0",
        ("--top-p", "1.5"): "top_p is 1.5",
        ("--top-k", "0"): "--top-k: must be 1 to",
        ("--seed", "-1"): "--seed: must be 0 to",
        ("--samples", "0"): "--samples: must be 1 to",
        ("--max-tokens", "0"): "--max-tokens: must be 1 to",
        ("--greedy", "--temperature", "0.5"): "--temperature and --greedy ask for different searches",
    }.items():
        assert what in refused("generate", of_bytes, "--prompt", "x", *words)[0]
    assert "did you mean '--top-k'" in quietly("generate", of_bytes, "--top-q", "3")[2]
    lines = refused("generate", trained[0], "--prompt", "x")
    assert ("a translator" in lines[0], f"kilolayer translate {trained[0]}" in lines[2]) == (True, True)
    lines = refused("translate", of_bytes)
    assert ("a language model" in lines[0], f"kilolayer generate {of_bytes}" in lines[2]) == (True, True)
    assert "not a run" in refused("generate", config.parent, "--prompt", "x")[0]


def test_a_run_that_cannot_be_read_prints_no_prompt(of_bytes: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(of_bytes, tmp_path / "broken")
    for path in broken.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    code, out, err = quietly("generate", broken, "--prompt", "Der Hund")
    assert (code, out) == (2, "")
    assert "no complete checkpoint" in err


@pytest.mark.slow
def test_text_that_cannot_be_used_is_told_in_three_lines(text: Path, tmp_path: Path) -> None:
    path, run = write_config(text, "bpe"), ["--run", tmp_path / "run"]
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n" * 500)
    for name, what in {
        "absent.txt": "does not exist",
        "empty.txt": "is empty",
        "latin.txt": "not valid UTF-8: byte 0xe9",
    }.items():
        lines = refused("train", path, *run, "--text.train", tmp_path / name)
        assert (what in lines[0], name in lines[1]) == (True, True)
    lines = refused("train", path, *run, "--text.valid", text, "--text.valid_share", "0.1")
    assert "valid and valid_share are both given" in lines[0]
    lines = refused("train", path, *run, "--data.directions", '["en-de"]')
    assert ("data.directions has no effect" in lines[0], "task" in lines[2]) == (True, True)
    (tmp_path / "short.txt").write_text("too short")
    lines = refused("train", write_config(text, "bytes"), *run, "--text.train", tmp_path / "short.txt")
    assert "a batch needs 4 windows of 32 tokens" in lines[0]
    shares = ["--text.valid_share", "0", "--text.valid", tmp_path / "latin.txt"]  # not trained on, and refused all the same
    assert "not valid UTF-8" in refused("train", path, *run, *shares)[0]
    assert quietly("train", path, *run, "--train.steps", "1")[0] == 0  # the folder is still good for a run


def test_a_plan_reads_the_windows_of_a_language_model(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = quietly("plan", write_config(text, "bytes"), "--json")
    assert code == 0, err
    document = json.loads(out)
    assert {name: document["work"][name] for name in ("batch", "length", "beam")} == {"batch": 4, "length": 32, "beam": 1}
    assert document["model"]["vocab_size"] == 260
    assert document["model"]["shape"] == "decoder"
    assert json.loads(quietly("plan", write_config(text, "bpe"), "--length", "16", "--json")[1])["work"]["batch"] == 8


@pytest.mark.slow
def test_it_all_works_in_a_shell(of_bytes: Path) -> None:
    command = [sys.executable, "-m", "kilolayer", "generate", str(of_bytes), "--max-tokens", "50", "--temperature", "9"]
    done = subprocess.run(command, input="Straße\n".encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode("utf-8").startswith("Straße")  # never half a character
