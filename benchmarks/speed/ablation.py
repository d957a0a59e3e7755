"""What each of our kernels gains: a step with all of them, with none, and with each left out, on one GPU.

    PYTHONPATH=src python benchmarks/speed/ablation.py benchmarks/speed

Models have the widths and batches of the speed table but fewer layers (CASES), so that everything fits into a few minutes.
Costs that do not grow with depth, the loss and the best tokens, therefore have a larger part in these steps than in those of a
deep model. The update kernel is not included: it decides on the GPU whether a step is finite, and no step could be recorded
without it.

For each case, dropout and repetition, one process measures all variants in sequence, in a different order in each repetition;
each time with a new model, a reset compiler, and the recordings and their memory released. Processes prepare in parallel; while
one measures, all others are idle. Each result is written to OUT/ablation.jsonl immediately; OUT/ablation.json and
OUT/ablation.md are made from these lines, and from those that ablation.json has of earlier runs. `--tiny` tries every path on
any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from jobs import DECODED, LANGUAGE, SPARSE, TRANSLATION, Job, Setting, tiny
from workers import Lines, Trial, groups, read_lines, versions

TRAINED = ("residual_norm", "relu_product", "loss")
DECODES = ("residual_norm", "short_attention", "relu_product", "step_attention", "best_tokens")
ALL, NONE = "all kernels", "no kernel"
WORTH = 0.03
"""A kernel is removed if leaving it out costs less than this fraction, or no more than the spread of repetitions, in every
case."""
KEPT = {
    "relu_network": "without it a step of 100L-100L was 2.5%, and one of 256 x 64 tokens 2.2%, slower than before this work "
    "(before-no-masked-product.json), where 2% were allowed",
}
"""Kernels that are kept although the rule says to remove them, and why."""
PREPARE_SECONDS, MEASURE_SECONDS, COLD, WARM = 150.0, 60.0, 14.0, 8.0


@dataclass(frozen=True)
class Case:
    """A job and the kernels that apply to it; others are not left out individually."""

    job: Job
    kernels: tuple[str, ...]
    dropouts: tuple[float, ...] = (0.0, 0.1)


def training(name: str, setting: Setting, gigabytes: int) -> Job:
    return Job(name, "training", "kilolayer", setting, gigabytes)


def decoding(name: str, setting: Setting) -> Job:
    return Job(name, "decoding", "kilolayer", setting, 8, peer=False)


CASES = {
    "translator": Case(
        training("24L-24L, d 512, 64 x 64 tokens", replace(TRANSLATION, layers=24), 15),
        (*TRAINED, "relu_network", "short_attention"),
    ),
    "sub_ln": Case(
        training("24L-24L Sub-LN, d 512, 64 x 64 tokens", replace(TRANSLATION, layers=24, recipe="sub_ln"), 15),
        ("residual_norm", "inner_norm"),
    ),
    "language": Case(
        training("language model 12L, d 1024, 32 x 1,024 tokens", replace(LANGUAGE, layers=12), 45),
        (*TRAINED, "relu_network"),
    ),
    "sparse": Case(
        training("language model 4L, d 1024, 64 experts, 16 x 1,024 tokens", replace(SPARSE, layers=4), 40),
        (*TRAINED, "inner_norm", "grouped_norm"),
    ),
    # In bf16 torch's grouped_mm computes what group_sums would, on the GPUs that have it for bf16.
    "sparse-fp32": Case(
        training(
            "language model 4L, d 1024, 64 experts, 16 x 1,024 tokens, fp32", replace(SPARSE, layers=4, precision="fp32"), 70
        ),
        ("group_sums",),
    ),
    "decoding": Case(decoding("beam 5, 18L-18L, bf16", DECODED), DECODES, (0.0,)),
    "decoding-fp32": Case(
        decoding("beam 5, 18L-18L, fp32", replace(DECODED, precision="fp32")),
        ("residual_norm", "few_rows", "step_attention", "best_tokens"),
        (0.0,),
    ),
}


def label(left_out: tuple[str, ...] | list[str]) -> str:
    """The row label: all kernels, no kernel, or the one that is left out."""
    match left_out:
        case []:
            return ALL
        case [kernel]:
            return kernel
        case _:
            return NONE


def name_of(case: str, dropout: float) -> str:
    return f"{case}, dropout {dropout}"


def orders(case: Case, every: tuple[str, ...], chosen: list[str] | None = None) -> list[tuple[str, ...]]:
    """What is left out, in sequence: nothing, everything, each kernel that applies to the case. chosen: only these."""
    kernels = [name for name in case.kernels if chosen is None or name in chosen]
    return [(), *([every] if chosen is None else []), *((name,) for name in kernels)]


def trials(names: list[str], dropouts: list[float], repeat: int, small: bool) -> list[Trial]:
    """One for each case, dropout and repetition; those with the same dropout are adjacent, because they fit on the GPU
    together."""
    found = []
    for number in range(repeat):
        for dropout in dropouts:
            for name in names:
                if dropout not in CASES[name].dropouts:
                    continue
                job = CASES[name].job
                job = replace(tiny(job) if small else job, base=name, name=name_of(name, dropout))
                found.append(Trial(replace(job, setting=replace(job.setting, dropout=dropout)), repeat=number, cache="shared"))
    return found


class Measurer:
    """The process of a trial: for each variant it reports that it is ready, waits, measures, and waits again."""

    def __init__(self, trial: Trial, left_out: list[tuple[str, ...]], scratch: Path, threads: int) -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        self.trial, self.left_out = trial, left_out
        self.report, self.log = folder / "report.jsonl", folder / "log.txt"
        order = {"job": asdict(trial.job), "left_out": left_out, "report": str(self.report)}
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "TRITON_CACHE_DIR": str(scratch / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--measure", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )

    def reports(self) -> list[dict[str, Any]]:
        """Two for each variant: that it is ready, and the result."""
        if not self.report.exists():
            return []
        text = self.report.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait(self, count: int, until: float) -> bool:
        """Whether it has made `count` reports before the time `until`."""
        while len(self.reports()) < count:
            if self.process.poll() is not None:
                time.sleep(0.2)
                return len(self.reports()) >= count
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def resume(self) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def measure(order: dict[str, Any]) -> None:
    """In a separate process: measure all variants in sequence."""
    import torch
    from measure import KINDS, without

    job = Job(**order["job"] | {"setting": Setting(**order["job"]["setting"]), "left_out": ()})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with Path(order["report"]).open("a", buffering=1) as report:

        def send_and_wait(facts: dict[str, Any]) -> None:
            report.write(json.dumps(facts) + "\n")
            sys.stdin.readline()

        for names in order["left_out"]:
            torch.manual_seed(1)
            ready = False
            try:
                with without(tuple(names)):
                    parts = KINDS[job.kind](job, device)
                    facts = next(parts)
                    ready = True
                    send_and_wait({"ready": True})
                    facts = facts | next(parts)
                    parts.close()
            except Exception as error:
                facts = {"reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]}
                print(repr(error), flush=True)
            parts = None
            if not ready:
                send_and_wait({"ready": False})
            send_and_wait(facts | _release_memory(device))


def _release_memory(device: Any) -> dict[str, Any]:
    """Release the last model's memory; returns the gigabytes still in use, and the machine."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device.type != "cuda":
        return {"hardware": f"{os.uname().machine}, {os.cpu_count()} cores"}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"held_gigabytes": torch.cuda.memory_allocated() / 2**30, "hardware": torch.cuda.get_device_name()}


