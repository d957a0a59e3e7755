"""Time `kl.fast` and `kl.record` in a user's own training loop, and the validation of a very deep model.

    PYTHONPATH=src python benchmarks/speed/forms.py OUT
    PYTHONPATH=src python benchmarks/speed/forms.py OUT --jobs "translation 24L-24L, fast" "translation 24L-24L, recorded"

The loop is one that a user would write: matrices in bf16, cross-entropy in fp32, torch's fused AdamW directly on the weights
(no fp32 copies), dropout 0.1. It runs the plain model, the plain model with torch.compile around each layer, the fast form, and
the fast form with its step recorded. A validation batch runs in the training form, eagerly and recorded. Times are medians of
wall-clock time between GPU synchronizations. Processes prepare in parallel and measure alone; each result is written to
OUT/forms.jsonl immediately, and the run made from these lines is added to OUT/forms.json; earlier runs stay in it, unless the
last one measured all that they did.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo.utils
from batch import batch
from jobs import LANGUAGE, TRANSLATION, Job, deep, tiny
from ours import model_config
from torch import Tensor, nn
from workers import Lines, Trial, groups, read_lines, run, versions

import kilolayer as kl
from kilolayer.layers.modules import in_mode
from kilolayer.runtime.recorder import WorkItem
from kilolayer.speed.recorded_step import RecordedStep
from kilolayer.speed.runtime import FAST

WARM, TIMED, TOGETHER = 4, 12, 6
SHORT, DEEP, TEXT = (replace(each, dropout=0.1) for each in (deep(24), TRANSLATION, LANGUAGE))
JOBS = [
    Job("validation 500L-500L", "validation", "fast", deep(500), 30),
    Job("translation 24L-24L, fast", "loop", "fast", SHORT, 10),
    Job("translation 24L-24L, plain", "loop", "plain", SHORT, 10),
    Job("translation 24L-24L, compiled", "loop", "compiled", SHORT, 10),
    Job("translation 24L-24L, recorded", "loop", "recorded", SHORT, 10),
    Job("translation 100L-100L, plain", "loop", "plain", DEEP, 30),
    Job("translation 100L-100L, fast", "loop", "fast", DEEP, 28),
    Job("translation 100L-100L, recorded", "loop", "recorded", DEEP, 28),
    Job("language model 24L, plain", "loop", "plain", TEXT, 52),
    Job("language model 24L, fast", "loop", "fast", TEXT, 54),
    Job("language model 24L, compiled", "loop", "compiled", TEXT, 56),
    Job("language model 24L, recorded", "loop", "recorded", TEXT, 56),
]


def loop(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    """A training step of a loop that a user would write."""
    setting = job.setting
    model = kl.build_model(model_config(setting), device=device, seed=1).train()
    model.cast_weights(torch.bfloat16)
    source, target, labels = batch(setting, device)
    inputs = (source, target) if setting.task == "translation" else (target,)
    cuda = device.type == "cuda"
    options: dict[str, Any] = {"lr": 1e-5, "fused": cuda}
    if job.system == "recorded" and cuda:
        options |= {"lr": torch.tensor(1e-5, device=device), "capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    form: nn.Module = kl.fast(model) if job.system in ("fast", "recorded") else model
    if job.system == "compiled":
        for stack in model.stacks():
            for index, block in enumerate(stack.blocks):
                stack.blocks[index] = torch.compile(block)  # pyright: ignore[reportArgumentType]

    def step(*parts: Tensor) -> Tensor:
        *read, wanted = parts
        loss = nn.functional.cross_entropy(form(*read).logits.flatten(0, 1).float(), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run_step = kl.record(step, form, optimizer) if job.system == "recorded" else step
    parts = (*inputs, labels)
    warm = warmed(lambda: run_step(*parts))
    if isinstance(run_step, RecordedStep) and cuda and not run_step.recorder.recordings:
        raise RuntimeError("no step was recorded")
    yield {"warm_s": warm, "graphs": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)}
    yield {"ms": timed(lambda: run_step(*parts)), **memory(device), "loss": float(run_step(*parts))}


def validation(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    """A validation batch in the training form; its time is that of the recorded one."""
    model = kl.build_model(model_config(job.setting), device=device, seed=1)
    model.cast_weights(torch.bfloat16)
    form, recorder = FAST.training_form(model, device, print, eager=False, recompute="none")
    parts = batch(job.setting, torch.device("cpu"))
    there = tuple(part.to(device) for part in parts)

    def nll(source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return FAST.token_losses(form(source, target).logits, labels, 0.0)[1]

    def plainly() -> float:
        return float(nll(*there))

    def recorded() -> float:
        return float(recorder.run([WorkItem("nll", nll, parts)], restart=lambda: True))

    with in_mode(form, training=False), torch.inference_mode():
        yield {"unrecorded_warm_s": warmed(plainly), "warm_s": warmed(recorded)}
        yield {"unrecorded_ms": timed(plainly), "ms": timed(recorded), "nll": [plainly(), recorded()], **memory(device)}


def warmed(work: Callable[[], Any]) -> float:
    """Seconds taken by the calls that compile and record."""
    started = time.perf_counter()
    for _ in range(WARM):
        work()
    wait()
    return round(time.perf_counter() - started, 1)


def timed(work: Callable[[], Any]) -> float:
    """The median time of a call in milliseconds."""
    each = []
    for _ in range(TIMED):
        wait()
        started = time.perf_counter()
        work()
        wait()
        each.append((time.perf_counter() - started) * 1e3)
    return round(median(each), 2)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory(device: torch.device) -> dict[str, float]:
    return {"gigabytes": round(torch.cuda.max_memory_allocated() / 2**30, 2)} if device.type == "cuda" else {}


def write(out: Path) -> None:
    """Add the run in the folder `out` to forms.json; runs all of whose jobs it has measured are removed."""
    about, lines = read_lines(out / "forms.jsonl")
    found = {line["job"]: dict(line["facts"]) for line in lines}
    hardware = [facts.pop("hardware") for facts in found.values() if "hardware" in facts]
    run = {**about, "hardware": hardware[0] if hardware else "unknown hardware", "found": found}
    path = out / "forms.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [each for each in runs if not each["found"].keys() <= found.keys()]
    path.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="The fast form in a custom training loop, and a recorded validation.")
    parser.add_argument("out", type=Path, help="folder for forms.jsonl and forms.json, and log.txt if something failed")
    parser.add_argument("--seconds", type=float, default=300, help="stop after this many seconds, ending what is running")
    parser.add_argument("--jobs", nargs="+", metavar="JOB", choices=[job.name for job in JOBS], help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test every code path")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    words = ["OUT" if word == str(options.out) else word for word in sys.argv[1:]]
    about = {
        "command": shlex.join(["PYTHONPATH=src", "python", "benchmarks/speed/forms.py", *words]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    lines = Lines(options.out / "forms.jsonl", about)
    jobs = [job for job in JOBS if options.jobs is None or job.name in options.jobs]
    trials = [Trial(tiny(job) if options.tiny else job) for job in jobs]
    for trial, facts, said in run(groups(trials, TOGETHER), end):
        lines.add(trial, facts, said)
        write(options.out)


if __name__ == "__main__":
    main()
