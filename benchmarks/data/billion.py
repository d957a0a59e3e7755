"""Measure the start of a run, and of a resumed one, on token files of a billion pairs.

    python benchmarks/data/billion.py /tmp/billion benchmarks/data/billion.json

The token files are simulated: ten corpora of 100 million pairs (4 to 24 tokens per side) that share an index of 1.6 GB and a
sparse file of tokens, so that no disk is filled. Each case is a separate process that opens the corpora, finds the shapes,
moves to a batch inside the epoch, reads it, and makes the line for the log. `whole` shuffles the epoch as a whole, as small
epochs are; with ten corpora it needs 22 GB, so it runs on the first one only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kilolayer.data.batches import BatchConfig, Batches
from kilolayer.data.mixing import Mixture, Part
from kilolayer.data.store import DESCRIPTION, INDEX, INDEX_TYPE, TOKENS, TokenPairs

CORPORA, PAIRS, AT_ONCE = 10, 100_000_000, 1_000_000
CASES = (("sections, first start", 10), ("sections, resumed", 10), ("whole", 1), ("sections, one corpus", 1))


def make(folder: Path) -> None:
    """Write the token files of all corpora, with hard links to the same two files."""
    rng = np.random.default_rng(0)
    total = 0
    with open(folder / INDEX, "wb") as file:
        for _ in range(0, PAIRS, AT_ONCE):
            index = np.empty(AT_ONCE, INDEX_TYPE)
            index["source"] = rng.integers(4, 25, AT_ONCE)
            index["target"] = np.clip(index["source"].astype(np.int64) + rng.integers(-3, 4, AT_ONCE), 4, 24)
            lengths = index["source"].astype(np.uint64) + index["target"]
            index["start"] = np.uint64(total) + np.cumsum(lengths) - lengths
            total += int(lengths.sum())
            file.write(index.tobytes())
    with open(folder / TOKENS, "wb") as file:
        file.truncate(2 * total)
    for number in range(CORPORA):
        corpus = folder / str(number)
        corpus.mkdir()
        for name in (INDEX, TOKENS):
            os.link(folder / name, corpus / name)
        counts = {"pairs": PAIRS, "tokens": total, "dtype": "uint16", "vocab_size": 8000}
        description = {**counts, "digest": f"corpus {number}", "report": {"read": PAIRS, "kept": PAIRS}}
        (corpus / DESCRIPTION).write_text(json.dumps(description))


def start(folder: Path, corpora: int, whole: bool) -> dict[str, Any]:
    """Start in the middle of an epoch, and read 100 batches."""
    begun, cpu = time.perf_counter(), time.process_time()
    mixture = Mixture([Part(TokenPairs(folder / str(number))) for number in range(corpora)])
    options: dict[str, Any] = {"whole": 1 << 31} if whole else {"cache": folder / f"cache{corpora}"}
    batches = Batches(mixture, BatchConfig(tokens=4096), seed=1, **options)
    batches.load_state({**batches.state(), "index": 300_000 * corpora})
    next(batches)
    summary = batches.summary
    ready, ready_cpu = time.perf_counter(), time.process_time()
    for _ in range(100):
        next(batches)
    each = (time.perf_counter() - ready) * 10
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {
        "pairs": len(mixture),
        "batches": len(batches),
        "start_s": round(ready - begun, 2),
        "start_cpu_s": round(ready_cpu - cpu, 2),
        "ms_a_batch": round(each, 3),
        "peak_mb": round(int(peak.split()[1]) * 1024 / 1e6, 1),
        "summary": summary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The start of a run on a billion pairs.")
    parser.add_argument("folder", type=Path, help="for the token files, which are deleted at the end")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(start(options.folder, int(options.child[1]), options.child[0] == "whole")))
        return
    options.folder.mkdir()
    try:
        make(options.folder)
        cases = []
        for name, corpora in CASES:
            command = [sys.executable, __file__, str(options.folder), "--child", name, str(corpora)]
            done = subprocess.run(command, capture_output=True, check=True)
            cases.append({"case": name, **json.loads(done.stdout)})
            print(cases[-1], flush=True)
    finally:
        shutil.rmtree(options.folder)
    result = {
        "command": "python benchmarks/data/billion.py /tmp/billion benchmarks/data/billion.json",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared with other work: CPU seconds count",
        "cases": cases,
    }
    if options.results:
        options.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
