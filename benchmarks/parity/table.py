"""Write results.json and table.md from the runs that run.py has finished.

python benchmarks/parity/table.py RUNS.jsonl...
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

HERE = Path(__file__).parent
COMMAND = "PYTHONPATH=src:PEERS python benchmarks/parity/run.py WORK --parallel 9"
Run = dict[str, Any]
READ = 0.05
"""Nats that the right source must be worth for a model to count as one that reads it."""


def series_of(runs: list[Run]) -> dict[tuple[str, int, str], list[Run]]:
    """The runs of each method, depth and system."""
    found: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run["method"], run["layers"], system_of(run)), []).append(run)
    return dict(
        sorted(found.items(), key=lambda each: (each[0][1], each[0][0], each[0][2].startswith("Kilolayer"), each[0][2]))
    )


def system_of(run: Run) -> str:
    if run["library"] != "kilolayer":
        return {"torchscale": "TorchScale", "rezero": "ReZero's authors", "fixup": "Fixup's authors"}[run["library"]]
    init = run["options"].get("init")
    return f"Kilolayer, init={init}" if init else "Kilolayer"


def summary(runs: list[Run]) -> Run:
    """The losses by rate with the first seed, and mean and standard error over all seeds at the best rate."""
    rates = {run["lr"]: run["loss"] for run in runs if run["seed"] == 1}
    reading = [run for run in runs if run["seed"] == 1 and run["source_gain"] >= READ]
    best = min(reading or runs, key=lambda run: run["loss"])["lr"]
    losses = [run["loss"] for run in runs if run["lr"] == best]
    gains = [run["source_gain"] for run in runs if run["lr"] == best]
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else None
    edge = len(rates) > 1 and best in (min(rates), max(rates))
    return {
        "rates": dict(sorted(rates.items())),
        "lr": best,
        "at_edge": edge,
        "seeds": len(losses),
        "loss": round(fmean(losses), 4),
        "error": None if error is None else round(error, 4),
        "source_gain": round(fmean(gains), 3),
    }


def markdown(found: dict[tuple[str, int, str], Run]) -> str:
    lines = [
        "# The authors' modules and Kilolayer's in one loop",
        "",
        "German to English, dim 128, dropout 0.1, 1,000 steps of 4,096 tokens, 400 of them for warm-up, the same batches,",
        "torch's Adam (0.9, 0.98), fp32 weights under bf16 autocast: `loop.py` belongs to no library. Validation loss at",
        "the best of the learning rates (one seed each), among those at which the model reads its source; mean and standard",
        f"error where three seeds were trained at it. One H200, torch 2.11: `{COMMAND}`.",
        "",
        "| method | layers per side | system | best rate | loss | seeds | source gain | losses by rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (method, layers, system), each in found.items():
        loss = f"{each['loss']:.3f}" + ("" if each["error"] is None else f" ± {each['error']:.3f}")
        rates = ", ".join(f"{rate:g}: {value:.2f}" for rate, value in each["rates"].items())
        edge = ", the edge of its grid" if each["at_edge"] else ""
        cells = [method, layers, system, f"{each['lr']:g}{edge}", loss, each["seeds"], f"{each['source_gain']:.2f}", rates]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    lines = [line for name in sys.argv[1:] for line in Path(name).read_text().splitlines()]
    runs = list({run["name"]: run for run in map(json.loads, lines) if "loss" in run}.values())
    found = {key: summary(own) for key, own in series_of(runs).items()}
    rows = [{"method": method, "layers": layers, "system": system, **each} for (method, layers, system), each in found.items()]
    about = {"command": COMMAND, "hardware": "NVIDIA H200", "torch": "2.11.0", "torchscale": "0.3.0", "rezero": "0.1.0"}
    text = json.dumps(about, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows)
    text += '\n ],\n "runs": [\n' + ",\n".join(f"  {json.dumps(run)}" for run in runs) + "\n ]\n}\n"
    (HERE / "results.json").write_text(text)
    (HERE / "table.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
