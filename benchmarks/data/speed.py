"""Time the data loader on real text: the cost of one batch of 4,096 tokens on one CPU core.

    KILOLAYER_DATA=../shared/data python benchmarks/data/speed.py benchmarks/data/speed.json

The data is Multi30k English-German (8k joint BPE) as one corpus, and Multi30k in all 12 directions between its four languages
as a mixture at temperature 5. The baseline in the same run is a loop over rows (slice, `torch.tensor`, `pad_sequence`) that
builds the same batches from lists in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import sentencepiece
import torch
from torch.nn.utils.rnn import pad_sequence

from kilolayer.data.batches import Batch, BatchConfig, Batches
from kilolayer.data.corpora import DataConfig, find_corpora
from kilolayer.data.encode import encode_training
from kilolayer.data.tokenizer import TokenizerConfig, tokenizers_for

REPEATS = 7


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds taken, and the result of the work."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def by_rows(batch: Batch) -> Callable[[], object]:
    """A function that builds a batch of the same rows from lists."""
    sources = [row[row != 0].tolist() for row in batch.source]
    targets = [row[row != 0].tolist() for row in batch.labels]

    def work() -> object:
        source = pad_sequence([torch.tensor(row) for row in sources], batch_first=True)
        labels = pad_sequence([torch.tensor(row) for row in targets], batch_first=True)
        return source, labels, pad_sequence([torch.tensor([2, *row[:-1]]) for row in targets], batch_first=True)

    return work


def measure(name: str, directions: list[str], temperature: float) -> dict[str, Any]:
    """Time preparation, planning and reading a batch."""
    folder = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    with tempfile.TemporaryDirectory() as cache:
        data = DataConfig(folder=str(folder), directions=directions, temperature=temperature)
        corpora = find_corpora(data)
        config = TokenizerConfig(kind="bpe", vocab_size=8000)
        vocabulary_s, tokenizers = timed(lambda: tokenizers_for(corpora, config, Path(cache)))
        encode_s, mixture = timed(lambda: encode_training(corpora, tokenizers, data, Path(cache)))
        again_s, _ = timed(lambda: encode_training(corpora, tokenizers_for(corpora, config, Path(cache)), data, Path(cache)))
        plan_s, batches = timed(lambda: Batches(mixture, BatchConfig(tokens=4096, shapes=12), seed=1))
        sample = list(islice(batches, 200))
        each = [timed(lambda: [next(batches) for _ in range(100)])[0] * 10 for _ in range(REPEATS)]
        rows = [timed(lambda: [by_rows(batch)() for batch in sample[:50]])[0] * 20 for _ in range(REPEATS)]
        empty = timed(lambda: [by_rows(batch) for batch in sample[:50]])[0] * 20
    return {
        "case": name,
        "pairs": len(batches.mixture),
        "filters": str(mixture.report),
        "vocabulary_s": round(vocabulary_s, 2),
        "encode_s": round(encode_s, 2),
        "from_cache_s": round(again_s, 3),
        "shapes_s": round(plan_s, 3),
        "shapes": [f"{shape.rows} x ({shape.source} + {shape.target})" for shape in batches.shapes],
        "batches_an_epoch": len(batches),
        "padding": round(batches.padding, 4),
        "ms_a_batch": round(median(each), 3),
        "ms_a_batch_by_rows": round(median(rows) - empty, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a batch.")
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    languages = ("en", "de", "fr", "cs")
    every = [f"{source}-{target}" for source in languages for target in languages if source != target]
    versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    result = {
        "command": "KILOLAYER_DATA=../shared/data python benchmarks/data/speed.py benchmarks/data/speed.json",
        "versions": {**versions, "sentencepiece": sentencepiece.__version__},
        "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()}), one thread",
        "seed": 1,
        "cases": [measure("multi30k en-de", ["en-de"], 1.0), measure("multi30k, 12 directions", every, 5.0)],
    }
    options.results.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["cases"], indent=1))


if __name__ == "__main__":
    main()
