"""Translate sentences with an exported folder in a process that has never imported Kilolayer.

    python benchmarks/export/outside.py transformers FOLDER < task.json > answers.json
    python benchmarks/export/outside.py ctranslate2 FOLDER < task.json > answers.json

The task holds sentences, the beam sizes (1 is greedy) and Kilolayer's length limit as factor and extra. The limit depends on
the source length, so sources of the same length are translated together.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

AT_ONCE = 100
Translate = Callable[[list[str], int, int], list[str]]
"""From sentences, beam size and maximum number of tokens to translations."""


def in_transformers(folder: str) -> tuple[Callable[[str], int], Translate]:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)

    def translate(sentences: list[str], beam: int, limit: int) -> list[str]:
        batch = tokenizer(sentences, return_tensors="pt", padding=True)
        search = {"num_beams": beam, "early_stopping": True, "length_penalty": 1.0} if beam > 1 else {"num_beams": 1}
        found = model.generate(**batch, **search, do_sample=False, max_new_tokens=limit)
        return tokenizer.batch_decode(found, skip_special_tokens=True)

    return lambda sentence: len(tokenizer(sentence).input_ids), translate


def in_ctranslate2(folder: str) -> tuple[Callable[[str], int], Translate]:
    import ctranslate2
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(f"{folder}/tokenizer.model")
    translator = ctranslate2.Translator(folder, compute_type="float32", intra_threads=1, inter_threads=1)

    def translate(sentences: list[str], beam: int, limit: int) -> list[str]:
        sources = [pieces.encode(sentence, out_type=str) for sentence in sentences]
        found = translator.translate_batch(sources, beam_size=beam, length_penalty=1.0, max_decoding_length=limit)
        return [pieces.decode(each.hypotheses[0]) for each in found]

    return lambda sentence: len(pieces.encode(sentence)) + 1, translate


def main() -> None:
    system, folder = sys.argv[1:]
    task: dict[str, Any] = json.load(sys.stdin)
    length_of, translate = {"transformers": in_transformers, "ctranslate2": in_ctranslate2}[system](folder)
    rows = defaultdict(list)
    for row, sentence in enumerate(task["sentences"]):
        rows[length_of(sentence)].append(row)
    answers: dict[str, list[str]] = {}
    seconds = {}
    for beam in task["beams"]:
        start, found = time.perf_counter(), [""] * len(task["sentences"])
        for length, group in rows.items():
            limit = int(task["factor"] * length) + task["extra"]
            for at in range(0, len(group), AT_ONCE):
                some = group[at : at + AT_ONCE]
                for row, text in zip(some, translate([task["sentences"][row] for row in some], beam, limit), strict=True):
                    found[row] = text
        answers[str(beam)], seconds[str(beam)] = found, round(time.perf_counter() - start, 1)
    assert "kilolayer" not in sys.modules
    versions = {name: version(name) for name in (system, "sentencepiece")}
    json.dump({"answers": answers, "seconds": seconds, "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
