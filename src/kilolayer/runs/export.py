"""`kl.export`: export a trained run to a folder that other software can load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kilolayer.errors import InputError, file_fault, unknown
from kilolayer.files.paths import as_path, kind_of, resolve
from kilolayer.files.writing import draft_of, unwritable, write
from kilolayer.huggingface.card import card
from kilolayer.huggingface.ctranslate2 import ctranslate2_files
from kilolayer.huggingface.plain_class import huggingface_files
from kilolayer.huggingface.remote_class import architecture_of
from kilolayer.huggingface.source import Source
from kilolayer.models.fold import AnyModel
from kilolayer.runs.chosen import choose
from kilolayer.runs.run import Run
from kilolayer.tasks.results import read_scores

Target = Literal["huggingface", "ctranslate2"]


@dataclass(frozen=True)
class Export:
    """The result of an export.

    folder: what was written.
    architecture: the class, or the software, that loads it.
    why: the reason for this one.
    weights: the checkpoints that the weights come from, in words.
    finished: whether the run was finished.
    """

    folder: Path
    architecture: str
    why: str
    weights: str
    finished: bool


def export(run: str | Path | Any, *, to: Target, out: str | Path) -> Export:
    """Export a run's trained model, vocabulary and search settings to a new folder.

    run: a run folder, or an object with a `folder`.
    to: "huggingface", for the Auto classes of Transformers, or "ctranslate2".
    out: a folder that does not exist yet, or is empty.

    The target class is chosen by what the model computes. A model that no class of Transformers can represent is exported with
    a module of its own, which needs only torch and Transformers; to CTranslate2 it raises an error with the reason.
    """
    if to not in get_args(Target):
        raise unknown(str(to), get_args(Target), kind="format", where="to")
    folder = check_output_folder(as_path(out, "the folder to write"))
    source = _source_of(run)
    if to == "huggingface":
        architecture, why, files = huggingface_files(source)
        ours = architecture == architecture_of(source.model.config)
        use = source.task.transformers_use(folder.name, architecture, trust=ours)
    else:
        architecture = "CTranslate2"
        why, files = ctranslate2_files(source)
        use = source.task.ctranslate2_use(folder.name)
    files["README.md"] = card(source, architecture, why, use).encode()
    _write_files(folder, files)
    return Export(folder, architecture, why, source.weights, source.finished)


def check_output_folder(folder: Path) -> Path:
    """The absolute path; raises if it is a file or a folder that is not empty."""
    folder = resolve(folder)
    try:
        if os.listdir(folder):
            raise InputError("the folder is not empty", where=str(folder), fix="choose a new or an empty one as out")
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise InputError("a part of the path is a file", where=str(folder), fix="choose another one as out") from None
    except OSError as error:
        reason, fix = file_fault(error)
        raise InputError(f"the folder cannot be used: {reason}", where=str(folder), fix=fix) from None
    return folder


def _source_of(run: str | Path | Any) -> Source:
    """What is exported of a run, given by its folder or by an object that has a `folder`."""
    folder = getattr(run, "folder", run)
    if not isinstance(folder, str | Path):
        raise InputError(
            f"an object of the class {type(run).__name__} is not a run",
            where="export",
            fix="give a run folder, or a loaded run",
        )
    opened = Run.open(Path(folder))
    chosen = choose(opened.checkpoints, opened.config)
    if opened.config.own_model is not None:
        raise InputError(
            f"{opened.registration.title} is a model of its task's own, which no other software knows",
            where=str(opened.folder),
            fix="use it from Python: kl.load(folder).model",
        )
    model = opened.load_model(torch.device("cpu"), chosen)
    assert isinstance(model, AnyModel)
    steps = ", ".join(map(str, chosen.steps))
    scores = read_scores(opened.folder) if kind_of(opened.folder / "scores.json") is not None else {}
    return Source(
        opened.folder,
        opened.config,
        opened.registration,
        model,
        weights=f"step {steps}" if len(chosen.steps) == 1 else f"the mean of steps {steps}",
        finished=bool(scores) or opened.is_trained,
        scores=scores,
        task=opened.registration.load_export()(opened.folder, opened.config),
    )


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files at once: to a temporary folder next to `folder`, which is renamed when complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(folder, folder=True) as draft:
            for name, content in files.items():
                write(draft / name, content)
            os.rename(draft, folder)
    except OSError as error:
        raise unwritable(folder, error) from None
