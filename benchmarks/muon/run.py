"""Muon against AdamW: the time of a step, and the steps to AdamW's final loss.

python benchmarks/muon/run.py step OUT [--tiny]                  # alone on the GPU
python benchmarks/muon/run.py train OUT [--rows enwik8 ...] [--parallel 9] [--seconds 500] [--earlier FILE] [--tiny]
python benchmarks/muon/run.py table OUT                          # OUT/table.md

`step`: 24 layers, d 1024, 32 x 1,024 tokens, bf16, as in benchmarks/speed; both optimizers in turns, recorded and in eager
mode. `train`: German to English at 18L-18L with DeepNorm and Pre-LN, and enwik8 at 24 layers. Each optimizer trains at five
rates with the first seed, then the other seeds at the best. Muon also trains at its best rate with a quarter fewer steps and
the schedule shortened with them: what counts as 25% fewer steps is a loss there that is not above AdamW's. The row "recipes"
trains six recipes at 12, 48 and 96 layers per side with one seed, at the best rates of DeepNorm at 18, and is left out unless
it is named. The runs are those of `kilolayer train`. OUT/results.json is written after each. A run is not begun if it would not
end in time at the pace of its row; those under way at the time limit stop with a checkpoint, from which the same command goes
on. --earlier: a results.json of another session. Needs KILOLAYER_DATA, with manythings and, for enwik8, that, but for --tiny.
"""

from __future__ import annotations

import argparse
import gc
import json
import lzma
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))

from jobs import LANGUAGE
from ours import kilolayer as training_step
from reproduce.keep import text_of as lines_of
from run_pool import Workers
from run_pool import train as trained

from kilolayer.compare.result import Member, result_of
from kilolayer.config import Table, dump, merge
from kilolayer.files.writing import write
from kilolayer.report.record import number
from kilolayer.reproduce.lab import Lab
from kilolayer.reproduce.stored_run import ended

GRID = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
SEEDS = (1, 2, 3)
OPTIMIZERS = ("adamw", "muon")
SHORTER = 0.75
RECIPES = ("deepnorm", "pre_ln", "post_ln", "sub_ln", "admin", "peri_ln")
DEPTHS = (12, 48, 96)
ROWS = ("de-en-deepnorm", "de-en-pre_ln", "enwik8", *(f"recipes-{recipe}-{layers}" for recipe in RECIPES for layers in DEPTHS))
WORST = 1e9
"""The loss of a run that has none: it diverged."""


@dataclass(frozen=True)
class Job:
    """One run. row: what is trained. share: the number of steps as a share of the row's."""

    row: str
    optimizer: str
    lr: float
    seed: int = SEEDS[0]
    share: float = 1.0

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.row}-{self.optimizer}-lr{self.lr:g}-seed{self.seed}" + ("" if self.share == 1 else f"-{self.share:g}")


def table_of(row: str, work: Path, tiny: bool) -> Table:
    """The configuration of a row, without optimizer, rate and seed."""
    data = None if tiny else Path(os.environ["KILOLAYER_DATA"])
    lab = Lab(work / "lab", tiny, data)
    if row == "enwik8":
        return enwik8(lab, work, data)
    recipe, layers, steps = row.removeprefix("de-en-"), 18, 2000
    if row.startswith("recipes-"):
        recipe, layers, steps = row.split("-")[1], int(row.split("-")[2]), 1000
    length = {"steps": 8, "warmup_steps": 2} if tiny else {"steps": steps, "warmup_steps": round(0.4 * steps)}
    train = {**length, "weight_decay": 0.01, "valid_every": 2 if tiny else 25}
    return merge(lab.translation(), {"train": train, "model": {"layers": 2 if tiny else layers, "recipe": recipe}})


