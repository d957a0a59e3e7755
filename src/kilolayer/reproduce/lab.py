"""The environment of reproductions: the folder, the text, and the small models that replace the papers' large ones."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import Axis, Setting, same, settings_of
from kilolayer.compare.measure import VALIDATION_LOSS, Measure, measures_of
from kilolayer.compare.queue import run_all
from kilolayer.compare.result import Result
from kilolayer.config import Table, dump, merge
from kilolayer.errors import InputError
from kilolayer.evaluate.source_use import SOURCE_READ, source_gain
from kilolayer.evaluate.stack_label import checks_of
from kilolayer.files.reading import read_json
from kilolayer.files.writing import make_folder, write
from kilolayer.reproduce.stored_run import Run, ended
from kilolayer.reproduce.texts import known, many_languages, running_text, sentence_pairs
from kilolayer.training.stop import Stopped

# Small enough for a dozen to train in parallel, wide enough for recipes to differ as they do in the papers.
SMALL: Table = {
    "model": {"dim": 128, "heads": 4, "ffn_dim": 512, "dropout": 0.1},
    "batches": {"tokens": 4096},
    "train": {
        "steps": 1000,
        "lr": 1e-3,
        "warmup_steps": 400,  # a tenth of the papers' 4,000 or more
        "schedule": "linear",
        "log_every": 20,
        "layers_every": 0,
        "valid_every": 100,
        "valid_sentences": 500,
        "save_every": 100_000_000,
        "save_best": False,
        "keep": 1,
    },
}
TINY: Table = {
    "model": {"dim": 16, "heads": 2, "ffn_dim": 32},
    "batches": {"tokens": 400},
    "train": {"steps": 8, "lr": 5e-3, "warmup_steps": 2, "log_every": 2, "valid_every": 4, "valid_sentences": 20},
}
# Images of 32 pixels have 64 patches, so a model sees all of them in seconds.
OF_IMAGES: Table = {
    "model": {"dim": 192, "heads": 3, "ffn_dim": 768},
    "images": {"size": 32, "valid_share": 0.1, "rows": 256},  # 5,000 images choose, to half a percent
    "train": {"log_every": 50, "layers_every": 0, "save_every": 100_000_000, "save_best": False, "keep": 1},
}
EPOCHS = {"image_tokenizer": 20, "masked_image": 50, "classify_image": 30, "segment": 60}
AUGMENT: Table = {"crop": "pad", "randaugment": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0}
TINY_IMAGES: Table = {
    "model": {"dim": 16, "heads": 2, "ffn_dim": 32},
    "images": {"rows": 8},
    "train": {"steps": 4, "lr": 5e-3, "warmup_steps": 2, "log_every": 2},
}

STREETS = {"train": "train", "valid": "val", "test": "test"}
"""The folders of CamVid; those of its label images end with annot."""
WITH_PATHS = ("data", "text", "examples", "images", "target", "train")
"""Tables in which files are named."""

GREEDY: Table = {"method": "greedy", "max_length_factor": 1.5, "max_length_extra": 10}
"""Decoding options: beam search would gain about a point of BLEU for every method and take most of the time."""
BRIEF: Table = {"method": "greedy", "max_length_factor": 0.1, "max_length_extra": 4}
"""A model trained for a few steps does not end its sentences, so the tiny form limits their length."""


@dataclass(frozen=True)
class Lab:
    """folder: for runs and results. tiny: run each reproduction in a form that takes seconds and decides nothing.

    data: the folder of the real corpora; None: the embedded corpus, for the tiny form. parallel: as for a comparison.
    deadline: the time, by `time.monotonic`, after which no run continues. earlier: runs of another session that are not
    trained again.
    """

    folder: Path
    tiny: bool = False
    data: Path | None = None
    parallel: int | None = None
    deadline: float | None = None
    earlier: tuple[Run, ...] = ()

    @property
    def gentle(self) -> Table:
        """Twice as many steps as usual here, so that the learning rate rises by half as much per step."""
        return {"steps": 2000, "lr": 1e-3, "warmup_steps": 800}

    @property
    def long(self) -> Table:
        """Four times as many steps as usual here, so that the learning rate rises by a quarter as much per step."""
        return {"steps": 4000, "lr": 1e-3, "warmup_steps": 1600, "valid_every": 200}

    def translation(self, language: str = "deu", *, into_english: bool = True, **sections: Mapping[str, Any]) -> Table:
        """The configuration of a small translation model between English and `language`, updated with `sections`."""
        text = self.folder.parent / "text" / language
        sentence_pairs(self.data, language, text)
        direction = f"{language}-eng" if into_english else f"eng-{language}"
        data = {"folder": str(text.resolve()), "directions": [direction], "valid": "valid", "test": "test"}
        return self._sized({"data": data, "tokenizer": self._pieces(8000), "search": BRIEF if self.tiny else GREEDY}, sections)

    def multilingual(self, count: int | None = None, /, **sections: Mapping[str, Any]) -> Table:
        """The configuration of a translation model for many languages to and from English.

        count: how many, those with the most text first; None: all that have at least 10,000 sentences.
        """
        text = self.folder.parent / "text" / ("languages" if count is None else f"{count}-languages")
        languages = many_languages(self.data, text, least=10_000, most=50_000, count=count)
        directions = {"directions": ["eng-*", "*-eng"], "languages": ["eng", *languages], "temperature": 5.0}
        # Few sentences are longer, and a batch of them holds a few pairs.
        filters = {"max_tokens": 64}
        data = {"folder": str(text.resolve()), "valid": "valid", "test": "test", "filters": filters, **directions}
        own = {
            "data": data,
            "tokenizer": self._pieces(16_000),
            "search": BRIEF if self.tiny else GREEDY,
        }
        return self._sized(own, sections)

    def language(self, task: str = "causal_lm", **sections: Mapping[str, Any]) -> Table:
        """The configuration of a small language model."""
        files = running_text(self.data, self.folder.parent / "text" / "running")
        text = {part: str(path.resolve()) for part, path in files.items()} | {"length": 16 if self.tiny else 256}
        model = {"positions": "rotary", "activation": "gelu"}
        tokenizer = {"kind": "bytes"} if self.tiny else self._pieces(8000)
        return self._sized({"task": task, "text": text, "tokenizer": tokenizer, "model": model}, sections)

    def images(self, task: str, **sections: Mapping[str, Any]) -> Table:
        """The configuration of a small model of CIFAR-10's images, or of drawn ones in the tiny form."""
        source = known(self.data, "cifar10/cifar10_jpeg.tar.xz")
        files = {} if source is None else {part: f"{source.resolve()}:{part}" for part in ("train", "test")}
        own: Table = {"images": files, "augment": AUGMENT if task == "classify_image" else {"crop": "resized"}}
        return self._of_images(task, own, sections)

    def street_images(self, **sections: Mapping[str, Any]) -> Table:
        """The configuration of a small segmentation of CamVid's images, or of drawn ones in the tiny form."""
        source = known(self.data, "camvid/camvid_480x360.tar.xz")
        own: Table = {}
        if source is not None:
            files = {part: f"{source.resolve()}:{folder}" for part, folder in STREETS.items()}
            labels = {f"{part}_labels": f"{source.resolve()}:{folder}annot" for part, folder in STREETS.items()}
            own = {"images": {**files, **labels, "valid_share": 0.0, "size": "144x192", "void": 11, "rows": 8}}
        return self._of_images("segment", own, sections)

    def _of_images(self, task: str, own: Table, sections: Mapping[str, Any]) -> Table:
        table = merge(merge(OF_IMAGES, {"task": task, **own}), sections)
        table = merge(table, TINY_IMAGES) if self.tiny else merge(table, {"train": {"epochs": EPOCHS[task]}})
        if self.data is None:
            table["images"] = {"rows": table["images"]["rows"]}
        if task == "image_tokenizer":
            table["model"] = {"dim": 16, "codes": 16} if self.tiny else {}
        return deepcopy(table)

    def _pieces(self, vocab_size: int) -> Table:
        if self.tiny:
            return {"vocab_size": 90, "byte_fallback": False, "character_coverage": 1.0}
        return {"kind": "bpe", "vocab_size": vocab_size}

    def _sized(self, own: Table, sections: Mapping[str, Any]) -> Table:
        table = merge(merge(SMALL, own), sections)
        # A copy, because merging shares the tables that it does not touch, and the caller may change the result.
        return deepcopy(merge(table, TINY) if self.tiny else table)

    def compare(self, name: str, config: Table, axes: Mapping[str, Sequence[Any]]) -> list[Run]:
        """Train every combination of the values of `axes`; return the result of each run.

        name: the folder of the comparison; reproductions that use the same runs share it.
        """
        return self.compare_settings(name, config, combinations(axes))

    def compare_settings(self, name: str, config: Table, settings: Sequence[Mapping[str, Any]]) -> list[Run]:
        """As `compare`, for a list of settings instead of a grid."""
        digest = digest_of(config)
        known = [run for run in self.earlier if run.get("config") == digest]
        taken = [next((run for run in known if same(run["options"], each)), None) for each in settings]
        missing = [each for each, run in zip(settings, taken, strict=True) if run is None]
        trained = iter(self._train(name, config, missing) if missing else ())
        return [next(trained) | {"config": digest} if run is None else run for run in taken]

    def _train(self, name: str, config: Table, settings: Sequence[Mapping[str, Any]]) -> list[Run]:
        folder = self.folder.parent / "comparisons" / name
        make_folder(folder.parent)
        path = folder.parent / f"{name}.toml"
        write(path, dump(config))
        comparison = Comparison.make_or_extend(folder, path, settings=settings)
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        if code := run_all(comparison, parallel=self.parallel, seconds=left):
            raise Stopped(code - 128)
        results = comparison.results()
        chosen_by, _ = measures_of(results, None if comparison.task is None else comparison.task.headline)
        members = list(zip(comparison.members, results, strict=True))
        return [
            as_json(result, chosen_by) | {"options": dict(each)}
            for each in settings
            for member, result in members
            if same(member.options, each)
        ]


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Every combination of the values of `axes`; the last option varies fastest."""
    return settings_of([Axis(option, tuple(values)) for option, values in axes.items()])


def digest_of(config: Table) -> str:
    """A digest of everything that a configuration says, except for where its files are; of a start, the run's name counts."""
    without: Table = {"data": {}, "text": {}, **config}
    kept = {name: without_paths(table) if name in WITH_PATHS else table for name, table in without.items()}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def without_paths(table: Table) -> Table:
    """The options of a table whose values are not paths, and the name of the run that training starts from."""
    start = table.get("start_from")
    named = {"start_from": Path(start).name} if isinstance(start, str) else {}
    return {option: value for option, value in table.items() if not (isinstance(value, str) and "/" in value)} | named


