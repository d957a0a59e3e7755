"""When does a codebook collapse? Small image tokenizers, with and without restarts of codes, on CIFAR-10 and drawn images.

    python benchmarks/tokenizer/collapse.py benchmarks/tokenizer/collapse.json --cifar cifar10_jpeg.tar.xz

Each run takes 200 steps of 32 images of 16 x 16 pixels in fp32, half a minute on one core. The threshold of
`kilolayer.tasks.image_tokenizer.code_use.COLLAPSED` is read from the results. Those here are of a folder with the first 300
training and 40 test images of each class.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilolayer.data.drawn_images import given_or_drawn
from kilolayer.data.images import ImagesConfig, find_images, normalized
from kilolayer.models.build import build_model
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.tasks.image_tokenizer.code_use import perplexity, used_share
from kilolayer.tasks.image_tokenizer.task import decibels

SIZE, STEPS, ROWS, LR, WARMUP = 16, 200, 32, 2e-3, 10
TRAINED, TESTED = 3000, 400
SETTINGS: list[dict[str, Any]] = [
    {"codes": codes, "restart": restart, "distance": distance, "commitment": commitment}
    for codes, distance, commitment in (
        (64, "cosine", 0.05),
        (256, "cosine", 0.05),
        (1024, "cosine", 0.05),
        (256, "euclidean", 0.05),
        (256, "cosine", 1.0),
        (256, "euclidean", 1.0),
    )
    for restart in (0.0, 0.03)
]


def images_of(config: ImagesConfig, cache: Path) -> tuple[Tensor, Tensor]:
    """Images for training and for testing, from -1 to 1: [images, channels, height, width]."""
    parts = find_images(config, cache, labelled=False)
    chosen = np.random.default_rng(0).permutation(len(parts.train))[:TRAINED]
    assert parts.test is not None
    tested = np.random.default_rng(1).permutation(len(parts.test))[:TESTED]
    train, test = (torch.from_numpy(part.pixels[each]) for part, each in ((parts.train, chosen), (parts.test, tested)))
    return normalized(train.permute(0, 3, 1, 2)), normalized(test.permute(0, 3, 1, 2))


def trained(train: Tensor, test: Tensor, seed: int, **options: Any) -> dict[str, float]:
    """Train a tokenizer; returns the PSNR of the test images and how their codes are used."""
    config = ImageTokenizerConfig(height=SIZE, width=SIZE, dim=16, blocks=1, **options)
    model: Any = build_model(config, seed=seed)
    sums, generator = model.step_sums(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0)
    for step in range(1, STEPS + 1):
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - WARMUP) / (STEPS - WARMUP)))
        optimizer.param_groups[0]["lr"] = LR * min(1, step / WARMUP) * decay
        images = train[torch.randint(len(train), (ROWS,), generator=generator)]
        output = model(images)
        loss = (output.images - images).square().mean() + config.commitment * output.quantized.commitment.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums.record(output)
        sums.end_step(torch.tensor(True))
    with torch.inference_mode():
        output = model(test)
    errors = (output.images.clamp(-1, 1) - test).square().flatten(1).mean(dim=1)
    counts = np.bincount(output.quantized.codes.numpy(), minlength=config.codes)
    found = perplexity(counts)
    psnr = float(decibels(errors.double().numpy()).mean())
    return {"psnr": psnr, "perplexity": found, "share": found / config.codes, "used": used_share(counts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--cifar", required=True, help="an archive or a folder with train and test of CIFAR-10")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "kilolayer-collapse")
    options = parser.parse_args()
    joint = "/" if Path(options.cifar).is_dir() else ":"
    configs = {
        "cifar10": ImagesConfig(train=f"{options.cifar}{joint}train", test=f"{options.cifar}{joint}test", size=SIZE),
        "drawn": given_or_drawn(ImagesConfig(size=SIZE), options.cache),
    }
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    document = {"command": " ".join(sys.argv), "torch": torch.__version__, "machine": platform.machine(), "runs": runs}
    for name, config in configs.items():
        train, test = images_of(config, options.cache)
        for setting in SETTINGS:
            runs.append({"images": name, "seed": 1, **setting, **trained(train, test, 1, **setting)})
            print(json.dumps(runs[-1]), flush=True)
            options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
