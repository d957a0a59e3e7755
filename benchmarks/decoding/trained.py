"""Decode the Multi30k test set with a trained model in fp32 and bf16, and compare with Hugging Face's `generate`.

    KILOLAYER_DATA=... python benchmarks/decoding/trained.py benchmarks/decoding/trained.json

A DeepNorm 18L-18L model, d 512, is trained on English-German (for `--steps`) and folded into a plain Post-LN model, whose
weights are copied into a MarianMTModel. Both decode with beam 5 in batches of 64 sentences of similar length, in both
precisions. The comparison is of whole sentences, token by token, and of BLEU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import measure
import torch
from sacrebleu import BLEU
from torch import Tensor

import kilolayer as kl
from kilolayer.data.text import read_lines
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.runs.run import Precision, Run

BEAM, BATCH, LONGEST = 5, 64, 96
CONFIG = Path(__file__).parents[1] / "translation" / "multi30k.toml"
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

Outputs = list[list[int]]


def train(folder: Path, data: Path, layers: int, dim: int, steps: int) -> None:
    sizes = {"layers": layers, "dim": dim, "heads": dim // 64, "ffn_dim": 4 * dim}
    options = [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    schedule = ["--train.steps", str(steps), "--train.warmup_steps", str(steps // 2), "--train.lr", "3e-4"]
    named = ["--run", str(folder), "--data.folder", str(data), "--train.valid_every", str(steps), "--train.layers_every", "0"]
    subprocess.run([sys.executable, "-m", "kilolayer", "train", str(CONFIG), *named, *options, *schedule], check=True)


def in_batches(sources: list[list[int]], device: torch.device) -> list[tuple[list[int], Tensor]]:
    """Batches of sentences of similar length: their indices, and the sentences, padded on the right."""
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    batches = []
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        width = len(sources[places[-1]])
        rows = [sources[place] + [measure.PAD] * (width - len(sources[place])) for place in places]
        batches.append((places, torch.tensor(rows, device=device)))
    return batches


def decode(batches: list[tuple[list[int], Tensor]], system: Callable[[Tensor], Outputs]) -> tuple[Outputs, float]:
    """A system's output for each sentence, and the seconds of its second round."""
    found: dict[int, list[int]] = {}
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for places, source in batches:
            found |= dict(zip(places, system(source), strict=True))
        seconds = time.perf_counter() - start
    return [found[place] for place in sorted(found)], seconds


def equal(some: Outputs, others: Outputs) -> float:
    return sum(a == b for a, b in zip(some, others, strict=True)) / len(some)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding of a trained model in two precisions, compared with Hugging Face.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--run", type=Path, default=Path("runs/decoding"), help="trained first if it does not exist")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    data = Path(os.environ["KILOLAYER_DATA"]) / "multi30k"
    if not options.run.exists():
        train(options.run, data, options.layers, options.dim, options.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run, tokenizers = Run.open(options.run), Tokenizers.load(options.run)
    lines, references = (
        list(islice(read_lines(data / f"test_2016_flickr.{side}.gz"), options.sentences)) for side in ("en", "de")
    )
    batches = in_batches([[*tokens, measure.EOS] for tokens in tokenizers.source.encode(lines)], device)
    sizes = {"VOCABULARY": tokenizers.target.vocab_size, "LAYERS": options.layers, "MOST": LONGEST}
    measure.__dict__.update(sizes, DIM=options.dim, HEADS=options.dim // 64, FFN_DIM=4 * options.dim)
    outputs: dict[str, Outputs] = {}
    systems: dict[str, dict[str, Any]] = {}
    for precision, dtype in DTYPES.items():
        ours = run.load_reader(device, precision)
        plain = run.load_reader(torch.device("cpu"))
        assert isinstance(ours, kl.EncoderDecoder)
        assert isinstance(plain, kl.EncoderDecoder)
        marian = measure.as_marian(plain).to(device, dtype)  # pyright: ignore[reportArgumentType]
        for name, system in (
            (f"ours {precision}", lambda source, ours=ours: measure.ours_on(ours, source, BEAM)),
            (f"theirs {precision}", lambda source, marian=marian: measure.theirs_on(marian, source, BEAM)),
        ):
            outputs[name], seconds = decode(batches, system)
            bleu = BLEU().corpus_score(tokenizers.target.decode(outputs[name]), [references]).score
            systems[name] = {"bleu": bleu, "seconds": seconds, "sentences_per_second": len(lines) / seconds}
            print(name, systems[name], flush=True)
    pairs = [("ours fp32", "theirs fp32"), ("ours bf16", "theirs bf16"), ("ours bf16", "ours fp32")]
    pairs.append(("theirs bf16", "theirs fp32"))
    document = {
        "command": " ".join(["python benchmarks/decoding/trained.py OUT", *sys.argv[2:]]),
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "sentences": len(lines),
        "systems": systems,
        "equal": {f"{a}, {b}": equal(outputs[a], outputs[b]) for a, b in pairs},
    }
    options.results.write_text(json.dumps(document, indent=1) + "\n")
    print(document["equal"])


if __name__ == "__main__":
    main()