def earlier_runs(path: Path) -> tuple[Run, ...]:
    """The runs in a found.json whose outcome is known, for `Lab.earlier`."""
    runs: list[Run] = []

    def collect(value: Any) -> None:
        match value:
            case {"config": str(), "options": dict(), "outcome": str()}:
                if ended(value):
                    runs.append(value)
            case dict():
                for each in value.values():
                    collect(each)
            case list():
                for each in value:
                    collect(each)
            case _:
                pass

    collect(read_json(path))
    if not runs:
        raise InputError(
            "it has no runs whose outcome is known",
            where=str(path),
            fix="name a found.json of `kilolayer reproduce`",
        )
    return tuple(runs)


def as_json(result: Result, chosen_by: Measure) -> Run:
    """A run as JSON values. loss: the best validation loss. cost: the value by which a comparison chooses; lower is better.

    stacks: by stack, the step and the share of the gradient that reached its first layers at each check.
    """
    checks = checks_of(result.stacks)
    gain = source_gain(result.valid)
    kind, text = result.outcome.kind, result.outcome.text
    if kind == "finished" and gain is not None and gain < SOURCE_READ:
        kind, text = "source_not_read", "source not read"
    return {
        "name": result.name,
        "folder": str(result.folder),
        "options": dict(result.options),
        "outcome": kind,
        "text": text,
        "loss": _finite(VALIDATION_LOSS.of(result)),
        "cost": _finite(chosen_by.cost_of(result)),
        "valid": [(int(row["step"]), _finite(row.get("loss"))) for row in result.valid],
        "train": [(int(row["step"]), _finite(row.get("nll"))) for row in result.train],
        "stacks": {side: [(check.step, float(f"{check.reached:.3g}")) for check in own] for side, own in checks.items()},
        "source_gain": gain,
        "bleu": _bleu(result.scores or {}),
        "metric": max((row["metric"] for row in result.valid if isinstance(row.get("metric"), float)), default=None),
    }


def _bleu(scores: Mapping[str, Any]) -> float | None:
    """BLEU on the test set; the mean over directions if there are several."""
    found = [
        entry["bleu"]["value"] for name, entry in scores.items() if name.startswith("test") and "value" in entry.get("bleu", {})
    ]
    return sum(found) / len(found) if found else None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