def enwik8(lab: Lab, work: Path, data: Path | None) -> Table:
    """24 layers on bytes, as in configs/enwik8.toml but for fewer steps."""
    own = {
        "text": {"valid_share": 0.05, "test_share": 0.05, "length": 16 if lab.tiny else 512, "train": str(text_of(work, data))},
        "tokenizer": {"kind": "bytes"},
        "model": {"layers": 2 if lab.tiny else 24, "recipe": "sub_ln"},
        "train": {"weight_decay": 0.1, "clip_norm": 1.0, "valid_every": 2 if lab.tiny else 50},
    }
    table = merge(lab.language(), own)
    table["text"] = own["text"]
    if lab.tiny:
        return table
    size = {"dim": 384, "heads": 6, "ffn_dim": 1536, "dropout": 0.1}
    train = {"steps": 3000, "warmup_steps": 300, "schedule": "cosine", "valid_sentences": 256}
    return merge(table, {"model": size, "batches": {"tokens": 32_768}, "train": train})


def text_of(work: Path, data: Path | None) -> Path:
    """enwik8 as a file; the embedded text for the tiny form."""
    path = work / "text" / ("tiny.txt" if data is None else "enwik8")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            path.write_text("the dog sees the cat, and the cat sings. " * 400)
        else:
            path.write_bytes(lzma.decompress((data / "enwik8" / "enwik8.xz").read_bytes()))
    return path.resolve()


def config_of(job: Job, table: Table) -> Table:
    """The configuration of a job."""
    train = {"optimizer": job.optimizer, "lr": job.lr, "seed": job.seed, "save_every": 10**9, "save_best": False, "keep": 1}
    lengths = {name: max(1, round(job.share * table["train"][name])) for name in ("steps", "warmup_steps")}
    return merge(table, {"train": {**train, **lengths}})


def run(job: Job, table: Table, folder: Path) -> dict[str, Any]:
    """Train one run in a process of the pool, or go on with it, and return its validations."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.toml"
    config.write_text(dump(config_of(job, table)))
    code, seconds = trained(config, folder / "run", folder / "log.txt", Path.cwd())
    result = result_of(Member(job.name, {}, folder / "run"))
    own = {"row": job.row, "optimizer": job.optimizer, "lr": job.lr, "seed": job.seed, "share": job.share}
    end = {"outcome": result.outcome.kind, "text": result.outcome.text, "code": code, "seconds": round(seconds, 1)}
    valid = [(row["step"], row["loss"]) for row in result.valid if math.isfinite(number(row, "loss"))]
    return {"name": job.name, **own, "valid": valid, "seconds_in_steps": result.seconds, **end}


def final_loss(found: dict[str, Any]) -> float:
    """The last validation loss of a run that went to its end."""
    loss = found["valid"][-1][1] if found["valid"] and found["outcome"] != "diverged" else math.nan
    return loss if isinstance(loss, float) and math.isfinite(loss) else WORST


def steps_to(valid: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step, between two validations, at which the loss first falls to this value; None if it never does."""
    before: Sequence[float] | None = None
    for step, value in valid:
        if value <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = (step, value)
    return None


def best_rate(row: str, optimizer: str, known: dict[str, dict[str, Any]]) -> float | None:
    """The rate with the lowest final loss of the first seed; None until all rates are trained."""
    losses = {rate: known.get(Job(row, optimizer, rate).name) for rate in GRID}
    if any(each is None for each in losses.values()):
        return None
    return min(GRID, key=lambda rate: final_loss(losses[rate] or {}))


def wanted(rows: Sequence[str], known: dict[str, dict[str, Any]]) -> Iterator[Job]:
    """The jobs that can be trained with what is known."""
    for row in rows:
        for optimizer in OPTIMIZERS:
            if row.startswith("recipes-"):
                best = best_rate("de-en-deepnorm", optimizer, known)
                yield from [] if best is None else [Job(row, optimizer, best)]
                continue
            yield from (Job(row, optimizer, rate) for rate in GRID)
            best = best_rate(row, optimizer, known)
            if best is None:
                continue
            yield from (Job(row, optimizer, best, seed) for seed in SEEDS)
            if optimizer == "muon":
                yield from (Job(row, optimizer, best, seed, SHORTER) for seed in SEEDS)


