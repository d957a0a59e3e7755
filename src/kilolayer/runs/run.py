"""A run is a folder with its configuration, vocabulary, metrics, log and checkpoints.

runs/NAME/  config.toml  tokenizer.model  metrics.jsonl  log.txt  checkpoints/  scores.json  samples.json  report.html

Byte-level BPE has a tokenizer.json instead, two vocabularies have two files, and bytes have none. A task may add files, such as
translations.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from kilolayer import config as configuration
from kilolayer import hints
from kilolayer.errors import InputError, OptionError, file_fault
from kilolayer.files.paths import as_path, did_you_mean, kind_of, storable
from kilolayer.files.saved_tensors import SavedTensors
from kilolayer.files.writing import PART, remove, unwritable, write
from kilolayer.models.build import build_model
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.fit import expected_weights, find_misfit
from kilolayer.models.fold import AnyModel, FoldError, fold
from kilolayer.models.saved import is_saved
from kilolayer.report.metric_rows import read_rows
from kilolayer.runs import checkpoint
from kilolayer.runs.chosen import Chosen, choose, load_chosen
from kilolayer.runs.chosen_runtime import choose_runtime
from kilolayer.runs.last_saved import last_saved
from kilolayer.runs.saved_state import fitted
from kilolayer.runtime.runtime import Runtime
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.registry import Registration
from kilolayer.tasks.results import read_scores
from kilolayer.tasks.task import Task, Vocabulary, digest_of
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.terminal import say

Precision = Literal["fp32", "bf16", "int8"]
SHOWN_RUNS = 3
UNFINISHED = re.compile(rf"data|lock|tokenizer\..*|.*{re.escape(PART)}", re.DOTALL)
"""Files that a run folder may contain before it has a configuration."""


@dataclass(frozen=True)
class Run:
    """A run folder and the configuration in it. runtime: how its models are trained and used."""

    folder: Path
    config: RunConfig
    runtime: Runtime = field(default_factory=choose_runtime, compare=False, repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @classmethod
    def create(cls, folder: Path, config: RunConfig, vocabulary: Vocabulary | None, note: str = "") -> Run:
        """Write the configuration and the vocabulary into a new or empty folder; "auto" values are resolved for this device.

        note: a remark on the configuration, for its file.
        """
        check_new(folder)
        config = resolved(config)
        if vocabulary is not None:
            vocabulary.save(folder)
        # Written last, because a folder with this file is a run.
        write(folder / "config.toml", f"# {note}\n" * bool(note) + configuration.dump(config.table()))
        return cls(folder, config)

    @classmethod
    def open(cls, folder: str | PathLike[str], tasks: Collection[str] = ()) -> Run:
        """Open an existing run; tasks: if given, refuse runs of other tasks."""
        folder = as_path(folder, "the run's folder")
        path = folder / "config.toml"
        if kind_of(path) != "file":
            raise not_a_run(folder)
        if is_saved(folder):
            raise InputError(
                "this is a model without a run",
                where=str(folder),
                fix="load it with kl.load_model, or start a run from its weights: train.start_from",
            )
        try:
            run = cls(folder, configuration.build(RunConfig, configuration.load(path)))
        except OptionError as error:
            raise error.at(f"in {path}") from None
        if tasks and run.registration.name not in tasks:
            fix = f"use it like this: kilolayer {run.config.usage.format(folder)}"
            raise InputError(f"this run is {run.registration.title}", where=str(folder), fix=fix)
        return run

    @property
    def has_begun(self) -> bool:
        """Whether the run holds more than its configuration: a checkpoint, or a row of metrics after step 0."""
        steps = (row["step"] for row in read_rows(self.folder / "metrics.jsonl").rows)
        return os.path.lexists(self.checkpoints) or any(step > 0 for step in steps)

    def undo_creation(self) -> None:
        """Undo the creation of a run that has not begun."""
        for name in ("config.toml", "log.txt", "metrics.jsonl"):
            remove(self.folder / name)

    @property
    def registration(self) -> Registration:
        """The registration of the run's task."""
        return registry.get(self.config.task)

    def task(self, cache: Path) -> Task:
        """The run's data, prepared with the run's own vocabulary."""
        return prepare(self.config, cache, self.vocabulary())

    def vocabulary(self) -> Vocabulary | None:
        """The vocabulary stored in the run folder; None if its task has none."""
        return self.registration.load().load_vocabulary(self.config, self.folder)

    def load_model(self, device: torch.device, chosen: Chosen | None = None) -> Any:
        """Load the trained model."""
        weights = self.weights(self.vocabulary(), chosen)
        model = build_model(self.config.model, device="cpu", seed=0)
        model.load_state_dict(weights)
        return self.runtime.bind(model.to(device).eval())

    def load_reader(self, device: torch.device, precision: Precision = "fp32", chosen: Chosen | None = None) -> Any:
        """Load the trained model for inference: in plain form if the recipe has one, with matrix products in `precision`."""
        if precision == "int8" and device.type != "cpu":
            cpu = hints.argument("device", "cpu")
            raise OptionError("int8 runs only on the CPU", where=hints.argument("precision"), fix=f"use bf16, or add {cpu}")
        model = self.load_model(device, chosen)
        if not isinstance(model, AnyModel):  # a task's own
            return model
        with suppress(FoldError):
            model = fold(model)
        if precision == "bf16":
            model.cast_weights(torch.bfloat16)
        model = self.runtime.bind(model)  # folded, it may be another
        if precision == "int8":
            assert isinstance(model, EncoderDecoder | Decoder)
            return self.runtime.decoding_form(model, int8=True)
        return model

    def weights(self, vocabulary: Vocabulary | None, chosen: Chosen | None = None) -> dict[str, torch.Tensor]:
        """The trained weights: the mean of the last checkpoints if the run averages, else the best ones.

        vocabulary: the one that the model is used with; another one than the run's is refused.
        """
        chosen = chosen or choose(self.checkpoints, self.config)
        self._check_vocabulary(chosen, vocabulary)
        return load_chosen(self.checkpoints, chosen, expected_weights(self.config.model), self.check_fit)

    def saved_weights(self, vocabulary: Vocabulary | None) -> SavedTensors | None:
        """`weights`, each read when it is asked for; None if they are a mean of several checkpoints."""
        chosen = choose(self.checkpoints, self.config)
        if len(chosen.steps) > 1:
            return None
        self._check_vocabulary(chosen, vocabulary)
        path = checkpoint.path_of(self.checkpoints, chosen.steps[0])
        return checkpoint.open_tensors(path, checkpoint.MODEL, expected_weights(self.config.model), self.check_fit)

    def _check_vocabulary(self, chosen: Chosen, vocabulary: Vocabulary | None) -> None:
        path = checkpoint.path_of(self.checkpoints, chosen.steps[-1])
        state = fitted(checkpoint.load_state(path), {"vocabulary": str}, path / "state.json")
        check_vocabulary(state["vocabulary"], vocabulary, self.folder)

    def check_fit(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Raise if weights, of which only the shapes are needed, belong to another model."""
        check_fit(build_model(self.config.model, device="meta", seed=0).state_dict(), weights, self.folder)

    @property
    def is_trained(self) -> bool:
        """Whether training has ended as configured: all steps are taken, or patience has run out."""
        train, (step, state) = self.config.train, checkpoint.newest_state(self.checkpoints)
        taken = max(step, last_saved(self.checkpoints) or 0)
        return taken >= train.steps or validations_since_best(state) >= train.patience > 0

    def score(self, task: Task, device: torch.device, folder: Path | None = None) -> None:
        """Write the scores of the test set into a folder, by default the run's, along with the checkpoints that were scored."""
        chosen = choose(self.checkpoints, self.config)
        task.score(self.load_reader(device, chosen=chosen), folder or self.folder, chosen.table())

    @contextmanager
    def scored(self, device: str | torch.device, task: Task | None = None) -> Iterator[Path]:
        """The folder that holds the scores of the test set, which is scored now if it has not been yet.

        It is a temporary one before training has ended, because a run with scores counts as finished.
        """
        if kind_of(self.folder / "scores.json") is not None:
            yield self.folder
            return
        task = task or self.task(cache_folder())
        device = choose_device(device, "device") if isinstance(device, str) else device
        if self.is_trained:
            self.score(task, device)
            yield self.folder
            return
        say(f"{self.folder} is not finished: these scores are of the weights so far, and are not kept")
        with tempfile.TemporaryDirectory() as folder:
            self.score(task, device, Path(folder))
            yield Path(folder)

    def scores(self, device: str | torch.device) -> dict[str, Any]:
        """The contents of scores.json; the test set is scored now if it has not been yet."""
        with self.scored(device) as folder:
            return read_scores(folder)


def validations_since_best(state: Mapping[str, Any]) -> int:
    """The number of validations since the best one, from the state of a checkpoint."""
    best = state.get("best")
    waited = best.get("waited") if isinstance(best, dict) else None
    return waited if isinstance(waited, int) else 0


def not_a_run(folder: Path) -> InputError:
    """The error for a folder without a run's config.toml; for a comparison it names the runs in it."""
    if kind_of(folder / "comparison.toml") == "file":
        runs = sorted(path.parent for path in (folder / "runs").glob("*/config.toml"))
        named = ", ".join(map(str, runs[:SHOWN_RUNS])) + (", ..." if len(runs) > SHOWN_RUNS else "")
        fix = f"name one of its runs: {named}" if runs else f"none of its runs has begun: go on with {hints.verb('compare')}"
        return InputError("this is a comparison of runs, not a run", where=str(folder), fix=fix)
    absent = f": the folder does not exist{did_you_mean(folder)}" if kind_of(folder) is None else ""
    return InputError(
        f"this is not a run{absent}",
        where=str(folder),
        fix=f"name a folder that `{hints.verb('train')}` created: it contains config.toml",
    )


def prepare(config: RunConfig, cache: Path, vocabulary: Vocabulary | None = None) -> Task:
    """Prepare the data of a configuration; a task with a vocabulary trains one if none is given or configured."""
    task = registry.get(config.task).load()
    return task.prepare(config, cache) if vocabulary is None else task.prepare(config, cache, vocabulary)


def in_steps(config: RunConfig, task: Task, processes: int = 1) -> RunConfig:
    """The configuration with epochs converted to steps, each of which is taken by all `processes` together."""
    if config.train.epochs is None:
        return config
    batches = len(task.training_batches(config.train.seed))
    return replace(config, train=config.train.in_steps(batches / (config.train.accumulate * processes)))


def resolved(config: RunConfig) -> RunConfig:
    """The configuration with every "auto" and every fraction resolved; its epochs have already been converted to steps."""
    train = config.train
    assert train.epochs is None, "in_steps converts epochs to steps"
    train = train.in_steps(0)
    return replace(config, train=replace(train, precision=choose_precision(train), layers_every=train.layers_distance))


def check_fit(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], where: Path) -> None:
    """Raise if the weights belong to another model than the one with the tensors `own`."""
    if misfit := find_misfit(own, weights):
        raise InputError(
            f"the checkpoint does not fit the configuration: {misfit}",
            where=str(where),
            fix="use the config.toml and the vocabulary that the checkpoint was trained with; to start from it, leave the "
            "options of the model, and the channels of its images, as they were",
        )


