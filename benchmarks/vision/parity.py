"""Image classifiers on CIFAR-10 in a loop that belongs to neither library, beside the trainer: is ours behind, and where?

PYTHONPATH=src python benchmarks/vision/parity.py OUT [NAME ...] [--epochs 10] [--parallel 4] [--seconds 500] [--small | --tiny]

The loop: torch's AdamW and bf16 autocast, on a GPU one captured graph from the augmentation to the update. In it, Hugging
Face's ViT with its own start, and `kl.ImageEncoder` by recipe without fast forms. "trainer" is `kl.train` with the
configuration cifar10-12l and the same options. All have 12 layers of d 384, patches of 4 pixels, no drop path, the same
rates, warm-up (a twentieth) and cosine. A name is SYSTEM-RATE-ROWS-AUGMENTATION, such as vit-1e-3-512-light or
trainer:sub_ln-5e-4-128-full; "full" is the augmentation of cifar10-12l, "light" shifts and mirrors images.
--small: 4 layers of d 128, patches of 8 pixels and one thread, for a CPU.
OUT/parity.json has the accuracy on the test images after the last epoch, and the training loss by tenths of the run. It is
written after each run, and the same command goes on with those that it lacks. A run is not begun if it would not end in time at
the pace of the last one.
Needs KILOLAYER_DATA, with cifar10, but for --tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from speed import CLASSES, Shape, vit_model
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.config import load
from kilolayer.data.augment import Augment, AugmentConfig
from kilolayer.data.drawn_images import drawn_images
from kilolayer.data.images import ImagesConfig, normalized, read_images
from kilolayer.files.writing import write

sys.path.insert(0, str(Path(__file__).parents[1]))

from run_pool import Workers

CONFIG = Path(__file__).parents[2] / "configs" / "cifar10-12l.toml"
SMOOTHING, DECAY, BETAS, WARMUP, CLIP = 0.1, 0.05, (0.9, 0.999), 0.05, 1.0
AUGMENTS: dict[str, dict[str, Any]] = {"light": {"crop": "pad"}, "full": load(CONFIG)["augment"]}
SMALL = [f"{system}-1e-3-128-{augment}" for augment in AUGMENTS for system in ("vit", "pre_ln", "sub_ln", "trainer:sub_ln")]
TRAINED = ("trainer:pre_ln", "trainer:sub_ln", "trainer:deepnorm")
USUAL = [
    *(f"{system}-{lr}-128-full" for lr in ("1e-3", "5e-4", "2.5e-4", "1.25e-4") for system in ("vit", *TRAINED)),
    *(f"{system}-2.5e-4-128-light" for system in ("vit", "sub_ln")),
    "sub_ln-1e-3-128-full",
]


SHAPES = {"usual": Shape(12), "small": Shape(4, patch=8, dim=128, heads=4), "tiny": Shape(2, size=16, dim=16, heads=2)}


@dataclass(frozen=True)
class Job:
    """One run."""

    system: str
    lr: str
    rows: int
    augment: str

    @classmethod
    def of(cls, name: str) -> Job:
        found, rows, augment = name.rsplit("-", 2)
        system, lr = found.split("-", 1)
        return cls(system, lr, int(rows), augment)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = max(1, round(WARMUP * steps))
        if step < warmup:
            return float(self.lr) * (step + 1) / warmup
        return float(self.lr) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@dataclass(frozen=True)
class Data:
    """Images on the device: uint8 [images, 3, side, side], and labels int64 [images]."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def read(cls, sources: dict[str, str], side: int, cache: Path, device: torch.device) -> Data:
        classes = tuple(sorted(folder.name for folder in Path(sources["test"]).iterdir())) if side < 32 else CIFAR
        config = ImagesConfig(size=side, classes=list(classes))

        def part(name: str) -> tuple[Tensor, Tensor]:
            images = read_images(sources[name], config, cache)
            assert images.labels is not None
            pixels = torch.from_numpy(np.array(images.pixels)).permute(0, 3, 1, 2).contiguous()
            return pixels.to(device), torch.from_numpy(np.array(images.labels)).long().to(device)

        return cls(part("train"), part("test"))


CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def ours(recipe: str, shape: Shape) -> nn.Module:
    return kl.ImageEncoder(
        kl.ImageInput(size=shape.size, patch=shape.patch),
        dim=shape.dim,
        heads=shape.heads,
        ffn_dim=4 * shape.dim,
        layers=shape.layers,
        recipe=recipe,
        positions="learned",
        activation="gelu",
        head=kl.Head(outputs=CLASSES, pooler="none", dropout=0.0),
    )