def train(options: argparse.Namespace) -> None:
    """Train what is missing until the time is over."""
    named = options.rows or [row for row in ROWS if not row.startswith("recipes-")]
    rows = [row for row in ROWS if any(row == each or row.startswith(f"{each}-") for each in named)]
    every = {row: table_of(row, options.out, options.tiny) for row in rows}
    path = options.out / "results.json"
    known: dict[str, dict[str, Any]] = {}
    for earlier in (*options.earlier, *([path] if path.exists() else [])):
        known |= {each["name"]: each for each in json.loads(earlier.read_text())["runs"]}
    deadline = time.monotonic() + options.seconds
    workers, pace = Workers(options.parallel, deadline), dict.fromkeys(rows, 0.0)
    running: dict[Future[dict[str, Any]], tuple[Job, ProcessPoolExecutor]] = {}
    failed: set[str] = set()
    while True:
        busy = {*known, *failed, *(job.name for job, _ in running.values())}
        left = deadline - time.monotonic()
        waiting = [job for job in dict.fromkeys(wanted(rows, known)) if job.name not in busy]
        waiting = [job for job in waiting if pace[job.row] * job.share < left]
        while waiting and (worker := workers.take(0)) is not None:
            job = waiting.pop(0)
            running[worker.submit(run, job, every[job.row], options.out / "runs" / job.name)] = job, worker
        if not running:
            break
        for future in wait(running, timeout=5.0, return_when=FIRST_COMPLETED).done:
            job, worker = running.pop(future)
            try:
                found = future.result()
                workers.idle.put(worker)
            except BrokenProcessPool:
                workers.add()
                failed.add(job.name)
                print(f"{job.name}: its process ended", flush=True)
                continue
            if ended(found):
                known[job.name], pace[job.row] = found, found["seconds"] / job.share
                save(path, list(known.values()), options)
            else:
                failed.add(job.name)  # the next command goes on with it, or tries again: it may have lacked memory
            left = deadline - time.monotonic()
            print(f"{left:.0f} s left: {job.name}: {found['text']}, {_shown(final_loss(found))}", flush=True)
        if workers.end_late():
            break
    workers.kill()
    sys.stdout.flush()
    os._exit(0)  # the executors would wait for processes that were killed


