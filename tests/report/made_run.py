"""A run folder as a training would leave it: curves, norms of every layer, scores, samples, and a few things gone wrong."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

CONFIG = """\
[model]
shape = "encoder_decoder"
encoder_layers = 18
decoder_layers = 12
dim = 64
heads = 4
ffn_dim = 128
vocab_size = 500

[model.recipe]
name = "deepnorm"

[train]
lr = 1e-3
steps = 2000
"""

SAMPLES = [
    {
        "source": "A small dog runs in the park.",
        "reference": "Ein kleiner Hund läuft im Park.",
        "hypothesis": "Ein Hund läuft im Park.",
    },
    {
        "source": "<script>alert(1)</script> & co",
        "reference": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
        "hypothesis": "</dd></dl><b>bold</b>",
    },
]

SCORES = {
    "test": {
        "bleu": {"name": "BLEU", "value": 31.8765, "signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"},
        "chrf": {"value": 57.1234, "signature": "nrefs:1|case:mixed|eff:yes|nc:6|nw:2|space:no|version:2.6.0"},
        "ter": {"value": 48.5, "signature": "nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:2.6.0"},
        "meteor": {"name": "METEOR", "reason": "nltk is not installed (pip install nltk)"},
    },
    "length_buckets": [
        {"label": "0-9", "low": 0, "high": 9, "sentences": 210, "bleu": 33.1},
        {"label": "10-19", "low": 10, "high": 19, "sentences": 640, "bleu": 31.7},
        {"label": "20-29", "low": 20, "high": 29, "sentences": 120, "bleu": 28.4},
        {"label": "30+", "low": 30, "high": None, "sentences": 0, "bleu": None},
    ],
    "frequency_buckets": [
        {"label": label, "low": 0, "high": 0, "matched": 10, "reference": 20, "hypothesis": 15, "f1": f1}
        for label, f1 in zip(
            ["0", "1", "2", "3", "4", "5-9", "10-99", "100-999", "1000+"],
            [0.05, 0.18, 0.22, 0.31, 0.3, 0.38, 0.47, 0.61, 0.74],
            strict=True,
        )
    ],
}


def entries(steps: int = 2000, every: int = 20) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of a run of `steps` steps."""
    generator = random.Random(0)
    found: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        nll = 1.5 + 6 * math.exp(-step / 400) + generator.gauss(0, 0.05)
        found.append(
            {
                "kind": "train", "step": step, "loss": nll + 0.4, "nll": nll, "lr": 1e-3 * min(step / 200, (200 / step) ** 0.5),
                "grad_norm": 0.8 * math.exp(generator.gauss(0, 0.3)) * (30 if step == 3 * every else 1),
                "tokens_per_second": 12000 + generator.gauss(0, 300), "epoch": step / 453, "seconds": step * 0.11,
                "skipped": 0, "clipped": 1,
            }
        )  # fmt: skip
        if step % (10 * every) == 0:
            loss = 1.9 + 5.5 * math.exp(-step / 450)
            bleu = 32 * (1 - math.exp(-step / 600))
            directions = {"en-de": {"loss": loss, "bleu": bleu}, "de-en": {"loss": loss - 0.1, "bleu": bleu + 2}}
            found.append(
                {
                    "kind": "valid",
                    "step": step,
                    "loss": loss,
                    "perplexity": math.exp(loss),
                    "bleu": bleu,
                    "directions": directions,
                }
            )
            depth = {"encoder": 18, "decoder": 12}
            found.append(
                {
                    "kind": "layers", "step": step,
                    "gradient": {s: [0.02 * math.exp(generator.gauss(0, 0.2)) for _ in range(n)] for s, n in depth.items()},
                    "update": {s: [1e-3 * (1 + layer / n) for layer in range(n)] for s, n in depth.items()},
                    "residual": {s: [8.0 + 0.1 * layer for layer in range(n)] for s, n in depth.items()},
                }
            )  # fmt: skip
    found.append({"kind": "event", "step": 57, "text": "step 57 skipped: gradient is not finite"})
    return found


BRIEF = [
    {"kind": "train", "step": 10, "loss": 5.0, "seconds": 4.0},
    {"kind": "train", "step": 20, "loss": 4.0, "seconds": 8.0},
]


def make_run(folder: Path, metrics: list[dict[str, Any]] = BRIEF, *, analysis: bool = False) -> Path:
    """A run in `folder` with every file; few plots unless asked for, each takes a tenth of a second."""
    folder.mkdir(parents=True, exist_ok=True)
    scores = SCORES if analysis else {"test": SCORES["test"]}
    log = "12:00 start\n12:01 WARNING 3 pairs were longer than 256 tokens <cut>\n12:09 done\n"
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in metrics), encoding="utf-8")
    (folder / "log.txt").write_text(log, encoding="utf-8")
    (folder / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    (folder / "samples.json").write_text(json.dumps(SAMPLES), encoding="utf-8")
    return folder
