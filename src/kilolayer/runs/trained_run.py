"""A trained run as a Python object: configuration, model, tokenizer and scores. Subclasses add the methods of their task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from kilolayer.display import Displayed
from kilolayer.errors import InputError, KilolayerError, OptionError, shown, unknown
from kilolayer.models.device import check_device
from kilolayer.models.model import Model
from kilolayer.report.page import write_report
from kilolayer.runs.chosen import Chosen, choose
from kilolayer.runs.metrics import KINDS, read_metrics
from kilolayer.runs.run import Precision, Run, choose_device
from kilolayer.runs.scoring import score_text
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.other_text import OtherText
from kilolayer.tasks.registry import Registration
from kilolayer.tasks.task import Vocabulary

Item = TypeVar("Item")


class MissingMethodError(KilolayerError, AttributeError):
    """A method was called that runs of this task do not have."""


class TrainedRun(Displayed):
    """A trained run, as `kl.load` and `kl.train` return it. The model is loaded when it is first needed.

    Its weights are those that the command line uses: the average of the last checkpoints if the run averages, else the best.
    `print(run)` prints what `kilolayer train` prints at its end; a notebook also shows its curves.
    """

    _laid_out_by = "kilolayer.report.run_parts"

    def __init__(self, run: Run, *, device: str | torch.device = "auto", precision: Precision = "fp32") -> None:
        allowed = ["fp32"]
        if run.config.own_model is None:
            allowed = [name for name in get_args(Precision) if name != "int8" or run.config.model.shape != "encoder"]
        if precision not in allowed:
            raise unknown(str(precision), allowed, kind="precision")
        self._run, self.device = run, _device_of(device)
        self.precision: Precision = precision

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.folder

    @property
    def config(self) -> RunConfig:
        """The run's complete configuration, with every default filled in."""
        return self._run.config

    @property
    def registration(self) -> Registration:
        """The registration of the run's task."""
        return self._run.registration

    @cached_property
    def model(self) -> Model:
        """The trained model in evaluation mode, with its own recipe. Changing it does not affect the run's methods."""
        return self._run.load_model(self.device, self._chosen)

    @cached_property
    def tokenizer(self) -> Vocabulary | None:
        """The run's vocabulary; None if its task has none."""
        return self._run.vocabulary()

    def scores(
        self,
        test: Path | str | Sequence[Path | str] = (),
        *,
        source: Path | str | None = None,
        reference: Path | str | None = None,
        direction: str | None = None,
    ) -> dict[str, Any]:
        """What `kilolayer evaluate` prints: the scores of each test set by its name, and how they were computed.

        `scores()["test"]["bleu"]["value"]`, `["signature"]`. The test set is scored now if it has not been yet.
        test: another text to score instead, in the form of the run's option `test`: a set, files or folders.
        source, reference: two aligned files, for a translator.
        direction: that of the text, for a translator with several. The scores of another text are not saved.

        All scores are those of the model in fp32, as on the command line, even if the run was loaded with another `precision`.
        """
        named = (test,) if isinstance(test, Path | str) else test
        if not named and source is None and reference is None and direction is None:
            return self._run.scores(self.device)
        first, second = (None if path is None else str(path) for path in (source, reference))
        text = OtherText(tuple(map(str, named)), first, second, direction)
        return score_text(self._run, text, loaded=(self._chosen, self._precise_reader))

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl so far; kind: only those of this kind, "train", "valid", "layers", "event", ..."""
        if kind is not None and kind not in KINDS:
            raise unknown(str(kind), KINDS, kind="kind of metrics", where=str(self.folder / "metrics.jsonl"))
        return [row for row in read_metrics(self.folder) if kind in (None, row["kind"])]

    def report(self) -> Path:
        """Rewrite the run's report and return its path."""
        return write_report(self.folder).path

    @cached_property
    def reader(self) -> Model:
        """The model that methods use: in plain Post-LN form if the recipe has one, with matrix products in `precision`."""
        return self._run.load_reader(self.device, self.precision, self._chosen)

    def _precise_reader(self) -> Model:
        return self.reader if self.precision == "fp32" else self._run.load_reader(self.device, chosen=self._chosen)

    @cached_property
    def _chosen(self) -> Chosen:
        return choose(self._run.checkpoints, self.config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up on every object by copying, pickling and notebooks
            raise AttributeError(name)
        methods = [each for each in dir(type(self)) if not each.startswith("_")]
        raise MissingMethodError(
            f"this run is {self.registration.title} and has no {name!r}",
            where=str(self.folder),
            fix=f"it has: {', '.join(methods)}",
        )


def as_texts(given: str | Iterable[str], kind: str) -> list[str]:
    """One text or several, as a list; raises if one is not a text. kind: what a text is called in errors."""
    texts = as_list(given, kind)
    for number, text in enumerate(texts, 1):
        checked_text(text, f"{kind} {number}")
    return texts


def checked_text(text: Any, where: str) -> str:
    """The text; raises unless it is one that can be encoded as UTF-8."""
    if not isinstance(text, str):
        raise InputError(f"this is {shown(text)}, not a text", where=where, fix="give str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"this text is not valid Unicode: {shown(text)}", where=where, fix="decode bytes as UTF-8") from None
    return text


def as_list(given: Any, kind: str) -> list[Any]:
    """One text as a list of one, or the items as a list; a single value that is neither is refused."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InputError(f"{kind}s are given as {shown(given)}", fix="give one text, or a list of texts")
    return list(given)


def batched(given: Iterable[Item], at_once: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `at_once`, the last of which may be shorter; each list is read only when it is needed."""
    if not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"at_once is {shown(at_once)}", fix="at_once must be a whole number, at least 1")
    rest = iter(given)
    return iter(lambda: list(islice(rest, at_once)), [])


def _device_of(device: str | torch.device) -> torch.device:
    return choose_device("auto") if device == "auto" else check_device(device)
