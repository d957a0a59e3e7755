"""Run one job in a separate process: prepare, report it, wait for a line on stdin, and measure. Started by workers.py."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo.utils
from jobs import Job, Setting
from torch.profiler import ProfilerActivity, profile

import kilolayer

Step = Callable[[], Any]
# Kernels of the optimizer, and of the gradient norms.
UPDATE = ("_update", "_add_squares")


def training(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    """Run single steps until everything is compiled and recorded; then time steps on the device, end to end."""
    from systems import SYSTEMS

    step = SYSTEMS[job.system](job.setting, device)
    first = [_seconds(step, device) for _ in range(job.warm)]
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    if job.system.endswith("compiled") and not graphs:
        raise RuntimeError("torch.compile has compiled nothing")  # it silently skips what it does not support
    yield {"first_s": first[0], "warm_steps_s": _rounded(first), "graphs": graphs}
    marks, loss = [_mark(device)], math.nan
    for _ in range(job.timed):
        loss = step()
        marks.append(_mark(device))
    _wait(device)
    all_ms = [_ms(before, after) for before, after in pairwise(marks)]
    ms = median(all_ms)
    facts: dict[str, Any] = {
        "ms": ms,
        "all_ms": _rounded(all_ms),
        "ms_per_layer": ms / job.setting.layers,
        "tokens_per_s": job.setting.tokens / ms * 1e3,
        "tflops": job.setting.flops / ms / 1e9,
        "compile_s": first[0] - ms / 1e3,
        "loss": float(loss),
    }
    if not math.isfinite(facts["loss"]):
        raise FloatingPointError(f"the loss is {facts['loss']}")
    if device.type == "cuda":
        facts["gigabytes"] = torch.cuda.max_memory_allocated() / 2**30
        facts["reserved_gigabytes"] = torch.cuda.max_memory_reserved() / 2**30
    yield facts
    if job.profile is not None:
        table, update_ms = _profile(step, device)
        yield {"profile": table, "update_ms": update_ms, "model_ms": ms - update_ms}


def product(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    """The rate of a product of two matrices [8192, 8192] in bf16: an upper bound for a model's products."""
    size = 8192 if device.type == "cuda" else 64
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    yield {}
    for _ in range(500 if device.type == "cuda" else 5):  # most of a second, because an idle GPU is slow at first
        torch.matmul(left, right)
    _wait(device)
    marks = [_mark(device)]
    for _ in range(50):
        torch.matmul(left, right)
        marks.append(_mark(device))
    _wait(device)
    ms = median(_ms(before, after) for before, after in pairwise(marks))
    yield {"ms": ms, "tflops": 2 * size**3 / ms / 1e9}


def decoding(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    from decoding import decoding

    return decoding(job, device)


def loop(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    from forms import loop

    return loop(job, device)


def validation(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    from forms import validation

    return validation(job, device)


def _profile(step: Step, device: torch.device) -> tuple[str, float]:
    """The 50 kernels that take most of a step, and the milliseconds of those that clip and update."""
    with profile(activities=[getattr(ProfilerActivity, device.type.upper())]) as profiler:
        step()
        _wait(device)
    events = profiler.key_averages()
    update = sum(event.self_device_time_total for event in events if event.key.startswith(UPDATE)) / 1e3
    return events.table(sort_by=f"self_{device.type}_time_total", row_limit=50, max_name_column_width=90), update


def _seconds(step: Step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _mark(device: torch.device) -> Any:
    """A time stamp on the device's clock."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(before: Any, after: Any) -> float:
    return (after - before) * 1e3 if isinstance(before, float) else before.elapsed_time(after)


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


KINDS = {"training": training, "product": product, "decoding": decoding, "loop": loop, "validation": validation}


def without(names: tuple[str, ...]) -> AbstractContextManager[Any]:
    """Disable some of our kernels while layers are built, compiled and run."""
    if not names:
        return nullcontext()
    from kilolayer.speed.operators import kernels

    return kernels.disabled(*names)


def main() -> None:
    order = json.loads(sys.argv[1])
    parts = order["job"] | {"setting": Setting(**order["job"]["setting"]), "left_out": tuple(order["job"]["left_out"])}
    job = Job(**parts)
    if order["package"] not in kilolayer.__file__:
        raise ImportError(f"kilolayer is {kilolayer.__file__} and not under {order['package']}")
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    hardware = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    facts: dict[str, Any] = {"hardware": hardware}
    report = Path(order["report"])
    with without(job.left_out):
        for part, found in enumerate(KINDS[job.kind](job, device)):
            if part == 0:
                facts["ready_s"] = time.time() - order["started"]
            beside = report.with_suffix(".part")
            beside.write_text(json.dumps(facts := facts | found))
            beside.replace(report)
            if part == 0:
                sys.stdin.readline()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would take seconds to release everything


if __name__ == "__main__":
    main()