def check_vocabulary(digest: str, vocabulary: Vocabulary | None, where: Path) -> None:
    """Raise if the vocabulary is not the checkpoint's: the same ids would stand for other tokens."""
    if digest_of(vocabulary) != digest:
        raise InputError(
            "the vocabulary is not the one that the checkpoint was trained with",
            where=str(where),
            fix="restore the run's own tokenizer files",
        )


def check_new(folder: Path, *, overwrite: bool = False) -> None:
    """Raise, before any work is done, if the folder is not empty, is a file, or cannot be written.

    overwrite: the folder may hold a run, which `delete_run` deletes later, but nothing else.
    """
    storable(folder)
    another = f"choose another: {hints.argument('run', 'runs/NAME')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        names = os.listdir(folder)
    except (FileExistsError, NotADirectoryError):
        raise InputError("the run folder is a file", where=str(folder), fix=another) from None
    except (OSError, ValueError) as error:
        reason, _ = file_fault(error)
        raise InputError(f"the run folder cannot be written: {reason}", where=str(folder), fix=another) from None
    # What a killed start left behind is allowed.
    if any(not UNFINISHED.fullmatch(name) for name in names) and not overwrite:
        ways = hints.argument("run"), hints.flag("resume"), hints.flag("overwrite")
        fix = "choose another with {}, resume it with {}, or replace it with {}".format(*ways)
        raise InputError("the run folder is not empty", where=str(folder), fix=fix)
    if overwrite and names and not is_run(folder) and not all(map(UNFINISHED.fullmatch, names)):
        what = "the folder holds something other than a run, which is not overwritten"
        raise InputError(what, where=str(folder), fix=another)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return kind_of(folder / "config.toml") == "file" and not is_saved(folder)