def neutral(job: Job, shape: Shape, data: Data, epochs: int, device: torch.device) -> dict[str, Any]:
    """Train in the loop that belongs to neither library."""
    torch.manual_seed(1)
    model: Any = vit_model(shape) if job.system == "vit" else ours(job.system, shape)
    model = model.to(device).train()
    (pixels, labels), captures = data.train, device.type == "cuda"
    lr = torch.zeros((), device=device)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr, BETAS, capturable=captures)
    augment = Augment(AugmentConfig(**AUGMENTS[job.augment]), 1, CLASSES)
    members = torch.zeros(job.rows, dtype=torch.int64, device=device)
    epoch = torch.zeros((), dtype=torch.int64, device=device)
    total = torch.zeros((), device=device)

    def take() -> None:
        keys = torch.stack([members, epoch.expand(len(members))], dim=1)
        images, targets = augment(pixels[members], labels[members], keys)
        with torch.autocast(device.type, torch.bfloat16, enabled=captures, cache_enabled=False):
            logits = model(images).logits
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=SMOOTHING)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total.add_(loss.detach())

    a_epoch = len(labels) // job.rows
    steps, losses, graph = epochs * a_epoch, [], None
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if step % a_epoch == 0:
            order = torch.randperm(len(labels))
            epoch.fill_(step // a_epoch)
        at = step % a_epoch * job.rows
        members.copy_(order[at : at + job.rows])
        lr.fill_(job.rate(step, steps))
        if captures and step == 3:  # after ordinary steps, which allocate the state
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                take()
        if graph is None:
            take()
        else:
            graph.replay()
        if (step + 1) % max(1, steps // 10) == 0:
            losses.append(round(float(total) / max(1, steps // 10), 4))
            total.zero_()
    return {"losses": losses, "accuracy": accuracy(model, data.test, job.rows, device)}


@torch.no_grad()
def accuracy(model: Any, images: tuple[Tensor, Tensor], rows: int, device: torch.device) -> float:
    model.eval()
    right = 0
    for pixels, labels in zip(*(part.split(rows) for part in images), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right += int((model(normalized(pixels)).logits.argmax(-1) == labels).sum())
    return round(100 * right / len(images[1]), 2)


def trainer(job: Job, shape: Shape, sources: dict[str, str], epochs: int, folder: Path) -> dict[str, Any]:
    """Train as `kilolayer train` does."""
    table, share = load(CONFIG), 0.02 if shape.size == Shape.size else 0.3
    table["model"] |= {
        "layers": shape.layers,
        "dim": shape.dim,
        "heads": shape.heads,
        "ffn_dim": 4 * shape.dim,
        "drop_path": 0.0,
    }
    table["model"] |= {"recipe": {"name": job.system.partition(":")[2]}, "image": {"patch": shape.patch}}
    table["images"] = {**sources, "valid_share": share, "size": shape.size, "rows": job.rows}
    table["augment"] = AUGMENTS[job.augment]
    table["train"] = {"epochs": epochs, "lr": float(job.lr), "warmup_share": WARMUP, "average": 1, "keep": 1}
    shutil.rmtree(folder, ignore_errors=True)
    run = kl.train(table, run=folder)
    losses = [row["loss"] for row in run.metrics("train")]
    tenth = max(1, len(losses) // 10)
    means = [round(sum(losses[at : at + tenth]) / tenth, 4) for at in range(0, tenth * 10, tenth) if losses[at : at + tenth]]
    return {"losses": means, "accuracy": round(run.scores()["test"]["accuracy"]["value"], 2)}


def run(name: str, epochs: int, out: Path, kind: str) -> tuple[str, dict[str, Any]]:
    """One job, in a process of its own; one that fails has the reason."""
    try:
        return name, trained(name, epochs, out, kind)
    except Exception as error:  # the others go on
        return name, {**asdict(Job.of(name)), "epochs": epochs, "error": f"{type(error).__name__}: {error}"[:500]}


def trained(name: str, epochs: int, out: Path, kind: str) -> dict[str, Any]:
    job, began = Job.of(name), time.monotonic()
    shape = SHAPES[kind]
    if kind == "small":
        torch.set_num_threads(1)
    if kind == "tiny":
        sources = {part: str(out / "drawn" / part) for part in ("train", "test")}
    else:
        archive = Path(os.environ["KILOLAYER_DATA"]).resolve() / "cifar10" / "cifar10_jpeg.tar.xz"
        sources = {part: f"{archive}:{part}" for part in ("train", "test")}
    if job.system.startswith("trainer:"):
        found = trainer(job, shape, sources, epochs, out / name.replace(":", "-"))
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = Data.read(sources, shape.size, out / "cache", device)
        found = neutral(job, shape, data, epochs, device)
    return {**asdict(job), "epochs": epochs, **found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--small", dest="kind", action="store_const", const="small", default="usual")
    parser.add_argument("--tiny", dest="kind", action="store_const", const="tiny")
    options = parser.parse_intermixed_args()
    out, deadline = options.out.resolve(), time.monotonic() + options.seconds
    out.mkdir(parents=True, exist_ok=True)
    if options.kind == "tiny" and not (out / "drawn").exists():
        drawn_images(out / "drawn", 16, {"train": 24, "test": 6})
    path = out / "parity.json"
    rows: dict[str, Any] = json.loads(path.read_text())["runs"] if path.exists() else {}
    usual = SMALL if options.kind == "small" else USUAL
    job = partial(run, epochs=options.epochs, out=out, kind=options.kind)
    flags = "" if options.kind == "usual" else f" --{options.kind}"
    command = f"python benchmarks/vision/parity.py OUT --epochs {options.epochs}{flags}"
    waiting = [name for name in options.names or usual if rows.get(name, {}).get("accuracy") is None]
    workers, pace = Workers(options.parallel, deadline), 0.0
    running: dict[Future[tuple[str, dict[str, Any]]], tuple[str, ProcessPoolExecutor]] = {}
    while running or (waiting and time.monotonic() + pace < deadline):
        while waiting and time.monotonic() + pace < deadline and (worker := workers.take(0)) is not None:
            name = waiting.pop(0)
            running[worker.submit(job, name)] = name, worker
        for done in wait(running, timeout=5.0, return_when=FIRST_COMPLETED).done:
            name, worker = running.pop(done)
            try:
                _, rows[name] = done.result()
                workers.idle.put(worker)
            except BrokenProcessPool:
                rows[name] = {**asdict(Job.of(name)), "epochs": options.epochs, "error": "its process ended"}
                workers.add()
            pace = rows[name].get("seconds", pace)
            print(json.dumps({name: rows[name]}), flush=True)
            device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            made_with = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
            write(path, json.dumps({"command": command, "made_with": made_with, "runs": rows}, indent=1))
        if workers.end_late():
            break
    workers.kill()
    sys.stdout.flush()
    os._exit(0)  # the executors would wait for processes that were killed


if __name__ == "__main__":
    main()
