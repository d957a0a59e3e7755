"""A training loop that belongs to neither library: torch's Adam, fp32 weights under bf16 autocast, the same batches for both.

On a GPU each batch shape is captured once as a CUDA graph, forward to update, so that Python takes no time; the models of both
libraries run in it as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models import PAD, Size, System
from torch import Tensor, nn

Parts = tuple[Tensor, Tensor, Tensor]
"""Source, target and labels: int64 [rows, length] each."""
SMOOTHING, BETAS, EPS = 0.1, (0.9, 0.98), 1e-8


@dataclass(frozen=True)
class Job:
    """One run. warmup: steps, of `steps`; the rate then falls linearly to 0."""

    system: System
    layers: int
    lr: float
    seed: int = 1
    steps: int = 1000
    warmup: int = 400

    @property
    def name(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.system.options.items())
        positions = "" if self.system.positions == "sinusoidal" else f" {self.system.positions}"
        return f"{self.system.library} {self.system.method}{options}{positions} {self.layers}L lr{self.lr:g} seed{self.seed}"

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        return self.lr * (self.steps - step) / (self.steps - self.warmup)


@dataclass(frozen=True)
class Data:
    """Batches of fixed shapes that were made once: for training, by seed, and for validation."""

    vocabulary: int
    train: dict[int, list[Parts]]
    valid: list[Parts]

    @classmethod
    def load(cls, path: Path) -> Data:
        found = torch.load(path, weights_only=True)
        return cls(found["vocabulary"], found["train"], found["valid"])

    def save(self, path: Path) -> None:
        torch.save(asdict(self), path)


class Step:
    """Forward, backward and update of a batch; on a GPU one captured graph for each shape."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.captures = device.type == "cuda"
        self.lr = torch.zeros((), device=device)
        self.optimizer = torch.optim.Adam(model.parameters(), self.lr, BETAS, EPS, capturable=self.captures)
        self.graphs: dict[tuple[int, ...], tuple[Parts, torch.cuda.CUDAGraph]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None

    def run(self, parts: Parts, lr: float) -> None:
        self.lr.fill_(lr)
        if not self.captures:
            self._take(parts)
            return
        shape = (*parts[0].shape, *parts[1].shape)
        if shape not in self.graphs:
            self._take(parts)  # the first batch of each shape is an ordinary step
            self.optimizer.zero_grad(set_to_none=True)
            held = parts[0].clone(), parts[1].clone(), parts[2].clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self._take(held)
            self.graphs[shape] = (held, graph)
            return
        held, graph = self.graphs[shape]
        for mine, given in zip(held, parts, strict=True):
            mine.copy_(given)
        graph.replay()

    def _take(self, parts: Parts) -> None:
        source, target, labels = parts
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.captures, cache_enabled=False):
            logits = self.model(source, target)
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=SMOOTHING
        )
        (losses / (labels != PAD).sum()).backward()
        self.optimizer.step()


def train(job: Job, data: Data, size: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Train and validate; returns the validation losses, and what the right source is worth at the end."""
    began = time.monotonic()
    torch.manual_seed(job.seed)
    with device:
        model = job.system.build(Size(job.layers, data.vocabulary, **size)).to(device)
        step = Step(model, device)
        batches = _endless(data.train[job.seed], device)
        valid: list[tuple[int, float]] = []
        for number in range(1, job.steps + 1):
            step.run(next(batches), job.rate(number))
            if number % (job.steps // 5) == 0:
                valid.append((number, round(nll(model, data.valid, device), 4)))
        others: list[Parts] = [(source.roll(len(source) // 2, 0), target, labels) for source, target, labels in data.valid]
        gain = nll(model, others, device) - valid[-1][1]
    return {
        "library": job.system.library,
        "method": job.system.method,
        "options": job.system.options,
        "positions": job.system.positions,
        "layers": job.layers,
        "lr": job.lr,
        "seed": job.seed,
        "loss": valid[-1][1],
        "source_gain": round(gain, 4),
        "valid": valid,
        "seconds": round(time.monotonic() - began, 1),
    }


@torch.no_grad()
def nll(model: nn.Module, batches: list[Parts], device: torch.device) -> float:
    """The mean negative log-likelihood per target token."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        source, target, labels = (part.to(device) for part in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            logits = model(source, target)
        total += float(F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum"))
        tokens += int((labels != PAD).sum())
    model.train()
    return total / tokens


def _endless(batches: list[Parts], device: torch.device) -> Iterator[Parts]:
    while True:
        for batch in batches:
            source, target, labels = (part.to(device, non_blocking=True) for part in batch)
            yield source, target, labels
