"""CIFAR-10 and CamVid: from scratch and after masked images; CIFAR-10 also by recipe and depth, and on corrupted images.

PYTHONPATH=src python benchmarks/vision/run.py OUT [NAME ...] [--seconds 540] [--earlier results.json] [--tiny]

Trains the named jobs, or all of them in their order, one after another, as `kilolayer train` does with the configurations of
`configs/`. OUT/results.json is written after each. At the time limit the active run stops with a checkpoint, and the same
command goes on; jobs that --earlier has finished are not trained again. A job that starts from another one needs its folder
under OUT.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import kilolayer as kl
from kilolayer.config import Table, dump, load, merge
from kilolayer.data.drawn_images import drawn_images

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = ("sub_ln", "pre_ln", "deepnorm")
DEPTHS = (12, 24)
DEEP, DEEP_EPOCHS = (48, 100), 30
SEEDS = (1, 2, 3)
CORRUPTED = 2000
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
    """All jobs, those that matter most first: 12 layers, then other recipes and seeds, then depth."""
    for seed in SEEDS:
        for recipe in RECIPES:
            for layers in DEPTHS:
                yield from trio(recipe, layers, seed)
    for layers in DEEP:
        for recipe in RECIPES:
            own = {"model": _model(recipe, layers), "train": {"epochs": DEEP_EPOCHS, "average": 1, "keep": 1}}
            yield Job(f"deep-{recipe}-{layers}", "cifar10-12l", own)
    for seed in SEEDS:
        own = {"train": {"seed": seed}}
        yield Job(f"camvid-scratch-{seed}", "camvid-12l", own)
        yield Job(f"camvid-masked-{seed}", "camvid-masked-12l", own)
        yield Job(f"camvid-tuned-{seed}", "camvid-12l", own, after=f"camvid-masked-{seed}")
        yield Job(f"camvid-long-{seed}", "camvid-12l", {"train": {"seed": seed, "steps": LONG}})


def trio(recipe: str, layers: int, seed: int) -> Iterator[Job]:
    """From scratch, masked images, and what starts from these."""
    name, own = f"{recipe}-{layers}-{seed}", {"model": _model(recipe, layers), "train": {"seed": seed}}
    if layers == min(DEPTHS):
        yield Job(f"scratch-{name}", "cifar10-12l", own)
    yield Job(f"masked-{name}", "cifar10-masked-12l", own)
    tuned = {"train": {"epochs": 100, "lr": 5e-4, "layer_decay": 0.75}}
    yield Job(f"tuned-{name}", "cifar10-12l", merge(own, tuned), after=f"masked-{name}")


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
    """Train one job, or go on with it, and score it; without scores if the time is over or it failed."""
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
    row: dict[str, Any] = {"code": code, "seconds": round(time.monotonic() - began, 1)}
    if code == 0:
        found: Any = kl.load(folder)
        row["scores"] = found.scores().get("test")
        if job.config == "cifar10-12l":
            row["corruptions"] = found.corruptions(most=6 if data is None else CORRUPTED).table()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    data = None if options.tiny else Path(os.environ["KILOLAYER_DATA"])
    out, deadline = options.out.resolve(), time.monotonic() + options.seconds
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.json"
    earlier = next((each for each in (path, options.earlier) if each is not None and each.exists()), None)
    rows: dict[str, Any] = {} if earlier is None else json.loads(earlier.read_text())["runs"]
    every = {job.name: job for job in jobs()}
    for name in options.names or every:
        if rows.get(name, {}).get("code") == 0 or time.monotonic() > deadline:
            continue
        rows[name] = run(every[name], out, data, deadline)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        made_with = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
        found = {"command": "python benchmarks/vision/run.py OUT", "made_with": made_with, "runs": rows}
        path.write_text(json.dumps(found, indent=1))
        print(json.dumps({name: {key: value for key, value in rows[name].items() if key != "corruptions"}}), flush=True)


if __name__ == "__main__":
    main()
