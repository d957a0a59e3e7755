"""Run `kilolayer reproduce` with several runs in each process, which share what torch has compiled.

PYTHONPATH=src python benchmarks/reproduce/run.py OUT NAME... [--parallel 12] [--seconds 1500] [--earlier FILE]
    [--part deepnorm,post_ln:6,18 --part admin:50]

The runs, their folders and the results are those of `kilolayer reproduce NAME --out OUT`; only the start of a process, and the
compilation of layers that another run has had compiled, are saved. --part, for deepnet-table1: recipes and depths that are
trained first, each of them at its own pace, all seeds included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kilolayer.reproduce import deepnet_table1
from kilolayer.reproduce.base import get
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
    pool = Pool(options.parallel, time.monotonic() + options.seconds)
    for name in options.names:
        reproduction = get(name)
        lab = pool.lab(options.out / name, options.tiny, options.earlier)
        first = [setting for part in options.part for setting in settings_of(part)] if name == "deepnet-table1" else []
        if first:
            grid = deepnet_table1.RATES, deepnet_table1.SEEDS
            lab = replace(lab, earlier=lab.earlier + pool.at_best_rates(lab, "parts", lab.translation(), first, *grid))
        found = reproduction.measure(lab)
        verdict = save(lab.folder, reproduction, found, options.tiny)
        print(json.dumps({"name": name, "verdict": verdict.word, "why": verdict.why}), flush=True)
    pool.leave()


if __name__ == "__main__":
    main()
