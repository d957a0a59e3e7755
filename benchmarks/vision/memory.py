"""The memory that training on images takes on a GPU, beside what `kilolayer plan` predicts.

PYTHONPATH=src python benchmarks/vision/memory.py OUT [NAME ...] [--trace] [--seconds 480] [--tiny]

Each job is four steps of a configuration of `configs/`, or of a variant of one, in a process of its own, on drawn images:
memory does not depend on what an image shows. OUT/memory.json has the peak of allocated memory, the prediction and their
ratio. It is written after each job, none is begun after --seconds, and jobs that it has are measured again only if they are
named. Without a GPU nothing is measured, and the peak is null.

--trace: also what the peak consists of, from a second run of the job with a record of every allocation: GiB by the function of
Kilolayer that allocated it, or by the innermost function where it was none of ours.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import kilolayer as kl
from kilolayer.cli.configuration import read_tables
from kilolayer.cli.plan import configuration_of, typical_work
from kilolayer.config import Table, dump, load, merge
from kilolayer.data.drawn_images import drawn_images
from kilolayer.files.writing import write
from kilolayer.runs.budget import budget

CONFIGS = Path(__file__).parents[2] / "configs"
JOBS: dict[str, tuple[str, Table]] = {
    "scratch 12L": ("cifar10-12l", {}),
    "scratch 100L": ("cifar10-12l", {"model": {"layers": 100}}),
    "scratch 100L, layers recomputed": ("cifar10-12l", {"model": {"layers": 100}, "train": {"recompute": "layer"}}),
    "scratch 24L, layers recomputed": ("cifar10-12l", {"model": {"layers": 24}, "train": {"recompute": "layer"}}),
    "MAE 12L": ("cifar10-masked-12l", {}),
    "masked blocks 12L": ("beit-base-12l", {"images": {"rows": 128}}),
    "segmentation 12L": ("camvid-12l", {}),
    "ImageNet's size 24L": ("beit-large-24l-imagenet", {"images": {"rows": 32}}),
}
FILES = {f"{part}{end}" for part in ("train", "valid", "test") for end in ("", "_labels")}
SMALL: Table = {"model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32}, "images": {"size": 32, "rows": 4}}


def table_of(name: str, out: Path, tiny: bool) -> Table:
    """The configuration of a job, on drawn images."""
    config, variant = JOBS[name]
    table = merge(load(CONFIGS / f"{config}.toml"), variant)
    for part in FILES & set(table["images"]):
        table["images"][part] = str(out / "drawn" / part.replace("valid", "train"))
    table["images"].pop("valid_share", None)
    table["train"] = {key: value for key, value in table["train"].items() if key not in ("epochs", "warmup_share")}
    table["train"] |= {"steps": 4, "warmup_steps": 1, "average": 1, "keep": 1}
    if table.pop("target", None) is not None:  # pixels, instead of the codes of a tokenizer that would have to be trained first
        table["model"].pop("vocab_size", None)
    if not tiny:
        return table
    table = merge(table, SMALL)
    if "decoder" in table["model"]["image"]:
        table["model"]["image"]["decoder"] = {"dim": 16, "heads": 2, "layers": 1}
    table["model"]["image"]["patch"] = 8
    return table


def measured(name: str, out: Path, tiny: bool) -> dict[str, Any]:
    """One job, in a process of its own."""
    table = table_of(name, out, tiny)
    path = out / "job.toml"
    path.write_text(dump(table))
    config: Any = configuration_of(read_tables(path, []))
    training = budget(config.model, typical_work(config, None)).training
    planned = training.peak if config.train.recompute == "none" else training.peak_recomputed
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    kl.train(table, run=folder)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    row = {"plan": round(planned / 2**30, 3), "peak": None if peak is None else round(peak / 2**30, 3)}
    return row | {"ratio": None if peak is None else round(planned / peak, 3)}


def in_a_process(work: Callable[[str, Path, bool], dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a process of its own, or the reason why it returns nothing."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except Exception as error:  # the other jobs go on
            return {"error": f"{type(error).__name__}: {error}"[:500]}


def traced(name: str, out: Path, tiny: bool) -> dict[str, float]:
    """What the peak of one job consists of, in a process of its own."""
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2**22)
    kl.train(table_of(name, out, tiny), run=folder)
    recorded: Any = torch.cuda.memory._snapshot()
    return at_peak(recorded["device_traces"][torch.cuda.current_device()])


def at_peak(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """GiB by function at the moment when most was allocated, the largest first; parts under 1% are one entry."""
    signs = {"alloc": 1, "free_requested": -1}
    totals = list(accumulate(signs.get(event["action"], 0) * event.get("size", 0) for event in events))
    alive: dict[int, dict[str, Any]] = {}
    for event in events[: totals.index(max(totals)) + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    parts: Counter[str] = Counter()
    for event in alive.values():
        parts[function_of(event["frames"])] += event["size"]
    small = {where for where, size in parts.items() if size < max(totals) / 100}
    shown = {where: round(size / 2**30, 3) for where, size in parts.most_common() if where not in small}
    return shown | {"other": round(sum(parts[where] for where in small) / 2**30, 3)}


def function_of(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost function of Kilolayer among the frames of an allocation, which begin with the innermost."""
    ours = next((frame for frame in frames if "kilolayer/" in frame["filename"]), None)
    frame = ours or next(iter(frames), None)
    if frame is None:
        return "unknown"
    return f"{frame['filename'].rpartition('kilolayer/')[2]}:{frame['line']} {frame['name']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(JOBS))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_intermixed_args()
    if unknown := [name for name in options.names if name not in JOBS]:
        parser.error(f"no job {unknown[0]!r}; the jobs are {', '.join(JOBS)}")
    out, deadline = options.out.resolve(), time.monotonic() + options.seconds
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "drawn").exists():
        drawn_images(out / "drawn", 32, {"train": 12 if options.tiny else 1200, "test": 6})
    path = out / "memory.json"
    jobs: dict[str, Any] = json.loads(path.read_text())["jobs"] if path.exists() else {}
    for name in options.names or [each for each in JOBS if "plan" not in jobs.get(each, {})]:
        if time.monotonic() > deadline:
            break
        jobs[name] = in_a_process(measured, name, out, options.tiny)
        if options.trace and torch.cuda.is_available() and "error" not in jobs[name]:
            jobs[name]["at peak"] = in_a_process(traced, name, out, options.tiny)
        print(json.dumps({name: jobs[name]}), flush=True)
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        made_with = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
        document = {"command": "python benchmarks/vision/memory.py OUT", "made_with": made_with, "unit": "GiB", "jobs": jobs}
        write(path, json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
