"""Count the sentences that a run translates identically in Kilolayer, Transformers and CTranslate2.

    kilolayer train --run runs/deepnorm --model.recipe deepnorm     # and admin, pre_ln
    python benchmarks/export/same_sentences.py benchmarks/export/same_sentences.json runs/deepnorm runs/admin runs/pre_ln

The sentences come from the built-in grammar, outside its training set. Each system translates them with greedy search and a
beam of 5 from an exported folder, in fp32, in a separate process that has not imported Kilolayer (outside.py). Rows of other
runs in an existing file are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kilolayer as kl
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.translate import translate_lines
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runs.run import Run
from kilolayer.tasks.translation.config import TranslationConfig

BEAMS = (1, 5)
SEED = 18
SYSTEMS = {"transformers": "huggingface", "ctranslate2": "ctranslate2"}
SHOWN = 10


def in_kilolayer(run: Run, sentences: list[str], beam: int) -> list[str]:
    assert isinstance(run.config, TranslationConfig)
    model = run.load_reader(torch.device("cpu"))
    assert isinstance(model, EncoderDecoder)
    own = run.config.search
    method: dict[str, Any] = {"method": "greedy"} if beam == 1 else {"method": "beam", "beam": beam, "length_penalty": 1.0}
    search = SearchConfig(**method, max_length_factor=own.max_length_factor, max_length_extra=own.max_length_extra)
    found = translate_lines(model, Tokenizers.load(run.folder).source, sentences, search)
    return [answer.text for answer in found]


def outside(system: str, folder: Path, task: dict[str, Any]) -> dict[str, Any]:
    """The answers of a process without Kilolayer on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("outside.py")
    command = [sys.executable, str(script), system, str(folder)]
    done = subprocess.run(command, input=json.dumps(task), text=True, stdout=subprocess.PIPE, env=environment, check=True)
    return json.loads(done.stdout)


def compare(folder: Path, sentences: list[str], references: list[str]) -> dict[str, Any]:
    run = Run.open(folder)
    assert isinstance(run.config, TranslationConfig)
    own = {beam: in_kilolayer(run, sentences, beam) for beam in BEAMS}
    search = run.config.search
    task = {"sentences": sentences, "beams": BEAMS, "factor": search.max_length_factor, "extra": search.max_length_extra}
    row: dict[str, Any] = {
        "run": folder.name,
        "model": f"{run.config.model.depths.title}, {run.config.model.widths}, {run.config.model.recipe.name}",
        "kilolayer_equals_reference": {str(beam): count_equal(own[beam], references) for beam in BEAMS},
        "systems": {},
    }
    with tempfile.TemporaryDirectory() as place:
        for system, target in SYSTEMS.items():
            exported = kl.export(run, to=target, out=Path(place) / system)  # pyright: ignore[reportArgumentType]
            found = outside(system, exported.folder, task)
            row["systems"][system] = {
                "architecture": exported.architecture,
                "equal": {str(beam): count_equal(own[beam], found["answers"][str(beam)]) for beam in BEAMS},
                "different": [
                    {"beam": beam, "source": source, "kilolayer": ours, system: theirs}
                    for beam in BEAMS
                    for source, ours, theirs in zip(sentences, own[beam], found["answers"][str(beam)], strict=True)
                    if ours != theirs
                ][:SHOWN],
                "versions": found["versions"],
            }
    return row


def count_equal(ours: list[str], theirs: list[str]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="The same sentences by every system.")
    parser.add_argument("results", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--sentences", type=int, default=1000)
    options = parser.parse_args()
    chosen = list(pairs(options.sentences, seed=SEED, unseen=True))
    sentences, references = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
    for folder in options.runs:
        row = {"command": " ".join(["python benchmarks/export/same_sentences.py", *sys.argv[1:]])}
        row |= compare(folder, sentences, references)
        before = json.loads(options.results.read_text())["rows"] if options.results.exists() else []
        document = {
            "versions": {"kilolayer": kl.__version__, "torch": version("torch"), "python": platform.python_version()},
            "hardware": f"CPU, {os.cpu_count()} cores",
            "seed": SEED,
            "sentences": options.sentences,
            "rows": [*(each for each in before if each["run"] != folder.name), row],
        }
        options.results.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
