"""CIFAR-10 and CamVid: from scratch and after masked images; CIFAR-10 also by recipe and depth, and on corrupted images.

PYTHONPATH=src python benchmarks/vision/run.py OUT [NAME ...] [--seconds 540] [--earlier results.json] [--tiny]

Trains the named jobs, or all of them in their order, one after another, as `kilolayer train` does with the configurations of
`configs/`. OUT/results.json is written after each run, and again after its corrupted images. At the time limit the active run
stops with a checkpoint, and the same command goes on; one that was killed goes on from its last checkpoint. Jobs that a file
given by --earlier has finished are not trained again, but for one that another job starts from and whose folder is not under
OUT.
Needs KILOLAYER_DATA, with cifar10 and camvid, but for --tiny.

What is compared:
- CIFAR-10: `tuned` starts from `masked`, the same images without their labels; `scratch` and `deep` have the labels alone.
- CamVid: `camvid-tuned` starts from `camvid-masked`, the same 367 training images without their labels, at the same size and
  patch. `camvid-scratch` takes as many steps on the labels as `camvid-tuned`, and `camvid-long` as many as it and
  `camvid-masked` together. So no run sees other images, and a gain over `camvid-long` is not one of more steps.
Fine-tuning has the layer decay that it has by default, 0.75. No learning rate is tuned.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kilolayer as kl
from kilolayer.compare.result import Member, result_of
from kilolayer.config import Table, dump, load, merge
from kilolayer.data.drawn_images import drawn_images
from kilolayer.files.writing import write

sys.path.insert(0, str(Path(__file__).parents[1]))

from reproduce.keep import text_of

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = ("sub_ln", "pre_ln", "deepnorm")
DEPTHS = (12, 24)
DEEP, DEEP_EPOCHS = (48, 100), 30
SEEDS = (1, 2, 3)
CLASSIFIER, CORRUPTED = "cifar10-12l", 2000
SHOWN = ("code", "outcome", "seconds", "scores")
RARELY = 960
"""Steps between checkpoints of masked images: 20 epochs. An epoch takes half a second, and writing a checkpoint as long."""
LONG = 28_000
"""The steps of camvid-masked-12l and camvid-12l together."""


@dataclass(frozen=True)
class Job:
    """A run. config: the file in `configs/`. after: the job that it starts from."""

    name: str
    config: str
    options: Table = field(default_factory=dict)
    after: str | None = None


def jobs() -> Iterator[Job]:
    """All jobs, those that matter most first: by seed 12 layers of each recipe and CamVid, then 24 layers, then more."""
    for seed in SEEDS:
        for recipe in RECIPES:
            yield from trio(recipe, min(DEPTHS), seed)
        yield from of_streets(seed)
    for seed in SEEDS:
        for recipe in RECIPES:
            yield from trio(recipe, max(DEPTHS), seed)
    for layers in DEEP:
        for recipe in RECIPES:
            own = {"model": _model(recipe, layers), "train": {"epochs": DEEP_EPOCHS, "average": 1, "keep": 1}}
            yield Job(f"deep-{recipe}-{layers}", CLASSIFIER, own)


def of_streets(seed: int) -> Iterator[Job]:
    """CamVid: from scratch, masked images, what starts from these, and from scratch for as long as both."""
    own = {"train": {"seed": seed}}
    yield Job(f"camvid-scratch-{seed}", "camvid-12l", own)
    yield Job(f"camvid-masked-{seed}", "camvid-masked-12l", own)
    yield Job(f"camvid-tuned-{seed}", "camvid-12l", own, after=f"camvid-masked-{seed}")
    yield Job(f"camvid-long-{seed}", "camvid-12l", {"train": {"seed": seed, "steps": LONG}})


def trio(recipe: str, layers: int, seed: int) -> Iterator[Job]:
    """From scratch, masked images, and what starts from these."""
    name, own = f"{recipe}-{layers}-{seed}", {"model": _model(recipe, layers), "train": {"seed": seed}}
    if layers == min(DEPTHS):
        yield Job(f"scratch-{name}", CLASSIFIER, own)
    yield Job(f"masked-{name}", "cifar10-masked-12l", merge(own, {"train": {"valid_every": RARELY, "save_every": RARELY}}))
    tuned = {"train": {"epochs": 100, "lr": 5e-4, "layer_decay": 0.75}}
    yield Job(f"tuned-{name}", CLASSIFIER, merge(own, tuned), after=f"masked-{name}")


def _model(recipe: str, layers: int) -> Table:
    return {"recipe": {"name": recipe}, "layers": layers}


def table_of(job: Job, out: Path, data: Path | None) -> Table:
    """The configuration of a job, with the files that it reads."""
    table = merge(load(CONFIGS / f"{job.config}.toml"), job.options)
    if data is None:
        table = merge(table, _tiny(out, table))
    else:
        archive = data / ("camvid/camvid_480x360.tar.xz" if "camvid" in job.config else "cifar10/cifar10_jpeg.tar.xz")
        for name, source in table["images"].items():
            if isinstance(source, str) and ":" in source:
                table["images"][name] = f"{archive.resolve()}:{source.partition(':')[2]}"
    if job.after is not None:
        table = merge(table, {"train": {"start_from": str((out / job.after).resolve())}})
    return table


def _tiny(out: Path, table: Table) -> Table:
    """A form of seconds, on drawn images."""
    folder = out / "drawn"
    if not folder.exists():
        drawn_images(folder, 24, {"train": 18, "valid": 6, "test": 6})
    files = {name: str((folder / name).resolve()) for name, value in table["images"].items() if ":" in str(value)}
    classes = {"classes": []} if table["task"] == "segment" else {} if "valid" in files else {"valid_share": 0.3}
    length = {"steps": 2, "warmup_steps": 1} if "steps" in table["train"] else {"epochs": 1}
    small: Table = {
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32},
        "images": {**files, "size": 24, "rows": 4, **classes},
        "train": {**length, "precision": "fp32"},
    }
    if "decoder" in table["model"]["image"]:
        small["model"]["image"] = {"decoder": {"dim": 16, "heads": 2, "layers": 1}}
    if table["task"] == "segment":
        small["model"]["map_head"] = {"channels": 8}
    return small


def run(job: Job, out: Path, data: Path | None, deadline: float) -> dict[str, Any]:
    """Train one job, or go on with it: the exit code, the outcome, the seconds that this took, validations and scores."""
    folder, began = out / job.name, time.monotonic()
    words = ["--resume", str(folder)]
    if not (folder / "config.toml").exists():
        config = out / f"{job.name}.toml"
        config.write_text(dump(table_of(job, out, data)))
        words = [str(config), "--run", str(folder)]
    with (out / f"{job.name}.log").open("a") as log:
        process = subprocess.Popen([sys.executable, "-m", "kilolayer", "train", *words], stdout=log, stderr=log)
        try:
            code = process.wait(max(1.0, deadline - began))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # leaves a checkpoint
            code = process.wait()
    found = result_of(Member(job.name, job.options, folder))
    return {
        "config": job.config,
        "options": job.options,
        "after": job.after,
        "code": code,
        "outcome": found.outcome.text,
        "seconds": round(time.monotonic() - began, 1),
        "seconds_in_steps": found.seconds,
        "valid": [{key: value for key, value in row.items() if key != "kind"} for row in found.valid],
        "scores": found.scores.get("test"),
    }


def corruptions(job: Job, out: Path, most: int) -> dict[str, Any]:
    """The errors of a classifier on corrupted images; the reason, if they could not be measured."""
    try:
        found: Any = kl.load(out / job.name)
        return found.corruptions(most=most).table()
    except Exception as error:  # the other jobs go on
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def needed(names: Iterable[str], rows: dict[str, Any], out: Path, every: dict[str, Job]) -> Iterator[Job]:
    """The jobs to train or to score, in order, each after the one that it starts from, if that is not here."""
    tried: set[str] = set()
    for name in names:
        job, here = every[name], {each for each in every if (out / each / "config.toml").exists()}
        if is_complete(job, rows) or (is_trained(name, rows) and name not in here):
            continue
        before = job.after
        if before is not None and not (is_trained(before, rows) and before in here) and before not in tried:
            tried.add(before)
            yield every[before]
        if name not in tried:
            tried.add(name)
            yield job


def is_trained(name: str, rows: dict[str, Any]) -> bool:
    """Whether a run went to its end."""
    return rows.get(name, {}).get("code") == 0


def is_complete(job: Job, rows: dict[str, Any]) -> bool:
    """Whether a job has all its results."""
    classifies = job.config == CLASSIFIER
    return is_trained(job.name, rows) and (not classifies or "mean_corruption_error" in rows[job.name].get("corruptions", {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--earlier", type=Path, action="append", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_intermixed_args()
    every = {job.name: job for job in jobs()}
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"no job {unknown[0]!r}; the jobs are {', '.join(every)}")
    data = None if options.tiny else Path(os.environ["KILOLAYER_DATA"])
    out, deadline = options.out.resolve(), time.monotonic() + options.seconds
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    rows: dict[str, Any] = {}
    for earlier in (*options.earlier, *([path] if path.exists() else [])):
        rows |= json.loads(earlier.read_text())["runs"]

    def save() -> None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = {"kilolayer": kl.__version__, "torch": torch.__version__, "python": platform.python_version()}
        words = " ".join(["OUT", *options.names, *(["--tiny"] if options.tiny else [])])
        about = {"command": f"python benchmarks/vision/run.py {words}", "made_with": versions | {"device": device}}
        write(path, text_of({**about, "tiny": options.tiny, "runs": rows}) + "\n")

    for job in needed(options.names or every, rows, out, every):
        if time.monotonic() > deadline:
            break
        if job.after is not None and not is_trained(job.after, rows):
            print(f"{job.name}: left out, since {job.after} did not end: {out / job.after}.log", flush=True)
            continue
        if not is_trained(job.name, rows) or not (out / job.name / "config.toml").exists():
            before = 0.0 if is_trained(job.name, rows) else rows.get(job.name, {}).get("seconds", 0.0)
            rows[job.name] = run(job, out, data, deadline)
            rows[job.name]["seconds"] = round(rows[job.name]["seconds"] + before, 1)
            save()
        if job.config == CLASSIFIER and is_trained(job.name, rows) and time.monotonic() < deadline:
            rows[job.name]["corruptions"] = corruptions(job, out, CORRUPTED if data is not None else 6)
            save()
        shown = {key: value for key, value in rows[job.name].items() if key in SHOWN}
        print(json.dumps({job.name: shown}), flush=True)


if __name__ == "__main__":
    main()
