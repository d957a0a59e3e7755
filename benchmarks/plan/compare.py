"""Sets what `kilolayer plan` predicts beside the memory that training took in benchmarks/speed.

    python benchmarks/plan/compare.py benchmarks/plan/results.json benchmarks/speed/results.json benchmarks/plan/jobs.json

Nothing is trained here: peaks of allocated memory come from the other files, the later the better, of bf16 training as
`kilolayer train` does it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import kilolayer as kl
from kilolayer.speed.budget import Work, budget

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
from jobs import JOBS, ROWS, Job


def predicted(job: Job) -> int:
    """The peak that the plan names for a job, in bytes."""
    setting = job.setting
    config = kl.ModelConfig(
        shape="encoder_decoder" if setting.task == "translation" else "decoder",
        layers=setting.layers,
        dim=setting.dim,
        heads=setting.heads,
        ffn_dim=setting.ffn_dim,
        vocab_size=setting.vocabulary,
        recipe=kl.recipes.get(setting.recipe),
        moe=kl.MoE(experts=setting.experts) if setting.experts else None,
        pad_id=None,
    )
    return budget(config, Work(setting.rows, setting.length, 1, "bf16")).training.peak


def names(rows: list[int], jobs: Iterable[str]) -> list[str]:
    """The jobs of a run that count: those of the rows that it still holds, or all where it was for single jobs."""
    return [name for row in rows for name in ROWS[row].jobs] if rows else list(jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training memory, measured and predicted.")
    parser.add_argument("results", type=Path)
    parser.add_argument("speed", type=Path, nargs="+")
    options = parser.parse_args()
    runs = [run for path in options.speed for run in json.loads(path.read_text())["runs"]]
    found = {name: run["jobs"].get(name, {}) for run in runs for name in names(run["rows"], run["jobs"])}
    cases = {}
    for job in JOBS:
        measured = found.get(job.name, {}).get("gigabytes")
        if job.system == "kilolayer" and measured is not None and not job.setting.twin:
            plan = predicted(job) / 2**30
            cases[job.name] = {"plan": round(plan, 2), "measured": round(measured, 2), "ratio": round(plan / measured, 3)}
            print(job.name, cases[job.name])
    command = " ".join(["python benchmarks/plan/compare.py", *sys.argv[1:]])
    document = {"command": command, "hardware": runs[-1]["hardware"], "unit": "GiB", "cases": cases}
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
