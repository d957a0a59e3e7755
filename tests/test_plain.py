"""Without `speed/` and `operators/` the library is right, and slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kilolayer

PROGRAM = """
import itertools
import sys

import torch

import kilolayer as kl

torch.set_num_threads(1)
drops = dict(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1, drop_path=0.1)
sizes = dict(dim=8, heads=2, ffn_dim=12, layers=2, vocab_size=11)
text = torch.tensor([[3, 5, 2, 9, 0], [0, 7, 1, 8, 6]])
count = 0
for recipe, shape, moe in itertools.product(kl.recipes.names(), SHAPES, (None, kl.MoE(experts=4))):
    config = kl.ModelConfig(shape=shape, recipe=kl.recipes.get(recipe), moe=moe, **sizes, **drops)
    model = kl.build_model(config, seed=0).train()
    out = model(text, text) if shape == "encoder_decoder" else model(text)
    (out.logits[text != 0].logsumexp(-1).mean() + out.router_loss).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients), (recipe, shape)
    count += 1
loaded = [name for name in sys.modules if name.startswith(("kilolayer.speed", "kilolayer.operators"))]
assert not loaded, loaded
print(kl.__file__, count)
""".replace("SHAPES", '("encoder", "decoder", "encoder_decoder")')


@pytest.mark.slow
def test_every_model_trains_without_the_two_folders(tmp_path: Path) -> None:
    source = Path(kilolayer.__file__).parent
    copy = tmp_path / "kilolayer"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("speed", "operators"):
        shutil.rmtree(copy / folder)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported, count = done.stdout.split()
    assert Path(imported).parent == copy
    assert int(count) == len(kilolayer.recipes.names()) * 3 * 2
