"""Measures training memory on a GPU beside what `kilolayer plan` predicts.

    python benchmarks/plan/measure.py benchmarks/plan/results.json

Each case trains two steps with Adam (fused) and reads the allocator's peak in the second. In bf16 the optimizer's state
(fp32 masters and moments) is not allocated: the prediction without it is compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.models.budget import DTYPES, Work, budget

BASE = {"dim": 512, "heads": 8, "ffn_dim": 2048, "vocab_size": 32_768}
LARGE = {"dim": 1024, "heads": 16, "ffn_dim": 4096, "vocab_size": 50_304, "shape": "decoder"}
CASES: list[tuple[dict[str, Any], Work]] = [
    ({**BASE, "layers": 12, "recipe": "deepnorm"}, Work(64, 64, 1, "fp32")),
    ({**BASE, "layers": 100, "recipe": "deepnorm"}, Work(64, 64, 1, "fp32")),
    ({**BASE, "layers": 100, "recipe": "deepnorm"}, Work(64, 64, 1, "bf16")),
    ({**BASE, "layers": 100, "recipe": "deepnorm", "dropout": 0.1}, Work(64, 64, 1, "bf16")),
    ({**BASE, "layers": 24, "recipe": "sub_ln"}, Work(64, 64, 1, "bf16")),
    ({**BASE, "layers": 24, "recipe": "normformer"}, Work(64, 64, 1, "bf16")),
    ({**BASE, "layers": 24, "recipe": "dlcl"}, Work(64, 64, 1, "bf16")),
    ({**BASE, "layers": 24, "recipe": "admin", "positions": "rotary"}, Work(64, 64, 1, "bf16")),
    ({**LARGE, "layers": 24, "recipe": "pre_ln", "pad_id": None}, Work(8, 1024, 1, "bf16")),
    ({**LARGE, "layers": 24, "recipe": "deepnorm", "activation": "swiglu"}, Work(8, 1024, 1, "fp32")),
]


def measure(config: kl.ModelConfig, work: Work) -> int:
    """The peak of allocated bytes in one training step."""
    model = kl.build_model(config, device="cuda", dtype=DTYPES[work.precision])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True) if work.precision == "fp32" else None
    source, target, labels = torch.randint(1, config.vocab_size or 0, (3, work.batch, work.length), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        logits = (model(source, target) if isinstance(model, kl.EncoderDecoder) else model(source)).logits
        assert logits is not None
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training memory, measured and predicted.")
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    rows = []
    for table, work in CASES:
        config = kl.ModelConfig(**{**table, "recipe": kl.recipes.get(table["recipe"])})
        training = budget(config, work).training
        predicted = training.peak - (training.optimizer if work.precision == "bf16" else 0)
        measured = measure(config, work)
        gc.collect()
        torch.cuda.empty_cache()
        ratio = predicted / measured
        rows.append({"model": table, "batch": work.batch, "length": work.length, "precision": work.precision})
        rows[-1] |= {"measured_bytes": measured, "predicted_bytes": predicted, "ratio": round(ratio, 4)}
        print(table, work, f"measured {measured / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB: {ratio:.3f}")
    document = {
        "command": "python benchmarks/plan/measure.py benchmarks/plan/results.json",
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kilolayer": kl.__version__},
        "rows": rows,
    }
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