def run_group(
    group: list[Trial], every: tuple[str, ...], chosen: list[str] | None, scratch: Path, end: float
) -> Iterator[tuple[Trial, dict[str, Any], str]]:
    """In rounds: all prepare in parallel, each measures alone, and only then do all continue."""
    threads = max(1, (os.cpu_count() or 1) // len(group))
    workers = []
    try:
        for trial in group:
            case = CASES[trial.job.base]
            left_out = orders(case, every, chosen)
            first = trial.repeat * len(left_out) // 3 % len(left_out)
            workers.append(Measurer(trial, [*left_out[first:], *left_out[:first]], scratch, threads))
        for number in range(max(len(worker.left_out) for worker in workers)):
            taking_part = [worker for worker in workers if number < len(worker.left_out)]
            until = min(end, time.monotonic() + PREPARE_SECONDS)
            ready = [worker for worker in taking_part if worker.wait(2 * number + 1, until)]
            for worker in taking_part:
                job = replace(worker.trial.job, left_out=worker.left_out[number])
                if worker not in ready:
                    worker.end()
                    facts = {"reason": "not ready in time, or ended"}
                else:
                    worker.resume()
                    done = worker.wait(2 * number + 2, min(end, time.monotonic() + MEASURE_SECONDS))
                    facts = worker.reports()[2 * number + 1] if done else {"reason": "its measurement took too long"}
                yield replace(worker.trial, job=job), facts, worker.log.read_text(errors="replace")
            for worker in ready:
                worker.resume()
    finally:
        for worker in workers:
            worker.end()


Found = dict[str, dict[str, list[dict[str, Any]]]]


def summarize(lines: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """For each case and each variant: medians over repetitions, the cost of leaving out, and the spread.

    Cost: the median time without the kernel divided by that with all, minus 1. Spread: the larger of the two times' (largest -
    smallest) / median.
    """
    found: Found = {}
    for line in lines:
        cases = found.setdefault(line["job"], {})
        cases.setdefault(label(line["left_out"]), []).append(line["facts"])
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for job, kinds in found.items():
        whole = {kind: [facts for facts in all_facts if "ms" in facts] for kind, all_facts in kinds.items()}
        result[job] = {kind: _summary(every_time, whole.get(ALL, [])) for kind, every_time in whole.items() if every_time}
        for kind, all_facts in kinds.items():
            result[job].setdefault(kind, {"reason": all_facts[0].get("reason", "not measured")})
    return result


def _summary(without_it: list[dict[str, Any]], with_all: list[dict[str, Any]]) -> dict[str, Any]:
    times, all_times = ([facts["ms"] for facts in each] for each in (without_it, with_all))
    summary: dict[str, Any] = {"ms": median(times), "repetitions": len(times), "all_ms": times}
    memory = [facts["gigabytes"] for facts in without_it if "gigabytes" in facts]
    if memory:
        summary["gigabytes"] = median(memory)
    if all_times:
        summary["cost"] = median(times) / median(all_times) - 1
        summary["added_ms"] = median(times) - median(all_times)
        summary["spread"] = max((max(each) - min(each)) / median(each) for each in (times, all_times))
    return summary


def verdicts(summary: dict[str, dict[str, dict[str, Any]]], every: tuple[str, ...]) -> dict[str, str]:
    """For each kernel: kept if leaving it out costs enough in some case; goes if it does in no case to which it applies.

    stays: it would go, but there is another reason to keep it.
    went: this commit no longer has it.
    open: a case to which it applies was not measured at least twice, and the other cases do not justify keeping it.
    """
    from kilolayer.speed.operators import kernels

    found = {}
    for kernel in every:
        jobs = [name_of(name, each) for name, case in CASES.items() if kernel in case.kernels for each in case.dropouts]
        facts = [summary.get(job, {}).get(kernel, {}) for job in jobs]
        measured = [each for each in facts if "cost" in each and each["repetitions"] > 1]
        if any(each["cost"] >= WORTH and each["cost"] > each["spread"] for each in measured):
            found[kernel] = "kept"
        elif kernel not in kernels.NAMES:
            found[kernel] = "went"
        elif not jobs or len(measured) < len(jobs):
            found[kernel] = "open"
        else:
            found[kernel] = "stays" if kernel in KEPT else "goes"
    return found


def markdown(run: dict[str, Any], hardware: str, summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    every = tuple(run["kernels"])
    said = verdicts(summary, every)
    lines = [
        "# What each kernel gains",
        "",
        f"`{run['command']}` on {hardware}; " + ", ".join(f"{name} {each}" for name, each in run["versions"].items()) + ".",
        "Medians over repetitions, one process each, of the median step or, in decoding, the median search. Cost: the time",
        "without the kernel divided by that with all, minus 1. Spread: (largest - smallest) / median of the repetitions, with",
        f"all or without it, the larger. A kernel whose absence costs less than {WORTH:.0%}, or no more than the spread, in",
        "every case is removed (goes); one that has been removed since (went) is still shown.",
        "",
        *(f"{name} stays although the rule says to remove it: {KEPT[name]}.\n" for name in KEPT if said.get(name) == "stays"),
        *(f"- {name}: {case.job.name}" for name, case in CASES.items() if any(job.startswith(f"{name},") for job in summary)),
        "",
        "| kernel left out | case | ms | cost | added ms | spread | GB | repetitions | verdict |",
        "|---" * 9 + "|",
    ]
    for kind in (ALL, NONE, *every):
        for job, kinds in summary.items():
            if kind in kinds:
                cells = _cells(kinds[kind], is_base=kind == ALL)
                lines.append(f"| {kind} | {job} | {' | '.join(cells)} | {said.get(kind, '')} |")
    return "\n".join(lines) + "\n"


def _cells(facts: dict[str, Any], is_base: bool) -> list[str]:
    if "ms" not in facts:
        return [facts["reason"].replace("|", "/"), "-", "-", "-", "-", "0"]
    memory = f"{facts['gigabytes']:.1f}" if "gigabytes" in facts else "-"
    spread = f"{facts['spread']:.1%}" if "spread" in facts and facts["repetitions"] > 1 else "-"
    costs = ["-", "-"] if is_base or "cost" not in facts else [f"{facts['cost']:+.1%}", f"{facts['added_ms']:+.2f}"]
    return [f"{facts['ms']:.2f}", *costs, spread, memory, str(facts["repetitions"])]


def files_of(out: Path) -> list[Path]:
    """The files of lines, the oldest first: ablation-0.jsonl, ablation.jsonl, ablation-2.jsonl, ..."""
    return sorted(out.glob("ablation*.jsonl"), key=lambda path: int(path.stem.partition("-")[2] or 1))


def restore(out: Path) -> None:
    """Write the lines that ablation.json alone has, from runs whose files are gone, to ablation-0.jsonl."""
    document = out / "ablation.json"
    if not document.exists():
        return
    about = json.loads(document.read_text())
    known = [line for path in files_of(out) for line in read_lines(path)[1]]
    trials = [{key: value for key, value in line.items() if key != "run"} for line in about["trials"]]
    if missing := [line for line in trials if line not in known]:
        path = out / "ablation-0.jsonl"
        first = [] if path.exists() else [{"run": {key: about[key] for key in ("command", "versions", "kernels")}}]
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in (*first, *missing))


def write(out: Path) -> None:
    """Write ablation.json and ablation.md from the lines in the folder `out`, of one or several runs (ablation-2.jsonl,
    ...)."""
    restore(out)
    runs = [read_lines(path) for path in files_of(out)]
    run = {
        **runs[-1][0],
        "command": "; ".join(dict.fromkeys(each["command"] for each, _ in runs)),
        "kernels": list(dict.fromkeys(name for each, _ in runs for name in each["kernels"])),
    }
    lines = [{"run": number, **line} for number, (_, each) in enumerate(runs, 1) for line in each]
    every = tuple(run["kernels"])
    summary = summarize(lines)
    hardware = next((line["facts"]["hardware"] for line in lines if "hardware" in line["facts"]), "unknown hardware")
    document = {**run, "hardware": hardware, "verdicts": verdicts(summary, every), "cases": summary, "trials": lines}
    (out / "ablation.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "ablation.md").write_text(markdown(run, hardware, summary))


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description="The cost of leaving out each kernel.")
    parser.add_argument("out", type=Path, help="folder for ablation.jsonl, .json and .md, and log.txt if something failed")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--dropouts", type=float, nargs="+", choices=(0.0, 0.1), default=[0.0, 0.1])
    parser.add_argument(
        "--kernels", nargs="+", metavar="KERNEL", help="leave out only these, each in the cases to which it applies"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--together", type=int, default=5, help="maximum number of processes that prepare in parallel")
    parser.add_argument("--seconds", type=float, default=480, help="stop after this many seconds, ending what is running")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test every code path")
    parser.add_argument("--plan", action="store_true", help="print what would run and how long it may take, and exit")
    parser.add_argument("--table", action="store_true", help="rebuild the tables from the lines in OUT, and exit")
    options = parser.parse_args()
    if options.table:
        write(options.out)
        return
    from kilolayer.speed.operators import kernels

    every = tuple(kernels.NAMES)
    chosen = trials(options.cases, options.dropouts, options.repeat, options.tiny)
    waves = list(groups(chosen, options.together))
    counts = {name: len(orders(case, every, options.kernels)) for name, case in CASES.items()}
    rounds = [(wave[0].repeat, max(counts[each.job.base] for each in wave)) for wave in waves]
    seconds = sum(count * (COLD if number == 0 else WARM) for number, count in rounds)
    total = sum(counts[trial.job.base] for trial in chosen)
    print(f"{total} measurements in {len(chosen)} processes, {len(waves)} groups; about {seconds:.0f} s on a GPU", flush=True)
    if options.plan:
        return
    words = ["OUT" if Path(word) == options.out else word for word in sys.argv[1:]]
    about = {
        "command": shlex.join(["PYTHONPATH=src", "python", "benchmarks/speed/ablation.py", *words]),
        "versions": versions(),
        "kernels": every,
    }
    names = ("ablation.jsonl", *(f"ablation-{number}.jsonl" for number in range(2, 100)))
    lines = Lines(next(path for name in names if not (path := options.out / name).exists()), about)
    end = time.monotonic() + options.seconds
    scratch = Path(tempfile.mkdtemp())
    try:
        for wave in waves:
            if time.monotonic() > end:
                break
            for trial, facts, said in run_group(wave, every, options.kernels, scratch, end):
                lines.add(trial, facts, said)
                write(options.out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print((options.out / "ablation.md").read_text())


if __name__ == "__main__":
    main()
