"""Every form of a run, killed or stopped at moments spread over its whole life: it ends as if it had never been disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kilolayer.runs import checkpoint
from kilolayer.runs.run import Run
from tests.faults.children import ended, start
from tests.faults.run_forms import FORMS, QUICK
from tests.fixtures.small_runs import record

LIFE = {"steps": 30, "save_every": 4, "valid_every": 9, "log_every": 4, "layers_every": 3, "accumulate": 2, "keep": 2}
SLOW = [pytest.param(form, seed, marks=pytest.mark.slow) for form in FORMS for seed in range(10, 14)]
KILLED, STOPPED = [(QUICK[0], 1), *SLOW], [pytest.param(QUICK[1], 1, marks=pytest.mark.slow), *SLOW]


def options_of(form: str) -> dict[str, Any]:
    return {"train": {**LIFE, **FORMS[form].options.get("train", {})}}


def train_or_resume(config: Path, folder: Path, err: Path) -> Any:
    """Begin the run where there is none yet, else resume it."""
    words = ["--resume", folder] if (folder / "config.toml").exists() else [config, "--run", folder]
    return start(["train", *words], err=err)


def life_of(config: Path, folder: Path, err: Path) -> float:
    """Seconds that a whole run takes here and now."""
    before = time.monotonic()
    assert ended(train_or_resume(config, folder, err)) == 0, err.read_text()
    return time.monotonic() - before


def assert_undisturbed(folder: Path, other: Path, form: str) -> None:
    assert record(Run.open(folder)) == record(Run.open(other))
    names = [path.name for path in checkpoint.steps(folder / "checkpoints")]
    assert names == [path.name for path in checkpoint.steps(other / "checkpoints")]
    for name in FORMS[form].results:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    assert not list(folder.rglob("*.part"))


def launched(attempt: int, launch: str = "one") -> dict[str, str]:
    """What torchrun tells a process that it starts; their parent, which is the torchrun, is one process for all of them."""
    number = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_RUN_ID": launch}
    return {**number, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_MAX_RESTARTS": "3"}


@pytest.mark.slow
def test_a_new_run_that_torchrun_restarts_goes_on_and_nobody_elses_does(
    tmp_path: Path, configured: Callable[..., Path]
) -> None:
    form = QUICK[1]
    config, folder, err = configured(form, train={"steps": 4000, "save_every": 2}), tmp_path / "run", tmp_path / "err"
    words = ["train", config, "--run", folder]
    process = start(words, err=err, **launched(0))
    while not (folder / "checkpoints/step-00000002/manifest.json").exists():
        assert process.is_alive(), err.read_text()
        time.sleep(0.05)
    (folder / ".scores.json.00000000.part").touch()  # what it leaves if it is killed at another moment
    process.kill()
    assert ended(process) == -signal.SIGKILL
    assert ended(start(words, err=err, **launched(1, "another"))) == 2
    assert "the run folder is not empty" in err.read_text()
    step, text = checkpoint.step_of(checkpoint.steps(folder / "checkpoints")[-1]), (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("steps = 4000", f"steps = {step + 6}"))
    assert ended(start(words, err=err, **launched(1))) == 0, err.read_text()
    assert f"resumed at step {step}" in err.read_text().replace(",", "")
    assert not list(folder.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "seed"), KILLED)
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    tmp_path: Path, configured: Callable[..., Path], form: str, seed: int
) -> None:
    config, folder, other, err = configured(form, **options_of(form)), tmp_path / "run", tmp_path / "other", tmp_path / "err"
    seconds, dice = life_of(config, other, err), random.Random(seed)
    for _ in range(3):
        process = train_or_resume(config, folder, err)
        process.join(dice.uniform(0.05, 0.8) * seconds)
        process.kill()
        assert ended(process) in (-signal.SIGKILL, 0), err.read_text()
        assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder / "checkpoints"))
    assert ended(train_or_resume(config, folder, err)) == 0, err.read_text()
    assert_undisturbed(folder, other, form)


@pytest.mark.parametrize(("form", "seed"), STOPPED)
def test_stopped_at_random_moments_it_ends_soon_and_goes_on_with_the_same_bits(
    tmp_path: Path, configured: Callable[..., Path], form: str, seed: int
) -> None:
    config, folder, other, err = configured(form, **options_of(form)), tmp_path / "run", tmp_path / "other", tmp_path / "err"
    seconds, dice = life_of(config, other, err), random.Random(seed)
    for number in dice.sample([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 3):
        process = train_or_resume(config, folder, err)
        process.join(dice.uniform(0.05, 0.8) * seconds)
        before = time.monotonic()
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, number)
        code = ended(process)
        assert time.monotonic() - before < 30
        # Before the command has begun to run, the signal ends it as any process; a shell calls both the same.
        assert code in (0, 128 + number, -number), err.read_text()
        assert "Traceback" not in err.read_text()
        if (folder / "config.toml").exists() and code == 128 + number and "resume" in err.read_text():
            assert all(checkpoint.find_fault(path) is None for path in checkpoint.steps(folder / "checkpoints"))
    assert ended(train_or_resume(config, folder, err)) == 0, err.read_text()
    assert_undisturbed(folder, other, form)
