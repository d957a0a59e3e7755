"""Measure the preparation of training text: by one process and by several, killed half-way, and at the next start.

    KILOLAYER_DATA=../shared/data python benchmarks/data/preparation.py /tmp/preparation benchmarks/data/preparation.json

The text is Tatoeba's, English and many languages, with pairs of its sentences joined until there are `--megabytes`, cut into
pieces of an 8k BPE. Each case is a separate process with a cache of its own. CPU seconds include those of child processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from kilolayer.data.corpora import DataConfig, find_corpora
from kilolayer.data.encode import encode_text
from kilolayer.data.tokenizer import TokenizerConfig, tokenizers_for


def make(folder: Path, megabytes: int) -> None:
    """Write train.xx and train.en."""
    with lzma.open(Path(os.environ["KILOLAYER_DATA"]) / "tatoeba_multi" / "train.en-xx.tsv.xz", "rt") as stream:
        rows = [line.rstrip("\n").split("\t")[-2:] for line in stream]
    size = turn = 0
    with open(folder / "train.xx", "w") as source, open(folder / "train.en", "w") as target:
        while size < megabytes * 10**6:
            for i, pair in enumerate(rows):
                other = rows[(i * 7919 + turn * 104729 + 1) % len(rows)]
                lines = [f"{a} {b}\n" if turn else f"{a}\n" for a, b in zip(pair, other, strict=True)]
                size += sum(len(line.encode()) for line in lines)
                source.write(lines[0])
                target.write(lines[1])
                if size >= megabytes * 10**6:
                    break
            turn += 1


def prepare(folder: Path, cache: Path, processes: int) -> dict[str, Any]:
    """Find the text, and encode it with the vocabulary of `folder`."""
    begun, before = time.perf_counter(), os.times()
    data = DataConfig(folder=str(folder), directions=["xx-en"], train=["train"], valid=None, test=None)
    corpora = find_corpora(data, cache)
    found = time.perf_counter()
    pieces = TokenizerConfig(kind="bpe", vocab_size=8000, sentences=100_000)
    vocabulary = tokenizers_for(corpora, pieces, folder / "vocabulary")
    trained, used = time.perf_counter(), os.times()
    text = corpora.train[0]
    pairs = encode_text(text, vocabulary, cache, tagged=False, filters=data.filters, processes=processes)
    encoded, end = time.perf_counter(), os.times()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    digest = hashlib.sha256(b"".join((pairs.folder / name).read_bytes() for name in ("tokens.bin", "index.bin", "pairs.json")))
    return {
        "pairs": len(pairs),
        "find_s": round(found - begun, 2),
        "encode_s": round(encoded - trained, 2),
        "encode_cpu_s": round(sum(end[:4]) - sum(used[:4]), 2),
        "start_cpu_s": round(sum(end[:4]) - sum(before[:4]), 2),
        "peak_mb": round(int(peak.split()[1]) * 1024 / 1e6, 1),
        "digest": digest.hexdigest()[:16],
    }


def kill_half_way(command: list[str], cache: Path, total: int) -> dict[str, Any]:
    """Run the command until half of the text is prepared, kill it, and see what the next one finds."""
    begun = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None:
        journals = list(cache.glob(".pairs-*.unfinished/journal.json"))
        if journals and (read := json.loads(journals[0].read_text())["report"]["read"]) >= total / 2:
            child.send_signal(signal.SIGKILL)
            child.wait()
            return {"killed_after_s": round(time.perf_counter() - begun, 2), "pairs_read": read}
        time.sleep(0.2)
    raise RuntimeError("the preparation ended before it was killed")


def main() -> None:
    parser = argparse.ArgumentParser(description="The preparation of training text.")
    parser.add_argument("folder", type=Path, help="for the text and the caches, which are deleted at the end")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(prepare(options.folder, Path(options.child[0]), int(options.child[1]))))
        return
    several = os.cpu_count() or 1
    options.folder.mkdir()
    try:
        make(options.folder, options.megabytes)
        with open(options.folder / "train.en", "rb") as stream:
            lines = sum(1 for _ in stream)

        def command(cache: str, processes: int) -> list[str]:
            return [sys.executable, __file__, str(options.folder), "--child", str(options.folder / cache), str(processes)]

        def run(cache: str, processes: int) -> dict[str, Any]:
            done = subprocess.run(command(cache, processes), stdout=subprocess.PIPE, check=True)
            return {"processes": processes, **json.loads(done.stdout)}

        cases = [{"case": "whole", **run("several", several)}, {"case": "at the next start", **run("several", several)}]
        print(cases, flush=True)
        killed = kill_half_way(command("killed", several), options.folder / "killed", lines)
        cases.append({"case": "continued", **killed, **run("killed", several)})
        print(cases[-1], flush=True)
        cases.append({"case": "whole", **run("one", 1)})
        print(cases[-1], flush=True)
        assert len({case["digest"] for case in cases}) == 1
    finally:
        shutil.rmtree(options.folder)
    script = "KILOLAYER_DATA=../shared/data python benchmarks/data/preparation.py"
    versions = {"numpy": np.__version__, "sentencepiece": sentencepiece.__version__}
    result = {
        "command": f"{script} /tmp/preparation benchmarks/data/preparation.json --megabytes {options.megabytes}",
        "versions": {"python": platform.python_version(), **versions},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), shared with other work: CPU seconds count",
        "megabytes": options.megabytes,
        "lines": lines,
        "cases": cases,
    }
    if options.results:
        options.results.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
