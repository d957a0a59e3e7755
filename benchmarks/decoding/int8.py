"""Compare int8 and fp32 matrix products on the CPU for speed, and a trained model's translations in both.

    kilolayer train benchmarks/translation/multi30k.toml --run runs/int8 --data.folder $KILOLAYER_DATA/multi30k \\
        --model.layers 2 --model.dropout 0.1 --tokenizer.vocab_size 4000 --batches.tokens 2048 --train.precision fp32 \\
        --train.steps 900 --train.lr 1e-3 --train.warmup_steps 150 --train.valid_every 900 --train.layers_every 0
    KILOLAYER_DATA=... python benchmarks/decoding/int8.py benchmarks/decoding/int8.json --run runs/int8

beside_ctranslate2.py times complete decoding. The candidates are PyTorch's int8 products: quantized.linear_dynamic in each of
its engines; _int_mm and onednn's qlinear, with rounding of the rows and scaling of the result written in PyTorch; and
_weight_int8pack_mm, which rounds only weights. Rounds alternate between candidates; the best of four is used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from beside_ctranslate2 import processor
from sacrebleu import BLEU
from torch import Tensor

import kilolayer as kl
from kilolayer.data.text import read_lines
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.translate import translate_lines
from kilolayer.runs.run import Run
from kilolayer.speed.packed_product import PackedProduct
from kilolayer.tasks.translation.task import SidedTokenizer

SHAPES = [(256, 256), (256, 768), (256, 1024), (1024, 256), (512, 512), (512, 1536), (512, 2048), (2048, 512)]
VOCABULARIES = [(256, 8000), (512, 32_000)]
ROWS = (1, 5, 16, 80)
ROUNDS, SECONDS = 4, 0.02

Candidate = Callable[[Tensor], Tensor]


def candidates(weight: Tensor, bias: Tensor) -> dict[str, Candidate]:
    scale = weight.abs().amax(dim=1) / 127
    integers = (weight / scale[:, None]).round().to(torch.int8)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    packed_fp32 = PackedProduct(weight, bias, fewest_rows=2)
    found: dict[str, Candidate] = {"F.linear": lambda x: F.linear(x, weight, bias), "packed fp32": packed_fp32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_channel(weight, scale.double(), zeros.long(), 0, torch.qint8)
    chosen = torch.backends.quantized.engine
    for engine in torch.backends.quantized.supported_engines:
        torch.backends.quantized.engine = engine
        packed = torch.ops.quantized.linear_prepack(quantized, bias)
        found[f"linear_dynamic, {engine}"] = lambda x, packed=packed: torch.ops.quantized.linear_dynamic.default(x, packed)
    torch.backends.quantized.engine = chosen
    ordered = torch.ops.onednn.qlinear_prepack(integers, None)

    def qlinear(x: Tensor) -> Tensor:
        rows, steps = rounded(x)
        options = (1.0, 0, ordered, scale, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return torch.ops.onednn.qlinear_pointwise.default(rows, *options).mul_(steps).add_(bias)

    def int_mm(x: Tensor) -> Tensor:
        rows, steps = rounded(x)
        return torch._int_mm(rows, integers.T) * steps * scale + bias  # pyright: ignore[reportPrivateImportUsage]

    halves = scale.bfloat16()

    def int8pack_mm(x: Tensor) -> Tensor:
        product = torch._weight_int8pack_mm(x.bfloat16(), integers, halves)  # pyright: ignore[reportPrivateImportUsage]
        return product.float() + bias

    return found | {"_int_mm": int_mm, "onednn.qlinear_pointwise": qlinear, "_weight_int8pack_mm": int8pack_mm}


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    steps = x.abs().amax(dim=1, keepdim=True).div_(127)
    return (x / steps).round_().to(torch.int8), steps


def seconds(product: Candidate, x: Tensor) -> float:
    product(x)
    start = time.perf_counter()
    product(x)
    calls = max(3, int(SECONDS / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        product(x)
    return (time.perf_counter() - start) / calls


@torch.no_grad()
def products() -> list[dict[str, Any]]:
    """The speed of each candidate relative to the faster fp32 product."""
    table = []
    for inputs, outputs in SHAPES + VOCABULARIES:
        generator = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        systems = candidates(weight, bias)
        for rows in ROWS:
            x = torch.randn(rows, inputs, generator=generator)
            times = [{name: seconds(product, x) for name, product in systems.items()} for _ in range(ROUNDS)]
            best = {name: min(each[name] for each in times) for name in systems}
            fp32 = min(best["F.linear"], best["packed fp32"])
            table.append({"inputs": inputs, "outputs": outputs, "rows": rows, "fp32_microseconds": round(fp32 * 1e6, 1)})
            table[-1]["times_fp32"] = {name: round(fp32 / each, 2) for name, each in best.items()}
            print(table[-1], flush=True)
    return table


def translations(folder: Path, sentences: int) -> dict[str, Any]:
    """BLEU of a run's translations by beam 5, and the fraction identical to those in fp32."""
    data = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    source, target = (list(islice(read_lines(data / f"test_2016_flickr.{side}.gz"), sentences)) for side in ("en", "de"))
    run, tokenizer = Run.open(folder), SidedTokenizer(Tokenizers.load(folder))
    found: dict[str, list[str]] = {}
    times: dict[str, list[float]] = {}
    with patch("kilolayer.speed.written.LEAST_INT8", 0):
        models = {"int8, all matrices": run.load_reader(torch.device("cpu"), "int8")}
    models |= {name: run.load_reader(torch.device("cpu"), name) for name in ("int8", "fp32")}
    for _ in range(3):
        for name, model in models.items():
            assert isinstance(model, kl.EncoderDecoder)
            start = time.perf_counter()
            found[name] = [each.text for each in translate_lines(model, tokenizer, source, SearchConfig(beam=5))]
            times.setdefault(name, []).append(time.perf_counter() - start)
    return {
        name: {
            "bleu": round(BLEU().corpus_score(lines, [target]).score, 2),
            "equal_to_fp32": round(sum(a == b for a, b in zip(lines, found["fp32"], strict=True)) / len(lines), 3),
            "bleu_beside_fp32": round(BLEU().corpus_score(lines, [found["fp32"]]).score, 2),
            "seconds": round(min(times[name]), 2),
            "median_seconds": round(median(times[name]), 2),
        }
        for name, lines in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Products in int8, and a trained model's translations in int8.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--run", type=Path, help="a run trained on Multi30k, English to German")
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    document: dict[str, Any] = {
        "command": " ".join(["python benchmarks/decoding/int8.py", *sys.argv[1:]]),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "versions": {"torch": version("torch"), "python": platform.python_version(), "kilolayer": kl.__version__},
        "seed": 0,
    }
    if options.run:
        config = Run.open(options.run).config
        document["model"] = {"steps": config.train.steps, "model": config.table()["model"]}
        document["translations"] = translations(options.run, options.sentences)
        print(document["translations"], flush=True)
    document["products"] = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        document["products"][f"{threads} threads"] = products()
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
