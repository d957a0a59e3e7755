"""Signals in 1,000 layers: the gradient of the first layers over that of the last, for DeepNorm and for Post-LN.

    python examples/thousand_layers.py [--layers 1000] [--dim 32]

Near 1, every layer gets the same gradient. Post-LN's figure scatters over many orders of magnitude by chance of the seed.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.probe.propagation import first_over_last, gradient_profile

VOCABULARY = 64


def gradient_ratio(recipe: str, layers: int, dim: int, seed: int) -> float:
    """First tenth of the layers over the last, at the start, on random tokens."""
    torch.manual_seed(seed)
    model = kl.Encoder(vocab_size=VOCABULARY, dim=dim, heads=4, ffn_dim=2 * dim, layers=layers, recipe=recipe)
    tokens, labels = torch.randint(1, VOCABULARY, (2, 4, 16))
    profile = gradient_profile(model, lambda m: F.cross_entropy(m(tokens).logits.flatten(0, 1), labels.flatten()))
    return first_over_last(profile.encoder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradients through depth: DeepNorm compared with Post-LN.")
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)  # at this width, threads cost more than they give
    print(f"{options.layers} layers, dim {options.dim}: gradient of the first tenth of the layers over the last")
    for recipe in ("deepnorm", "post_ln"):
        start = time.perf_counter()
        ratios = [gradient_ratio(recipe, options.layers, options.dim, seed) for seed in range(3)]
        shown = "  ".join(f"{ratio:.3g}" for ratio in ratios)
        print(f"  {recipe:<10} {shown}    (three seeds, {time.perf_counter() - start:.0f} s)")
    print("Next: kilolayer recipes deepnorm, kilolayer plan --help, README.md")


if __name__ == "__main__":
    main()
