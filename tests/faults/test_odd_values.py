"""Whatever values and names a configuration, a flag or a run folder holds: an answer or an error, soon, and no traceback."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.cli.output import show_parts, show_scores
from kilolayer.config import build, check_depth, dump, load, merge, overrides, parse_toml
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.report.run_parts import sample_parts
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.results import read_samples, read_scores
from kilolayer.tasks.translation.evaluate import show_errors
from tests.faults.odd_values import trials, write_odd_run

SECONDS = 60.0  # on a machine that does other things too
HUGE = "9" * 400
GIANT = "9" * 5000


def plan_odd_configurations(count: int, seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for trial in trials(count, seed):
        start = time.monotonic()
        code = main(["plan", *trial.words(folder)])
        told = capsys.readouterr().err
        assert time.monotonic() - start < SECONDS, trial
        assert code == 0 or (code == 2 and told.startswith("kilolayer: ")), trial
        assert max(map(len, told.split("\n"))) < 2000, trial


def test_20_mutations_of_a_configuration_are_planned_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_odd_configurations(20, 11, tmp_path, capsys)


@pytest.mark.slow
def test_1000_mutations_of_a_configuration_are_planned_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_odd_configurations(1000, 12, tmp_path, capsys)


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_what_is_accepted_is_kept_as_it_is(tmp_path: Path, count: int) -> None:
    accepted = 0
    for trial in trials(count, 13):
        path, *typed = trial.words(tmp_path)
        try:
            config = build(RunConfig, merge(load(Path(path)), overrides(typed)))
        except KilolayerError:
            continue
        accepted += 1
        assert build(RunConfig, parse_toml(dump(config.table()))) == config, trial
    assert accepted >= count // 25


REFUSED = {
    "train.seed": [str(2**63), str(2**70), "-1", HUGE, GIANT],
    "train.threads": ["1000000000000", "-1"],
    "train.lr": ["1e38", "nan", "inf", "0", HUGE],
    "model.dim": [str(2**40), "0", "[" * 2000 + "]" * 2000],
    "model.layers": [str(10**9), "10001"],
    "data.upsample": ["1e18", "0"],
    "search.beam": [HUGE, "0"],
    "batches.tokens": [str(10**30), "1"],
    "data.languages": ["[[1]]", '["en", 1]'],
    "train.start_from": ['"a\\u0000b"', "a\udcffb"],
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REFUSED.items() for value in values])
def test_numbers_and_names_out_of_bounds_are_refused(
    path: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--run", str(tmp_path / "run"), f"--{path}={value}"]) == 2
    told = capsys.readouterr().err
    assert len(told) < 1000
    assert path.rpartition(".")[2] in told or "cannot be read" in told
    assert not (tmp_path / "run").exists()


FLAGS = {
    "plan": ["--batch", "--length", "--beam"],
    "evaluate run": ["--samples", "--stride"],
    "generate run": ["--samples", "--max-tokens", "--top-k", "--seed"],
    "recipes admin": ["--encoder-layers", "--decoder-layers"],
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("verb", "flag"), [(verb, flag) for verb, flags in FLAGS.items() for flag in flags])
@pytest.mark.parametrize("value", ["-1", "1000000000000000000000000000000", HUGE, GIANT, "1.5", "", "\udcff", "x" * 10_000])
def test_flags_have_bounds(verb: str, flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), f"{flag}={value}"]) == 2
    told = capsys.readouterr().err
    assert flag in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (["--model.dim=1048576", "--model.ffn_dim=16777216", "--model.layers=500"], "parameters"),
        (["--model.moe.experts=65536", "--model.dim=65536", "--model.layers=500"], "parameters"),
        (["--batch=1000000", "--length=1000000"], "too large to compute"),
    ],
)
def test_what_cannot_be_addressed_is_refused(model: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *model]) == 2
    assert what in capsys.readouterr().err


def link_circle(path: Path) -> None:
    path.symlink_to(path)


ODD_FILES = {
    "a circle of links": link_circle,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a large file": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "no text": lambda path: path.write_bytes(b"[model]\n\xff"),
    "long names": lambda path: path.write_text("a" + ".a" * 20_000 + " = 1"),
    "a long link": lambda path: path.write_text(f'extends = "{"x" * 300}.toml"'),
    "a name with NUL": lambda path: path.write_text('extends = "a\\u0000"'),
    "itself": lambda path: path.write_text(f'extends = "{path.name}"'),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("odd", ODD_FILES)
def test_odd_files_in_the_place_of_a_configuration_are_refused(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ODD_FILES[odd](tmp_path / "odd.toml")
    start = time.monotonic()
    assert main(["plan", str(tmp_path / "odd.toml")]) == 2
    assert time.monotonic() - start < 5
    assert capsys.readouterr().err.startswith("kilolayer: ")


def test_a_chain_of_files_has_an_end(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"\n[model]\nlayers = {number + 1}')
    (tmp_path / "200.toml").write_text("[model]\ndim = 64")
    assert load(tmp_path / "150.toml") == {"model": {"dim": 64, "layers": 151}}
    with pytest.raises(OptionError, match="100 files"):
        load(tmp_path / "0.toml")


def test_depth_is_counted() -> None:
    check_depth([[1]], 2)
    with pytest.raises(ValueError, match="more than 2"):
        check_depth({"a": [{}]}, 2)


def report_odd_runs(seeds: range, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in seeds:
        write_odd_run(folder, seed)
        start = time.monotonic()
        assert main(["report", str(folder)]) == 0, seed
        assert time.monotonic() - start < SECONDS, seed
        assert "\x1b" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_is_made_of_any_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_odd_runs(range(2), tmp_path, capsys)


@pytest.mark.slow
def test_200_odd_runs_have_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_odd_runs(range(100, 300), tmp_path, capsys)


@pytest.mark.parametrize("count", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_scores_of_any_form_are_shown_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    refused = 0
    for seed in range(count):
        write_odd_run(tmp_path, seed)
        try:
            scores = read_scores(tmp_path)
        except InputError:
            refused += 1
            continue
        show_scores(scores)
        show_errors(scores)
    assert 0.05 < refused / count < 0.95
    capsys.readouterr()


@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_samples_of_any_form_are_shown_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    refused = 0
    for seed in range(count):
        write_odd_run(tmp_path, seed)
        try:
            show_parts(sample_parts(read_samples(tmp_path), registry.get("translation")))
        except InputError:
            refused += 1
    assert 0.03 < refused / count < 0.97
    capsys.readouterr()


@pytest.mark.slow
def test_a_finished_run_with_odd_results_is_refused(
    tmp_path: Path, finished: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"samples.json": '[{"source": 1}]', "scores.json": '{"test": {"bleu": 3}}'}.items():
        folder = shutil.copytree(finished("translation"), tmp_path / name)
        (folder / name).write_text(text)
        assert main(["train", "--resume", str(folder)]) == 2
        assert str(folder / name) in capsys.readouterr().err


@pytest.mark.parametrize(
    "give",
    [
        lambda folder: kl.train({1: 2}, run=folder),
        lambda folder: kl.train(run=folder, model={"moe": {(1,): 2}}),
        lambda folder: kl.run_comparison(None, {1: [2]}, folder=folder),
        lambda folder: kl.run_comparison(None, {"train.seed": [1, 2]}, folder=folder, options={None: 2}),
        lambda _: kl.build_model({1: 2}),
    ],
)
def test_names_that_are_no_text_are_refused(give: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"(1|\(1,\)|None) is not (the name of an|an|the name of any) option"):
        give(tmp_path / "new")
    assert not (tmp_path / "new").exists()
