"""What each process of DeepNet's 1,000 layers holds and sends by train.shard, on 8, 64 and 512 GPUs: computed, not measured.

    python benchmarks/plan/sent.py benchmarks/plan/sent.json

Machines have 8 GPUs. Links are as fast as in docs/several-machines.md: 400 GB/s within a machine, 50 GB/s for each GPU between
machines. It prints the table of that page.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kilolayer.cli.configuration import read_tables
from kilolayer.cli.plan import configuration_of
from kilolayer.runs.budget import Budget, Work, budget
from kilolayer.runs.division import Division, Shard

SHARDS: tuple[Shard, ...] = ("none", "full", "hybrid")
CONFIG = Path("configs/deepnet-1000.toml")
INSIDE, BETWEEN, PER_MACHINE = 400e9, 50e9, 8


def case(cost: Budget, processes: int, shard: Shard) -> dict[str, Any]:
    """The plan of so many processes."""
    machines = processes // PER_MACHINE
    division = Division(processes, shard, machines=machines if shard == "hybrid" else 1)
    cost = replace(cost, division=division)
    seconds = cost.sent.seconds(INSIDE if machines == 1 else BETWEEN, INSIDE if shard == "hybrid" or machines == 1 else BETWEEN)
    kept = {"peak": cost.training.peak, "peak_recomputed": cost.training.peak_recomputed}
    return {
        "processes": processes,
        "shard": shard,
        **kept,
        "sent": {**asdict(cost.sent), "total": cost.sent.total},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What processes send, on paper.")
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    whole = configuration_of(read_tables(CONFIG, []))
    work = Work()
    cost = budget(whole.model, work)
    cases = [case(cost, size, each) for size in (8, 64, 512) for each in SHARDS if each != "hybrid" or size > PER_MACHINE]
    for each in cases:
        sent, memory = each["sent"], each["peak_recomputed"]
        parts = " | ".join(
            f"{sent[name] / 1e9:.2f}" if sent[name] else "-" for name in ("gathers", "scatters", "copies", "sums")
        )
        print(f"| {each['processes']} | {each['shard']} | {memory / 2**30:.1f} | {parts} | {each['seconds']:.2f} s |")
    command = " ".join(["python benchmarks/plan/sent.py", *sys.argv[1:]])
    facts = {"config": str(CONFIG), "work": asdict(work), "training_flops_per_token": cost.training_flops_per_token}
    document = {"command": command, **facts, "parameters": cost.parameters, "cases": cases}
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
