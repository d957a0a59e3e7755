"""Small runs for the tests of training: two layers per side, two hundred pairs or as many lines, a step in milliseconds."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_classifiers import classify_table, write_examples
from undrawn_charts import undrawn_charts

from kilolayer.config import build, merge
from kilolayer.data.drawn_images import drawn_images
from kilolayer.data.grammar import pairs
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.runs.run import Run, cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.stop import Stop

TIMES = {"seconds", "tokens_per_second"}


def write_corpus(folder: Path) -> Path:
    """train, valid and test of English and German, of documents, and of labelled sentences; the test part is small."""
    sentences = list(pairs(240, seed=1, unseen=False))
    for part, chosen in {"train": sentences[:200], "valid": sentences[200:220], "test": sentences[220:228]}.items():
        for side, language in enumerate(("en", "de")):
            text = "".join(f"{pair[side]}\n" for pair in chosen)
            (folder / f"{part}.{language}").write_text(text, encoding="utf-8")
        # Documents of one word, of one sentence, of two.
        documents = [text for english, _ in chosen for text in (english.split()[-1], english, f"{english} {english}")]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    drawn_images(folder / "images", 16, {"train": 30, "valid": 12, "test": 12})
    return write_examples(folder)


def table(corpus: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small run, with `sections` laid over it."""
    small = {
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "dropout": 0.1},
        "data": {"folder": str(corpus), "directions": ["en-de"], "valid": "valid", "test": "test"},
        "tokenizer": {"vocab_size": 90, "byte_fallback": False, "character_coverage": 1.0},
        "batches": {"tokens": 400, "shapes": 3},
        "train": {
            "steps": 6,
            "lr": 1e-2,
            "warmup_steps": 3,
            "log_every": 1,
            "layers_every": 0,
            "valid_every": 100,
            "save_every": 100,
            "device": "cpu",
        },
        "search": {"method": "greedy", "max_length_factor": 1.0, "max_length_extra": 4},
    }
    return merge(small, sections)


