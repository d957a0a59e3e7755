"""Compare the speed of Kilolayer with TorchScale, x-transformers, Hugging Face and torch.nn.Transformer on one GPU.

    sh benchmarks/speed/peers.sh PEERS
    PYTHONPATH=src:PEERS python benchmarks/speed/run.py benchmarks/speed
    PYTHONPATH=src:PEERS python benchmarks/speed/run.py OUT --rows 1 4 --variants dropout --systems kilolayer torchscale
    PYTHONPATH=src python benchmarks/speed/run.py OUT --before CHECKOUT --repeat 5 --rows 1

Each system, setting and variant is a separate process, whose result is written to OUT/jobs.jsonl as soon as it has ended. With
--before, only our own jobs run, each alternately with this package and that of another checkout of this repository, and
OUT/before.md compares the two. Otherwise OUT/results.json and OUT/results.md are written; rows and variants that this run does
not measure are left unchanged. `table.py` makes both from the lines of an interrupted run. `--tiny` tries every path on any
machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import before
import table
from jobs import ROWS, VARIANTS, Job, every_job, jobs_named, jobs_of, tiny
from workers import HERE, MEMORY, Lines, Trial, groups, run, versions

SYSTEMS = list(dict.fromkeys(job.system for job in every_job()))
TOGETHER = 6


def trials_beside_peers(jobs: list[Job], repeat: int, together: int) -> list[list[Trial]]:
    trials = [
        Trial(job, repeat=number, cache=job.name if job.alone else "shared", cold=job.alone)
        for number in range(repeat)
        for job in jobs
    ]
    return list(groups(trials, together))


def trials_before_and_after(jobs: list[Job], repeat: int, together: int, checkout: Path, cold: bool) -> list[list[Trial]]:
    """Our jobs with both packages alternately; which one is first changes from one repetition to the next.

    The first repetition of each compiles from an empty cache, which the others then reuse. Both prepare alongside the same
    jobs: in one group or, if the GPU cannot hold a job twice, in two groups of the same jobs.
    """
    ours = [replace(job, profile=None, peer=False, alone=False) for job in jobs if job.system == "kilolayer"]
    found: list[list[Trial]] = []
    for number in range(repeat):
        pairs: list[Trial] = []
        for group in groups([Trial(job, repeat=number, cold=cold or number == 0) for job in ours], together):
            sides = [
                [replace(each, package=package, before=name == "before", cache=f"{each.job.name}-{name}") for each in group]
                for name, package in (("before", checkout), ("this", HERE))
            ][:: -1 if number % 2 else 1]
            if together == 1 or any(2 * each.job.gigabytes > MEMORY for each in group):
                found += sides
            else:
                pairs += [each for pair in zip(*sides, strict=True) for each in pair]
        found += groups(pairs, together)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training and decoding speed against peers, or before and after a change.")
    parser.add_argument("out", type=Path, help="folder for jobs.jsonl, tables, profiles, and log.txt if a job failed")
    parser.add_argument("--rows", type=int, nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument(
        "--variants",
        type=lambda text: text.split(","),
        default=["plain", "dropout", "padded"],
        help=f"separated by commas: {', '.join(VARIANTS)} (both: dropout 0.1 and padding)",
    )
    parser.add_argument("--jobs", nargs="+", metavar="JOB", help="only these, in this order, whatever their row")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="another commit of this repository, to compare with")
    parser.add_argument("--cold", action="store_true", help="with --before: every repetition with an empty compile cache")
    parser.add_argument("--repeat", type=int, default=1, help="processes for each job")
    parser.add_argument(
        "--together",
        type=int,
        help="maximum number of processes that prepare in parallel before each measures alone [6, with --before 1]",
    )
    parser.add_argument("--seconds", type=float, default=530, help="stop after this many seconds, ending what is running")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to test every code path")
    options = parser.parse_args()
    known = [job.name for job in every_job()]
    for name, given, allowed in (("--variants", options.variants, list(VARIANTS)), ("--jobs", options.jobs or [], known)):
        wrong = [each for each in given if each not in allowed]
        if wrong:
            parser.error(f"{name}: no {wrong[0]!r}; choose from {', '.join(map(repr, allowed))}")
    if options.before is not None and not (options.before / "src" / "kilolayer").is_dir():
        parser.error(f"--before: {options.before} has no src/kilolayer; name the top of a checkout of this repository")
    if options.cold and options.before is None:
        parser.error("--cold has no effect without --before; remove it")
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    names = {str(options.out): "OUT", str(options.before): "CHECKOUT"}
    words = [names.get(word, word) for word in sys.argv[1:]]
    return {
        # PEERS: the folder that peers.sh fills
        "command": shlex.join(["PYTHONPATH=src:PEERS", "python", "benchmarks/speed/run.py", *words]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "rows": [] if options.jobs else options.rows,
        "variants": options.variants,
        "before": options.before is not None,
    }


def main() -> None:
    options = parsed()
    start = time.monotonic()
    jobs = jobs_named(options.jobs) if options.jobs else jobs_of(options.rows, options.variants, options.systems)
    jobs = [tiny(job) if options.tiny else job for job in jobs]
    together = options.together or (TOGETHER if options.before is None else 1)
    if options.before is not None:
        trials = trials_before_and_after(jobs, options.repeat, together, options.before, options.cold)
    else:
        trials = trials_beside_peers(jobs, options.repeat, together)
    lines = Lines(options.out / "jobs.jsonl", about(options))
    write = table.write if options.before is None else before.write
    for trial, facts, said in run(trials, start + options.seconds):
        if "profile" in facts:
            suffix = "" if trial.job.variant == "plain" else f"-{trial.job.variant}"
            (options.out / f"profile-{trial.job.profile}{suffix}.txt").write_text(facts.pop("profile"))
        lines.add(trial, facts, said)
        write(options.out)
    print((options.out / ("results.md" if options.before is None else "before.md")).read_text())


if __name__ == "__main__":
    main()
