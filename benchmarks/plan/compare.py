"""Compare the predictions of `kilolayer plan` with the memory that training took in benchmarks/speed.

    python benchmarks/plan/compare.py benchmarks/plan/results.json benchmarks/speed/results.json benchmarks/plan/jobs.json

Nothing is trained here: peaks of allocated memory, in bf16 training as by `kilolayer train`, come from the other files; if
several files have the same job, the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kilolayer.runs.budget import Work, budget

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
from jobs import Job, every_job, names_in
from ours import model_config
from table import units_of


def predicted(job: Job) -> int:
    """The peak that the plan predicts for a job, in bytes."""
    setting = job.setting
    return budget(model_config(setting), Work(setting.rows, setting.length, 1, "bf16")).training.peak


def names(run: dict[str, Any]) -> list[str]:
    """The jobs that a run reports: those of its rows and variants, or all if it measured single jobs."""
    return [name for unit in units_of(run) for name in names_in(*unit)] if run["rows"] else list(run["jobs"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Training memory, measured and predicted.")
    parser.add_argument("results", type=Path)
    parser.add_argument("speed", type=Path, nargs="+")
    options = parser.parse_args()
    runs = [run for path in options.speed for run in json.loads(path.read_text())["runs"]]
    found = {name: run["jobs"].get(name, {}) for run in runs for name in names(run)}
    cases = {}
    for job in every_job():
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
