"""Run `kilolayer reproduce` with several runs in each process, which share what torch has compiled.

PYTHONPATH=src python benchmarks/reproduce/run.py OUT NAME... [--parallel 12] [--seconds 1500] [--earlier FILE]
    [--part deepnorm,post_ln:6,18 --part admin:50]

The runs, their folders and the results are those of `kilolayer reproduce NAME --out OUT`; only the start of a process, and the
compilation of layers that another run has had compiled, are saved. --part, for deepnet-table1: recipes and depths that are
trained to the end, all seeds included, before the next ones begin.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from unittest.mock import patch

from kilolayer.reproduce import deepnet_table1
from kilolayer.reproduce.base import get
from kilolayer.reproduce.page import save

sys.path.insert(0, str(Path(__file__).parent.parent))

from run_pool import Pool, add_options


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
        every = deepnet_table1.METHODS
        for part in options.part if name == "deepnet-table1" else ():
            names, _, depths = part.partition(":")
            methods = tuple(each for each in every if (each if isinstance(each, str) else each["name"]) in names.split(","))
            layers = tuple(map(int, depths.split(",")))
            with patch.multiple(deepnet_table1, METHODS=methods, LAYERS=layers):
                reproduction.measure(lab)
        found = reproduction.measure(lab)
        verdict = save(lab.folder, reproduction, found, options.tiny)
        print(json.dumps({"name": name, "verdict": verdict.word, "why": verdict.why}), flush=True)
    pool.leave()


if __name__ == "__main__":
    main()