def text_table(corpus: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small language model of the corpus's English, with `sections` laid over it."""
    small = {
        "task": "causal_lm",
        "text": {
            "train": str(corpus / "train.en"),
            "valid": str(corpus / "valid.en"),
            "test": str(corpus / "test.en"),
            "length": 16,
        },
        "tokenizer": {"kind": "bytes"},
        "batches": {"tokens": 128},
    }
    shared = {name: table(corpus)[name] for name in ("model", "train")}
    return merge({**shared, **small}, sections)


def masked_table(corpus: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small masked language model of the corpus's documents, with `sections` laid over it."""
    text = {part: str(corpus / f"{part}.jsonl") for part in ("train", "valid", "test")}
    small = {
        "task": "masked_lm",
        "text": {**text, "length": 48},
        "tokenizer": {"kind": "bytes"},
        "batches": {"tokens": 8 * 48},
    }
    shared = {name: table(corpus)[name] for name in ("model", "train")}
    return merge({**shared, **small}, sections)


def image_table(corpus: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small classifier of the corpus's images, with `sections` laid over it."""
    images = {part: str(corpus / "images" / part) for part in ("train", "valid", "test")}
    small = {
        "task": "classify_image",
        "model": {"image": {"patch": 8}},
        "images": {**images, "size": 16, "rows": 8},
        "augment": {"cutmix": 1.0, "mixed": 0.5},
    }
    shared = {name: table(corpus)[name] for name in ("model", "train")}
    return merge(merge(shared, small), sections)


SMALL: dict[str, Callable[..., dict[str, Any]]] = {
    "translation": table,
    "causal_lm": text_table,
    "masked_lm": masked_table,
    "classify": classify_table,
    "classify_image": image_table,
}
"""The configuration of a small run of each task on the corpus, with tables laid over it. Every registered task has one."""


def new_run_of(task: str, folder: Path, corpus: Path, **sections: dict[str, Any]) -> Run:
    """A run of any task that was created and has not begun."""
    return _created(folder, SMALL[task](corpus, **sections))


def new_run(folder: Path, corpus: Path, **sections: dict[str, Any]) -> Run:
    """A run that was created and has not begun."""
    return _created(folder, table(corpus, **sections))


def new_text_run(folder: Path, corpus: Path, **sections: dict[str, Any]) -> Run:
    """A run of a language model that was created and has not begun."""
    return _created(folder, text_table(corpus, **sections))


def _created(folder: Path, whole: dict[str, Any]) -> Run:
    config = build(RunConfig, whole)
    task = prepare(config, cache_folder())
    return Run.create(folder, task.resolve(config), task.vocabulary)


def task_of(run: Run) -> Any:
    return run.task(cache_folder())


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def last_checkpoint(run: Run) -> checkpoint.Checkpoint:
    return checkpoint.load(checkpoint.steps(run.checkpoints)[-1])


def record(run: Run) -> dict[str, Any]:
    """All that a run leaves, times apart, in a form whose equality is equality of bits."""
    last = last_checkpoint(run)
    state = {name: value for name, value in last.state.items() if name != "seconds"}
    state["window"] = {name: value for name, value in state["window"].items() if name != "seconds"}
    return {
        "step": last.step,
        "model": {name: bytes_of(tensor) for name, tensor in last.model.items()},
        "optimizer": {name: bytes_of(tensor) for name, tensor in last.optimizer.items()},
        "state": json.dumps(state, sort_keys=True),
        "metrics": [{name: value for name, value in row.items() if name not in TIMES} for row in read_metrics(run.folder)],
    }


def train_in_child(folder: str, point: str | None = None) -> None:
    """What a child process does: `kilolayer train --resume FOLDER`; with `point`, it kills itself there."""
    from kilolayer.cli.main import main

    torch.set_num_threads(1)
    file = os.open(f"{folder}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if point is not None:
        _die_at(point)
    with undrawn_charts():
        sys.exit(main(["train", "--resume", folder]))


def _die_at(point: str) -> None:
    """Kill this process, without a chance to clean up, at a named point of the save of step 4 or of the delete after it."""
    write, sync, rename = checkpoint._write, checkpoint.sync, Path.rename

    def reached(here: str) -> bool:
        if here == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def dying_write(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
        data = b"".join(parts)
        at_step_4 = "step-00000004" in str(path)
        if at_step_4 and point == f"half of {path.name}":
            path.write_bytes(data[: len(data) // 2])
            reached(point)
        written = write(path, [data])
        assert not at_step_4 or not reached(f"after {path.name}")
        return written

    def dying_rename(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        assert target.name != "step-00000004" or not reached("after the rename")
        if target.name == ".step-00000002.deleted":
            (target / "manifest.json").unlink()
            reached("in the delete")
        return moved

    def dying_sync(folder: Path) -> None:
        sync(folder)
        assert folder.name != ".step-00000004.partial" or not reached("before the rename")

    checkpoint._write, checkpoint.sync, Path.rename = dying_write, dying_sync, dying_rename  # type: ignore[method-assign]


def stopped_and_resumed(whole: Run, broken: Run, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train one run of six steps, and one that is stopped after three and resumed; the record that both leave, to the bit."""
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(broken, task_of(broken)) == 143
    assert checkpoint.step_of(checkpoint.steps(broken.checkpoints)[-1]) == 3
    torch.manual_seed(12345)  # nothing may come from the process that goes on
    assert train(broken, task_of(broken), resume=True) == 0
    expected, found = record(whole), record(broken)
    assert found["step"] == 6
    for part in expected:
        assert found[part] == expected[part], part
    return found


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A signal that comes in this step."""
    stops: list[Stop] = []
    make, take = Stop.__init__, Stepper.step
    taken = 0

    def remember(stop: Stop, *arguments: Any) -> None:
        make(stop, *arguments)
        stops.append(stop)

    def count(*arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == step:
            stops[-1].signal = 15
        return take(*arguments)

    monkeypatch.setattr(Stop, "__init__", remember)
    monkeypatch.setattr(Stepper, "step", count)
