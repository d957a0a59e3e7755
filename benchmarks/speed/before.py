"""Compare this commit with another: time, memory and compilation of our jobs, from the lines of `run.py --before`.

    python benchmarks/speed/before.py benchmarks/speed [LINES.jsonl ...]

This adds the runs in these files to before.json, which run.py does for its own, and rewrites before.md. A job is shown from the
run that repeated it most often, the last of these; times of different runs are never compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from workers import read_lines

SLOWER, LARGER, LONGER = 1.02, 1.02, 1.10
"""What a change may cost: in time, unless the spread is larger; in memory; and in seconds to the end of step 10."""


def compare(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each job the medians of both packages, their ratios, and the spread of repetitions.

    The spread is the larger of the two packages' (largest - smallest) / median. The time to be ready is that of processes
    without a compile cache.
    """
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        sides = found.setdefault(line["job"], {"before": [], "this": []})
        sides[line["package"]].append(line)
    return {job: _compared(sides) for job, sides in found.items()}


def _compared(sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    reasons = [
        f"{side}: {line['facts']['reason']}" for side, lines in sides.items() for line in lines if "reason" in line["facts"]
    ]
    result: dict[str, Any] = {"reason": reasons[0]} if reasons else {}
    whole = {side: [line for line in lines if "reason" not in line["facts"]] for side, lines in sides.items()}
    for key in ("ms", "gigabytes", "ready_s"):
        values = {
            side: [line["facts"][key] for line in lines if key in line["facts"] and (key != "ready_s" or line["cold"])]
            for side, lines in whole.items()
        }
        if all(values.values()):
            result[key] = {
                **{side: median(each) for side, each in values.items()},
                "ratio": median(values["this"]) / median(values["before"]),
                "spread": max((max(each) - min(each)) / median(each) for each in values.values()),
                "repetitions": min(map(len, values.values())),
            }
    if "ms" in result:
        limits = {"ms": max(SLOWER, 1 + result["ms"]["spread"]), "gigabytes": LARGER, "ready_s": LONGER}
        result["over"] = [key for key, limit in limits.items() if key in result and result[key]["ratio"] > limit]
    return result


COLUMNS = (
    *("job", "run", "ms before", "now", "ratio", "spread", "GB before", "now", "ratio"),
    *("ready s before", "now", "ratio", "spread", "repetitions", "over"),
)
WORDS = {"ms": "time", "gigabytes": "memory", "ready_s": "compilation"}


def shown(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each job from the run that repeated it most often with both commits, the last of these; and that run's number, from 1.

    A job that no run measured with both commits says why.
    """
    found: dict[str, dict[str, Any]] = {}
    for index, run in enumerate(runs, 1):
        for job, facts in compare(run["trials"]).items():
            if _repetitions(facts) >= _repetitions(found.get(job, {})):
                found[job] = {"run": index, **facts}
    return found


def _repetitions(facts: dict[str, Any]) -> int:
    return facts["ms"]["repetitions"] if "ms" in facts else 0


def markdown(runs: list[dict[str, Any]], found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Before and after",
        "",
        *(
            f"{index}. `{run['command']}` on {run['hardware']}; "
            + ", ".join(f"{name} {each}" for name, each in run["versions"].items())
            for index, run in enumerate(runs, 1)
        ),
        "",
        "Each job is from one of these runs, the one that repeated it most, with both commits in turns on one machine.",
        "Medians over repetitions, one process each, of the median step. Ready: seconds from the start of the process to the",
        "end of step 10, from an empty compile cache. Spread: (largest - smallest) / median of the repetitions, the larger of",
        f"both commits'. Allowed: time {SLOWER} or the spread, memory {LARGER}, seconds to be ready {LONGER}.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for job, facts in found.items():
        time, memory, ready = (facts.get(key) for key in WORDS)
        cells = [
            *_cells(time, "{:,.2f}"),
            _spread(time),
            *_cells(memory, "{:.2f}"),
            *_cells(ready, "{:.1f}"),
            _spread(ready),
            "-" if time is None else str(time["repetitions"]),
            ", ".join(WORDS[key] for key in facts["over"]) or "nothing" if "over" in facts else "-",
        ]
        name = f"{job}: {facts['reason']}" if "reason" in facts else job
        lines.append(f"| {name} | {facts['run']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(fact: dict[str, Any] | None, form: str) -> list[str]:
    if fact is None:
        return ["-"] * 3
    return [form.format(fact["before"]), form.format(fact["this"]), f"{fact['ratio']:.3f}"]


def _spread(fact: dict[str, Any] | None) -> str:
    return "-" if fact is None or fact["repetitions"] < 2 else f"{fact['spread']:.1%}"


def as_run(path: Path) -> dict[str, Any]:
    """A run in the form of before.json, from its lines."""
    run, lines = read_lines(path)
    hardware = next((line["facts"]["hardware"] for line in lines if "hardware" in line["facts"]), "unknown hardware")
    return {
        **run,
        "hardware": hardware,
        "trials": [line for line in lines if "not started" not in line["facts"].get("reason", "")],
    }


def write(out: Path, *others: Path) -> None:
    """Add the runs in these files, by default that of the folder `out`, to before.json, and write before.md from it.

    A run replaces an earlier state of itself; runs that are no longer shown are removed.
    """
    path = out / "before.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    for lines in others or [out / "jobs.jsonl"]:
        run = as_run(lines)
        runs = [*(each for each in runs if each["started"] != run["started"]), run]
    places = {facts["run"] for facts in shown(runs).values()}
    runs = [run for index, run in enumerate(runs, 1) if index in places] or runs[-1:]
    found = shown(runs)
    path.write_text(json.dumps({"compared": found, "runs": runs}, indent=1) + "\n")
    (out / "before.md").write_text(markdown(runs, found))


if __name__ == "__main__":
    folder, *files = map(Path, sys.argv[1:])
    if files:
        write(folder, *files)
    else:
        runs = json.loads((folder / "before.json").read_text())["runs"]
        (folder / "before.md").write_text(markdown(runs, shown(runs)))