def delete_run(folder: Path) -> None:
    """Delete everything in the folder of a run except its data and its lock, which this process holds."""
    try:
        # config.toml last: while it is there, the folder is a run and can be overwritten after a crash.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "config.toml"):
            if path.name in ("data", "lock"):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise unwritable(folder, error) from None


def cache_folder() -> Path:
    """The folder for cached vocabularies and token files: KILOLAYER_CACHE, or ~/.cache/kilolayer."""
    try:
        return Path(os.environ.get("KILOLAYER_CACHE") or Path.home() / ".cache" / "kilolayer")
    except RuntimeError:
        raise InputError(
            "this user has no home folder to keep vocabularies and token files in", fix="set KILOLAYER_CACHE to a folder"
        ) from None


def choose_precision(config: TrainConfig) -> Literal["fp32", "bf16", "fp16"]:
    """The precision that a configuration names; for "auto", the one that suits the device."""
    if config.precision != "auto":
        return config.precision
    device = choose_device(config.device)
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"


def choose_device(name: str, option: Literal["train.device", "device"] = "train.device") -> torch.device:
    """The device with this name; for "auto", the GPU if there is one. option: where it was set, for the error."""
    if name == "cuda" and not torch.cuda.is_available():
        fix = hints.option(option, "cpu") if option == "train.device" else hints.argument(option, "cpu")
        raise OptionError("there is no CUDA device", where=option, fix=f"give {fix}, or leave the option out")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")
