"""What runs need and what this machine has: as many runs are trained at once as fit into its memory and cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.runs.budget import Budget, Work, budget
from kilolayer.runs.run import choose_device, choose_precision
from kilolayer.tasks.config import RunConfig

PROCESS = {"cpu": 600 << 20, "cuda": 3 << 29}
"""Bytes of a process without its model: torch and the data; on a GPU its context, libraries and CUDA graphs."""
SPARE = {"cpu": 2.0, "cuda": 1.3}
"""Factor on the planned bytes: the CPU does not fuse operations, and allocators hold unused memory."""
MEMORY = "import json, torch; print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]))"
CGROUP = Path("/sys/fs/cgroup")
BYTES_VOCABULARY = 260
MPS, MPS_SOCKETS = "nvidia-cuda-mps-control", "/tmp/nvidia-mps"
"""The command that starts NVIDIA's multi-process service, and the folder in which it listens unless told otherwise."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables from which torch takes its number of threads; the second overrides the first in MKL's products."""


@dataclass(frozen=True)
class Demand:
    """What a run needs: a kind of device, bytes on it, and the FLOPs of all its steps; the longest runs are started first."""

    kind: str
    memory: float
    flops: float


@dataclass
class Device:
    """A GPU or the CPU. free: bytes, None if not known; demands: those of the runs on it, by name."""

    kind: str
    free: float | None
    environment: dict[str, str] = field(default_factory=dict)
    demands: dict[str, Demand] = field(default_factory=dict)

    def holds(self, demand: Demand) -> bool:
        """Whether there is room for one more run. A run that is too large for the device is tried alone."""
        if demand.kind != self.kind:
            return False
        used = sum(each.memory for each in self.demands.values())
        return not self.demands or self.free is None or used + demand.memory <= self.free


def demand_of(config: RunConfig, known: dict[tuple[object, ...], Budget] | None = None) -> Demand:
    """What a run needs, according to its plan. known: a cache of plans, which is updated."""
    kind = choose_device(config.train.device).type
    usual = config.usual_batch(None)
    precision = "bf16" if choose_precision(config.train) == "bf16" else "fp32"
    work = Work(usual.rows, usual.length, 1, precision, usual.scored)
    model = config.model
    tokenizer = getattr(config, "tokenizer", None)
    if config.own_model is None and isinstance(tokenizer, TokenizerConfig) and model.vocab_size is not None:
        size = BYTES_VOCABULARY if tokenizer.of_bytes else tokenizer.size
        model = replace(model, vocab_size=size) if model.source_vocab_size is None else model
    known = {} if known is None else known
    key = (repr(model), work)
    cost = known.get(key) or known.setdefault(key, budget(model, work))
    training = cost.training
    peak = training.peak_recomputed if config.train.recompute == "layer" else training.peak
    tokens = work.batch * work.length * config.train.accumulate * config.train.steps
    return Demand(kind, PROCESS[kind] + SPARE[kind] * peak, cost.training_flops_per_token * tokens)


def devices_for(kinds: set[str]) -> list[Device]:
    """The devices of these kinds on this machine, with the memory that is free now."""
    return [*(_gpus() if "cuda" in kinds else ()), *([Device("cpu", free_memory())] if "cpu" in kinds else ())]


def cores() -> int:
    """The number of CPU cores that this process may use."""
    with suppress(AttributeError):  # not available on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> float | None:
    """Bytes of memory that are free for new processes, within the limit of a container if there is one; None if not known."""
    found: list[float] = []
    with suppress(OSError, ValueError, IndexError):
        lines = meminfo.read_text().splitlines()
        found += [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # the file contains "max" if there is no limit
        limit, used = (float((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        found.append(limit - used + float(cached.get("inactive_file", 0)))
    return min(found, default=None)


def _gpus() -> list[Device]:
    """The GPUs, queried in a separate process because a query takes GPU memory."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False)
    free: list[float] = json.loads(done.stdout) if done.returncode == 0 else []
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named if len(named) == len(free) else [str(index) for index in range(len(free))]
    several = len(free) > 1
    return [
        Device("cuda", bytes_free, {"CUDA_VISIBLE_DEVICES": name} if several else {})
        for name, bytes_free in zip(names, free, strict=True)
    ] or [Device("cuda", None)]


def takes_turns() -> bool:
    """Whether runs that share a GPU take turns on it, though NVIDIA's multi-process service could be started."""
    sockets = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS_SOCKETS))
    return shutil.which(MPS) is not None and not (sockets / "control").exists()


def threads_of(parallel: int) -> Mapping[str, str]:
    """The environment variables that divide the cores among this many processes; none if the user has set one of them."""
    if any(os.environ.get(name) for name in THREADS):
        return {}
    return dict.fromkeys(THREADS, str(max(1, cores() // max(1, parallel))))
