"""Run `kilolayer reproduce` with several runs in each process, which share what torch has compiled.

PYTHONPATH=src python benchmarks/reproduce/run.py OUT NAME... [--parallel 12] [--seconds 1500] [--earlier FILE]
    [--part deepnorm,post_ln:6,18 --part admin:50]

The runs, their folders and the results are those of `kilolayer reproduce NAME --out OUT`; only the start of a process, and the
compilation of layers that another run has had compiled, are saved. --part, for deepnet-table1: recipes and depths that are
trained first, each of them at its own pace, all seeds included. --earlier: a file of results of another session; several can be
given. At the time limit the runs under way stop with a checkpoint, and the same command goes on. OUT/ended.json has every run
that has ended so far, and is a file for --earlier too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilolayer.reproduce import deepnet_table1
from kilolayer.reproduce.base import Reproduction, Verdict, get
from kilolayer.reproduce.lab import Lab
from kilolayer.reproduce.page import save

sys.path.insert(0, str(Path(__file__).parent.parent))

from run_pool import Pool, add_options


def settings_of(part: str) -> list[dict[str, Any]]:
    """The settings of `deepnorm,post_ln:6,18`."""
    names, _, depths = part.partition(":")
    methods = {each if isinstance(each, str) else each["name"]: each for each in deepnet_table1.METHODS}
    return [{"model.recipe": methods[name], "layers": int(depth)} for name in names.split(",") for depth in depths.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--part", action="append", default=[])
    add_options(parser)
    options = parser.parse_args()
    pool = Pool(options.parallel, time.monotonic() + options.seconds, options.out)
    failed = 0
    for name in options.names:
        lab = pool.lab(options.out / name, options.tiny, options.earlier)
        try:
            verdict = reproduced(get(name), lab, pool, options.part)
            print(json.dumps({"name": name, "verdict": verdict.word, "why": verdict.why}), flush=True)
        except Exception:  # the others go on
            traceback.print_exc()
            failed = 1
    pool.leave(failed)


def reproduced(reproduction: Reproduction, lab: Lab, pool: Pool, parts: Sequence[str]) -> Verdict:
    """Train what is missing in the time that is left, and write the results."""
    if parts and reproduction.name == deepnet_table1.Table1.name:
        first = [setting for part in parts for setting in settings_of(part)]
        grid = deepnet_table1.RATES, deepnet_table1.SEEDS
        lab = replace(lab, earlier=lab.earlier + pool.at_best_rates(lab, "parts", lab.translation(), first, *grid))
    return save(lab.folder, reproduction, reproduction.measure(lab), lab.tiny)


if __name__ == "__main__":
    main()