def save(path: Path, runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the results."""
    words = ["train", "OUT", *(["--rows", *options.rows] if options.rows else []), *(["--tiny"] if options.tiny else [])]
    about = {"command": f"python benchmarks/muon/run.py {' '.join(words)}", "tiny": options.tiny, **machine()}
    write(path, lines_of({**about, "runs": runs}) + "\n")


def machine() -> dict[str, Any]:
    """Versions and hardware."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {"hardware": name, "torch": torch.__version__, "python": platform.python_version()}


def step(options: argparse.Namespace) -> None:
    """Time steps of both optimizers in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setting = LANGUAGE
    if options.tiny:
        setting = replace(setting, layers=2, rows=2, length=16, dim=32, heads=2, ffn_dim=64, vocabulary=50)
    timed, rounds = (2, 2) if options.tiny else (20, 5)
    found: dict[str, Any] = {}
    for form, eager in (("recorded", False), ("eager", True)):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        steps = {each: training_step(setting, device, optimizer=each, eager=eager) for each in OPTIMIZERS}
        for each in steps.values():
            for _ in range(2 if options.tiny else 8):
                each()
        times: dict[str, list[float]] = {each: [] for each in OPTIMIZERS}
        for _ in range(rounds):
            for name, each in steps.items():
                began = _now(device)
                for _ in range(timed):
                    each()
                times[name].append((_now(device) - began) / timed * 1e3)
        ms = {name: median(own) for name, own in times.items()}
        found[form] = {"ms": ms, "ratio": ms["muon"] / ms["adamw"], "rounds": times}
        print(f"{form}: AdamW {ms['adamw']:.2f} ms, Muon {ms['muon']:.2f} ms, {found[form]['ratio']:.3f} times", flush=True)
        del steps
        gc.collect()
        text = json.dumps({"command": "python benchmarks/muon/run.py step OUT", **machine(), **found}, indent=1)
        write(options.out / "step.json", text + "\n")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def table(options: argparse.Namespace) -> None:
    """Write OUT/table.md from the results."""
    known = {each["name"]: each for each in json.loads((options.out / "results.json").read_text())["runs"]}
    lines = ["| row | optimizer | best rate | final loss | seeds | steps to AdamW's loss | 25% fewer steps | losses by rate |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in dict.fromkeys(each["row"] for each in known.values() if not each["row"].startswith("recipes-")):
        reference = _runs(row, "adamw", 1.0, known)
        losses = list(map(final_loss, reference))
        goal = mean(losses) if losses and WORST not in losses else math.nan
        for optimizer in OPTIMIZERS:
            if own := _runs(row, optimizer, 1.0, known):
                lines.append(_line(row, optimizer, own, goal, known))
    others = [each for each in known.values() if each["row"].startswith("recipes-")]
    if others:
        lines += ["", "| recipe and layers per side | AdamW | Muon |", "|---|---|---|"]
    for row in dict.fromkeys(each["row"] for each in others):
        losses = {each["optimizer"]: _shown(final_loss(each)) for each in others if each["row"] == row}
        lines.append(f"| {row.removeprefix('recipes-')} | {losses.get('adamw', '-')} | {losses.get('muon', '-')} |")
    (options.out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _runs(row: str, optimizer: str, share: float, known: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of all seeds at the best rate; empty until that is known."""
    best = best_rate(row, optimizer, known)
    names = [] if best is None else [Job(row, optimizer, best, seed, share).name for seed in SEEDS]
    return [known[name] for name in names if name in known]


def _line(row: str, optimizer: str, own: list[dict[str, Any]], goal: float, known: dict[str, dict[str, Any]]) -> str:
    best, steps = own[0]["lr"], [steps_to(each["valid"], goal) for each in own]
    reached = [each for each in steps if each is not None]
    shorter = _runs(row, optimizer, SHORTER, known)
    rates = ", ".join(f"{rate:g}: {_shown(final_loss(known[Job(row, optimizer, rate).name]))}" for rate in GRID)
    cells = [
        row,
        optimizer,
        f"{best:g}" + (", the edge" if best in (GRID[0], GRID[-1]) else ""),
        _spread([final_loss(each) for each in own]),
        len(own),
        f"{mean(reached):.0f} of {own[0]['valid'][-1][0]} ({len(reached)} of {len(own)} runs)" if reached else "never",
        _spread([final_loss(each) for each in shorter]) if shorter else "-",
        rates,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _spread(losses: list[float]) -> str:
    error = f" ± {stdev(losses) / math.sqrt(len(losses)):.3f}" if len(losses) > 1 else ""
    return "diverged" if WORST in losses else f"{mean(losses):.3f}{error}"


def _shown(loss: float) -> str:
    return "none" if loss == WORST else f"{loss:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "train", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--parallel", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument(
        "--rows", nargs="*", help="de-en, de-en-deepnorm, de-en-pre_ln, enwik8, recipes, recipes-deepnorm-48, ..."
    )
    parser.add_argument("--earlier", type=Path, action="append", default=[])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if odd := [each for each in options.rows or () if not any(row == each or row.startswith(f"{each}-") for row in ROWS)]:
        parser.error(f"--rows: no {odd[0]!r}; choose from {', '.join(ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    {"step": step, "train": train, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
