"""Count the sentences that a run without a plain form translates identically in Kilolayer and with the Auto classes.

    kilolayer train --run runs/sub_ln --model.recipe sub_ln
    python benchmarks/export/remote_class.py benchmarks/export/remote_class.json runs/sub_ln

The sentences come from the built-in grammar, outside its training set. The comparison is of tokens, with greedy search and a
beam of 5, in fp32. Sources of the same length are decoded together, so that each has Kilolayer's length limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import kilolayer as kl
import kilolayer.huggingface.auto_classes  # registers the model with the Auto classes
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import END, Tokenizers
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.runs.run import Run
from kilolayer.tasks.translation.config import TranslationConfig

SEED, BATCH = 18, 250
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 5, "early_stopping": True, "length_penalty": 1.0},
}


def compare(folder: Path, sentences: list[str]) -> dict[str, Any]:
    run = Run.open(folder)
    assert isinstance(run.config, TranslationConfig)
    own, reader, tokenizers = run.config.search, run.load_reader(torch.device("cpu")), Tokenizers.load(folder)
    with tempfile.TemporaryDirectory() as place:
        exported = kl.export(run, to="huggingface", out=Path(place) / "out")
        tokenizer = AutoTokenizer.from_pretrained(exported.folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(exported.folder)
    sources = [[*ids, END] for ids in tokenizers.source.encode(sentences)]
    row: dict[str, Any] = {"run": folder.name, "architecture": exported.architecture, "recipe": run.config.model.recipe.name}
    row["same_source_ids"] = sum(ids == ours for ids, ours in zip(tokenizer(sentences)["input_ids"], sources, strict=True))
    row |= {"sentences": len(sentences), "equal": {}}
    for method, options in SEARCHES.items():
        equal = 0
        for batch in batches(sources):
            limit = own.max_length(batch.shape[1])
            search = SearchConfig(method=method, max_length_factor=0, max_length_extra=limit)  # pyright: ignore
            ours = [found[0].tokens for found in generate(reader, batch, search)]  # pyright: ignore
            theirs = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=limit, **options)
            equal += sum(a == without_end(b[1:]) for a, b in zip(ours, theirs.tolist(), strict=True))
        row["equal"][method] = equal
    return row


def batches(sources: list[list[int]]) -> list[torch.Tensor]:
    """int64 [rows, length]: sources grouped by length."""
    lengths = sorted({len(source) for source in sources})
    groups = [torch.tensor([source for source in sources if len(source) == length]) for length in lengths]
    return [part for group in groups for part in group.split(BATCH)]


def without_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="The same tokens through the Auto classes.")
    parser.add_argument("results", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    sentences = [english for english, _ in pairs(options.sentences, seed=SEED, unseen=True)]
    names = ["torch", "transformers", "tokenizers", "safetensors"]
    document = {
        "command": " ".join(["python benchmarks/export/remote_class.py", *sys.argv[1:]]),
        "versions": {
            "kilolayer": kl.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in names},
        },
        "hardware": f"CPU, {os.cpu_count()} cores",
        "seed": SEED,
        "rows": [compare(folder, sentences) for folder in options.runs],
    }
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
