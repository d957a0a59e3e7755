"""This commit beside another one: times, memory and compilation of our jobs, from the lines of `run.py --before`.

python benchmarks/speed/before.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from workers import read_lines

SLOWER, LARGER, LONGER = 1.02, 1.02, 1.10
"""What a change may cost: in time, where the spread is not larger, in memory, and in the seconds to the end of step 10."""


def compare(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each job the medians of both packages, their ratios, and the spread of repetitions.

    The spread is the larger of the two packages' (largest - smallest) / median. Seconds to be ready are those of processes that
    found no compile cache.
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
    *("job", "ms before", "now", "ratio", "spread", "GB before", "now", "ratio"),
    *("ready s before", "now", "ratio", "spread", "repetitions", "over"),
)
WORDS = {"ms": "time", "gigabytes": "memory", "ready_s": "compilation"}


def markdown(run: dict[str, Any], hardware: str, found: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Before and after",
        "",
        f"`{run['command']}` on {hardware}; " + ", ".join(f"{name} {each}" for name, each in run["versions"].items()) + ".",
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
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(fact: dict[str, Any] | None, form: str) -> list[str]:
    if fact is None:
        return ["-"] * 3
    return [form.format(fact["before"]), form.format(fact["this"]), f"{fact['ratio']:.3f}"]


def _spread(fact: dict[str, Any] | None) -> str:
    return "-" if fact is None or fact["repetitions"] < 2 else f"{fact['spread']:.1%}"


def write(out: Path) -> None:
    """before.json and before.md from the lines in the folder `out`."""
    run, lines = read_lines(out / "jobs.jsonl")
    found = compare(lines)
    hardware = next((line["facts"]["hardware"] for line in lines if "hardware" in line["facts"]), "unknown hardware")
    document = {**run, "hardware": hardware, "compared": found, "trials": lines}
    (out / "before.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "before.md").write_text(markdown(run, hardware, found))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
