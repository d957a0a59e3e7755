"""A step of a model in shards beside one of the whole model, on one GPU.

python benchmarks/shards/run.py OUT [step memory plan] [--tiny]

`step`: 100L-100L as in benchmarks/speed, and a wide decoder of 24 layers, d 2048. One process shares the model with itself over
NCCL, so that everything is gathered and divided and nothing is sent; and the first of eight processes that PyTorch's fake
process group simulates gets copies of its own rows: what sharding costs the host and the GPU apart from a network. "kept": what
is gathered for the forward pass is kept for the backward pass. Kernels of 0.1 ms per step are listed. `memory`: 500L-500L with
d 1024 on the first of eight: values are meaningless, memory is right. `plan`: what `kilolayer plan` says of the same.
Writes OUT/results.json after each row, beside the rows that are in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from batch import PAD, batch
from jobs import Setting
from ours import model_config
from run_pool import versions

from kilolayer.data.batches import Batch
from kilolayer.data.windows import TextBatch
from kilolayer.models import shards
from kilolayer.models.model import Model
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.optimizers.registry import get
from kilolayer.parallel.peers import Peers
from kilolayer.parallel.processes import Processes
from kilolayer.runs.budget import Work, budget
from kilolayer.runs.division import Division
from kilolayer.runtime.recorder import Recorder
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.placement import Placement
from kilolayer.training.step import Stepper

DEEP = Setting("translation", 100, 16, 256, 512, 8, 2048, 32_000, dropout=0.1)
WIDE = Setting("language", 24, 8, 1024, 2048, 16, 8192, 32_000, dropout=0.1)
THOUSAND = Setting("translation", 500, 16, 256, 1024, 16, 4096, 32_000, dropout=0.1)
TINY = Setting("translation", 2, 2, 8, 32, 2, 64, 50, dropout=0.1)
UNITS = {"deep": 10, "wide": 1}
"""Layers in a unit beside units of one layer."""
WARM, TIMED, PROFILED = 6, 12, 3


def measure(
    setting: Setting, processes: Processes, device: torch.device, steps: tuple[int, int] = (WARM, TIMED), **train: Any
) -> dict[str, Any]:
    """The time of a step and the memory that it needs; what the trainer says tells whether steps are recorded.

    steps: before the first one that is timed, and timed; the kernels of some more are listed if any is.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    usual = {"optimizer": "adamw", "weight_decay": 0.01, "precision": "bf16", "label_smoothing": 0.0}
    config = TrainConfig(**usual | train)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    kinds = {"shard": config.shard, "unit": config.shard_unit, "reshards": config.reshard_after_forward, "dtype": dtype}
    placement = Placement(model_config(setting), processes, device, 1, **kinds)
    model, said = placement.model.train(), list[str]()
    precise = model.cast_weights(dtype) if dtype is not None and isinstance(model, Model) else None
    sums = processes.size > 1 or device.type == "cpu"
    optimizer = make_optimizer(model, config, precise, sums=sums, runtime=FAST)
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), device, said.append, processes=processes, runtime=FAST)
    source, target, labels = batch(setting, torch.device("cpu"))
    tokens = int((labels != PAD).sum())
    read = Batch(source, target, labels, tokens) if setting.task == "translation" else TextBatch(target, labels, tokens)
    before, losses = time.perf_counter(), list[float]()
    for _ in range(steps[0]):
        losses.append(stepper.step([read], 1e-4).loss)
    started = time.perf_counter() - before
    times = []
    for _ in range(steps[1]):
        wait(device)
        before = time.perf_counter()
        losses.append(stepper.step([read], 1e-4).loss)
        wait(device)
        times.append((time.perf_counter() - before) * 1e3)
    recorder: Any = stepper.recorder
    found = {
        "ms": round(median(times), 2) if times else None,
        "recorded": type(recorder) is not Recorder and bool(recorder.recordings),
        "first_steps_seconds": round(started, 1),
        "losses": [round(loss, 5) for loss in losses],
        "said": said,
    }
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if times:
            found["kernels"] = kernels(lambda: stepper.step([read], 1e-4))
    return found


