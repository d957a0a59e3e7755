"""Which learning rates does a model survive, and which of them were predicted by its first 60 steps?

    python benchmarks/forecast/forecast.py runs OUT --seconds 400 --parallel 12     # every run of the grid
    python benchmarks/forecast/forecast.py forecast OUT --parallel 6                # what 60 steps of each row show
    python benchmarks/forecast/forecast.py score OUT                                # calibrate, test, write the table

KILOLAYER_DATA is the folder with the texts. Writes runs.jsonl, looks.jsonl, results.json and results.md to OUT; existing
results are not recomputed. Runs execute in parallel, best under nvidia-cuda-mps-control. For a smaller grid: --only REGEX on
the names of runs, --rates, --dim, --steps, --tokens, --vocabulary.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from grid import RATES, Row, jobs_of, rows

FILES = {"runs": "runs.jsonl", "forecast": "looks.jsonl"}


def measure(stage: str, chosen: argparse.Namespace, size: dict[str, Any]) -> None:
    """Compute what is missing, in the order of the grid, until time runs out."""
    from measure import configured, work

    path = chosen.out / FILES[stage]
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    made = {each["name"] for each in lines if "error" not in each}
    wanted: list[Any] = [each for row in rows() for each in (jobs_of(row, chosen.rates) if stage == "runs" else [row])]
    wanted = [each for each in wanted if each.name not in made and re.search(chosen.only, each.name)]
    for text in dict.fromkeys(each.name.split()[0] for each in wanted):
        configured(Row(text, "pre_ln", 1), size)  # so that the vocabulary is cached
    end = time.monotonic() + chosen.seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multiprocessing.get_context("spawn").Pool(chosen.parallel) as pool, path.open("a") as file:
        results = pool.imap_unordered(work, [(stage, each, size) for each in wanted])
        for _ in wanted:
            try:
                _, name, found = results.next(timeout=max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                print("out of time", flush=True)
                return
            file.write(json.dumps({"name": name, "size": size, **found}) + "\n")
            file.flush()
            print(name, found.get("error") or found.get("loss", ""), found.get("seconds"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The forecast of the largest learning rate, and its test.")
    parser.add_argument("stage", choices=(*FILES, "score"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--parallel", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    for name, default in {"dim": 64, "steps": 600, "tokens": 2048, "vocabulary": 2000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.stage == "score":
        from score import write_score

        write_score(chosen.out)
        return
    size = {name: getattr(chosen, name) for name in ("dim", "steps", "tokens", "vocabulary", "device")}
    measure(chosen.stage, chosen, size)


if __name__ == "__main__":
    main()
