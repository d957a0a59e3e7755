"""Multi30k English-German on tokenized, lower-cased text, to compare with a published 41.0 BLEU (see tokenised.toml).

    python benchmarks/translation/tokenised.py prepare FOLDER    # FOLDER/multi30k_tok, of KILOLAYER_DATA/multi30k
    python benchmarks/translation/tokenised.py select OUT        # learning rates x warm-ups, validation loss only
    python benchmarks/translation/tokenised.py final OUT         # the best settings, three seeds, scored once on the test set
    python benchmarks/translation/tokenised.py compare OUT       # the saved translations, every pair of systems

`prepare` needs sacremoses. `select` and `final` read KILOLAYER_DATA/multi30k_tok; the runs of each form a comparison,
runs/tokenised-STAGE. In the results, `bleu` is sacreBLEU's default, which tokenizes again; `bleu_tokens` is computed on the
tokens as they are.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from systems import Benchmark, System

from kilolayer.data.text import read_lines
from kilolayer.evaluate.scores import Bleu
from kilolayer.evaluate.significance import comparison_matrix

TEST = "test_2016_flickr"
SMALL = (2.5e-3, 5e-3), (2000,)  # learning rates, warm-ups
DEEP = (1e-3, 2e-3), (2000, 4000)
SYSTEMS = {
    "deepnorm-18L": System({"model.recipe": "deepnorm", "layers": 18}, *DEEP),
    "deepnorm-12L-256d": System({"model.recipe": "deepnorm", "layers": 12, "model.dim": 256, "model.ffn_dim": 512}, *DEEP),
    "deepnorm-12L": System({"model.recipe": "deepnorm", "layers": 12}, *DEEP),
    "deepnorm-4L": System({"model.recipe": "deepnorm", "layers": 4}, *SMALL),
    "post_ln-4L": System({"model.recipe": "post_ln", "layers": 4}, *SMALL),
}
FINAL = {"train.average": 10, "data.test": TEST}


def prepare(folder: Path) -> None:
    """Normalize punctuation, tokenize and lower-case each side of each part."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer  # pyright: ignore[reportMissingImports]

    folder.mkdir(parents=True, exist_ok=True)
    for language in ("en", "de"):
        normalizer, tokeniser = MosesPunctNormalizer(language), MosesTokenizer(language)
        for part in ("train", "val", TEST):
            lines = read_lines(Path(os.environ["KILOLAYER_DATA"]) / "multi30k" / f"{part}.{language}.gz")
            tokens = (tokeniser.tokenize(normalizer.normalize(line), escape=False, return_str=True) for line in lines)
            (folder / f"{part}.{language}").write_text("".join(f"{line.lower()}\n" for line in tokens), encoding="utf-8")


def score_tokens(run: Path) -> dict[str, Any]:
    """BLEU of a run's tokenized translations against the tokenized reference."""
    reference = Path(os.environ["KILOLAYER_DATA"]) / "multi30k_tok" / f"{TEST}.de"
    hypotheses = list(read_lines(run / "test.en-de.txt"))
    return {"bleu_tokens": asdict(Bleu(tokenize="none").score(hypotheses, list(read_lines(reference))))}


def compare(out: Path) -> None:
    """Paired bootstrap between all runs with translations in hypotheses/, computed on tokens."""
    reference = list(read_lines(Path(os.environ["KILOLAYER_DATA"]) / "multi30k_tok" / f"{TEST}.de"))
    paths = sorted((Path(__file__).parent / "hypotheses").glob("tokenised-*.txt"))
    systems = {path.stem.removeprefix("tokenised-"): list(read_lines(path)) for path in paths}
    matrix = comparison_matrix(systems, reference, Bleu(tokenize="none"))
    command = "python benchmarks/translation/tokenised.py compare OUT"
    (out / "tokenised-significance.json").write_text(json.dumps({"command": command, **asdict(matrix)}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        compare(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["prepare"]:
        prepare(Path(sys.argv[2]) / "multi30k_tok")
    else:
        Benchmark("tokenised", "multi30k_tok", SYSTEMS, FINAL, score_tokens).main("Multi30k, tokenised.", steps=4000)
