"""Measure the memory of a process that trains on 10 thousand and on 10 million pairs.

    python benchmarks/data/memory.py benchmarks/data/memory.json

Each case is a separate process that opens token files, plans an epoch and reads 300 batches, as a training run does. A third
and a fourth process write the token files from a stream of tokens. The number reported is the peak resident set size (VmHWM),
including pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from kilolayer.data.batches import BatchConfig, Batches
from kilolayer.data.filters import FilterReport, Seen
from kilolayer.data.store import PairWriter, TokenPairs

SIZES = (10_000, 10_000_000)
LIMIT_MB = 200
PAIRS_AT_ONCE = 10_000


def write(folder: Path, pairs: int) -> None:
    """Write synthetic token files: 4 to 24 tokens per side from a vocabulary of 8,000, with the set of duplicates in memory."""
    rng = np.random.default_rng(0)
    seen = Seen(pairs)
    with PairWriter(folder, vocab_size=8000) as writer:
        for start in range(0, pairs, PAIRS_AT_ONCE):
            seen.add([(str(i), "") for i in range(start, start + PAIRS_AT_ONCE)])
            source = rng.integers(4, 25, PAIRS_AT_ONCE)
            target = np.clip(source + rng.integers(-3, 4, PAIRS_AT_ONCE), 4, 24)
            writer.append_flat(rng.integers(4, 8000, int(source.sum() + target.sum())), source, target)
        writer.finish(FilterReport(read=pairs, kept=pairs))


def read(folder: Path) -> dict[str, float]:
    """Plan an epoch and read 300 of its batches."""
    start = time.perf_counter()
    batches = Batches(TokenPairs(folder), BatchConfig(tokens=4096), seed=1)
    next(batches)
    ready = time.perf_counter()
    for _ in range(300):
        next(batches)
    return {"first_batch_s": round(ready - start, 2), "ms_a_batch": round((time.perf_counter() - ready) / 0.3, 3)}


def peak_mb() -> float:
    """The peak resident set size in MB (1e6 bytes); VmHWM is per process image, unlike ru_maxrss, which a child inherits."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


def child(work: str, folder: Path, pairs: int) -> dict[str, float]:
    """Run this script in a separate process, and return its result."""
    done = subprocess.run([sys.executable, __file__, "--child", work, str(folder), str(pairs)], capture_output=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory for 10 thousand and for 10 million pairs.")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        work, folder, pairs = options.child
        figures = read(Path(folder)) if work == "read" else write(Path(folder), int(pairs)) or {}
        print(json.dumps({**figures, "peak_mb": peak_mb()}))
        return
    cases = []
    for pairs in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            writing = child("write", Path(folder), pairs)
            reading = child("read", Path(folder), pairs)
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
        cases.append({"pairs": pairs, "files_mb": round(size / 1e6, 1), "writing": writing, "reading": reading})
        print(cases[-1])
    more = {work: round(cases[1][work]["peak_mb"] - cases[0][work]["peak_mb"], 1) for work in ("writing", "reading")}
    result = {
        "command": "python benchmarks/data/memory.py benchmarks/data/memory.json",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "hardware": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "cases": cases,
        "more_mb": more,
        "limit_mb": LIMIT_MB,
    }
    if options.results:
        options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(more)
    sys.exit(any(value > LIMIT_MB for value in more.values()))


if __name__ == "__main__":
    main()