def kernels(step: Callable[[], Any]) -> dict[str, list[float]]:
    """The milliseconds and the number of calls per step of each kernel that takes 0.1 ms or more."""
    times, calls = dict[str, float](), Counter[str]()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    for event in profiled.events() or ():
        if event.device_type == DeviceType.CUDA:
            name = event.name[:100]
            times[name] = times.get(name, 0.0) + event.device_time / 1e3 / PROFILED
            calls[name] += 1
    slowest = sorted(times, key=lambda name: -times[name])
    return {name: [round(times[name], 3), round(calls[name] / PROFILED, 1)] for name in slowest if times[name] >= 0.1}


def gather_own(output: Tensor, own: Tensor, **_options: Any) -> None:
    """All processes have the rows of this one."""
    output.view(-1, own.numel()).copy_(own.expand(len(output) // own.numel(), -1))


def scatter_own(output: Tensor, whole: Tensor, **_options: Any) -> None:
    """All processes have the gradient of this one."""
    torch.sum(whole.view(-1, output.numel()), 0, out=output)


def measured(*given: Any, **train: Any) -> dict[str, Any]:
    """`measure`, or why it failed: a row that does not fit must not end the others."""
    try:
        return measure(*given, **train)
    except Exception as error:
        return {"fault": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", default=["step", "memory", "plan"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = options.out / "results.json"
    made = {"command": "python benchmarks/shards/run.py OUT", "made_with": versions(), "rows": {}}
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else made

    def keep(name: str, row: dict[str, Any]) -> None:
        found["rows"][name] = row
        print(name, json.dumps(row), flush=True)
        rows = ",\n".join(f"  {json.dumps(each)}: {json.dumps(value)}" for each, value in found["rows"].items())
        path.write_text(json.dumps(found | {"rows": {}}, indent=1).replace("{}", f"{{\n{rows}\n }}") + "\n")

    settings = {name: TINY if options.tiny else each for name, each in (("deep", DEEP), ("wide", WIDE))}
    units = dict.fromkeys(UNITS, 2) if options.tiny else UNITS
    if "step" in options.parts:
        for name, setting in settings.items():
            for eager in (False, True):
                keep(f"{name}, whole{', eager' * eager}", measured(setting, Processes(), device, eager=eager))
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        one = Processes(dist.group.WORLD)
        if device.type == "cuda":
            everyone: Any = dist.new_group(backend="nccl")
            one.group = Peers.of(everyone)
        # One process would divide its gradients by 1 in a pass of its own, which several do not.
        with patch.object(FSDPModule, "set_gradient_divide_factor"):
            for name, setting in settings.items():
                for unit in sorted({1, units[name]}):
                    keep(f"{name}, units of {unit}", measured(setting, one, device, shard="full", shard_unit=unit))
                kept = {"shard": "full", "shard_unit": units[name], "reshard_after_forward": False}
                keep(f"{name}, units of {units[name]}, kept", measured(setting, one, device, **kept))
        dist.destroy_process_group()
    if "step" in options.parts or "memory" in options.parts:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    if "step" in options.parts:
        with patch.multiple(shards, ALL_GATHER=gather_own, REDUCE_SCATTER=scatter_own):
            for name, setting in settings.items():
                for reshards in (True, False):
                    train = {"shard": "full", "shard_unit": units[name], "reshard_after_forward": reshards}
                    row = measured(setting, Processes(dist.group.WORLD), device, **train)
                    keep(f"{name}, first of 8, units of {units[name]}{'' if reshards else ', kept'}", row)
    if "memory" in options.parts:
        setting = TINY if options.tiny else THOUSAND
        for recompute in ("layer", "selective"):
            row = measured(setting, Processes(dist.group.WORLD), device, (3, 1), shard="full", recompute=recompute)
            row.pop("kernels", None)
            keep(f"thousand, first of 8, recompute {recompute}", row)

    if "plan" in options.parts:
        setting = TINY if options.tiny else THOUSAND
        work = Work(setting.rows, setting.length, precision="bf16")
        training = budget(model_config(setting), work, get("adamw"), division=Division(8, "full")).training
        keep("thousand, planned", {"peak_gib": round(training.peak_recomputed / 2**30, 2)})


if __name__ == "__main__":
    main()
