"""The gradient of the last decoder layer at the start, of Post-LN and of Post-LN-init, with the modules of torch alone.

python benchmarks/reproduce/figure2_check.py      # writes figure2-check.json, one minute on one core

`kilolayer reproduce deepnet-figure2` finds it smaller with Post-LN-init before training, where the paper has it larger. This is
the same measurement without a line of Kilolayer: nn.Transformer, Xavier's normal weights, those of layer l of N divided by
N - l + 1 in Post-LN-init, sinusoidal positions, and token frequencies of Zipf in place of a corpus.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, FFN, VOCABULARY, SENTENCES, LENGTH = 128, 4, 512, 4000, 64, 10
DEPTHS, SEEDS = (6, 12, 18, 24), (1, 2, 3)


def gradient(layers: int, scaled: bool, seed: int) -> float:
    """The norm of the gradient of the last decoder layer on one batch, with label smoothing."""
    torch.manual_seed(seed)
    model = nn.Transformer(DIM, HEADS, layers, layers, FFN, 0.0, batch_first=True, norm_first=False)
    model.encoder.norm = model.decoder.norm = None
    vectors = nn.Embedding(VOCABULARY, DIM)
    nn.init.normal_(vectors.weight, std=DIM**-0.5)
    for stack in (model.encoder, model.decoder):
        for index, layer in enumerate(stack.layers):
            start(layer, 1 / (layers - index) if scaled else 1.0)
    frequencies = 1 / torch.arange(1.0, VOCABULARY + 1)
    source = torch.multinomial(frequencies, SENTENCES * LENGTH, replacement=True).view(SENTENCES, LENGTH)
    target = torch.multinomial(frequencies, SENTENCES * (LENGTH + 1), replacement=True).view(SENTENCES, LENGTH + 1)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    states = model(embedded(vectors, source), embedded(vectors, target[:, :-1]), tgt_mask=causal)
    logits = states @ vectors.weight.T
    F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1).backward()
    squares = [weight.grad.square().sum() for weight in model.decoder.layers[-1].parameters() if weight.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def start(layer: nn.Module, factor: float) -> None:
    """Xavier's weights times a factor; the projections of queries, keys and values are matrices of their own."""
    for part in layer.modules():
        if isinstance(part, nn.MultiheadAttention):
            matrices = [*part.in_proj_weight.data.split(DIM), part.out_proj.weight.data]
        elif type(part) is nn.Linear:
            matrices = [part.weight.data]
        else:
            continue
        for matrix in matrices:
            nn.init.xavier_normal_(matrix).mul_(factor)
    for name, bias in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(bias)


def embedded(vectors: nn.Embedding, tokens: Tensor) -> Tensor:
    """Token vectors times the root of the dim, plus sinusoidal positions: [sentences, length, dim]."""
    angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, DIM, 2) / DIM)
    return vectors(tokens) * DIM**0.5 + torch.cat([angles.sin(), angles.cos()], dim=1)


def main() -> None:
    torch.set_num_threads(1)
    names = {"Post-LN": False, "Post-LN-init": True}
    found = {
        name: {layers: [round(gradient(layers, scaled, seed), 4) for seed in SEEDS] for layers in DEPTHS}
        for name, scaled in names.items()
    }
    document = {
        "command": "python benchmarks/reproduce/figure2_check.py",
        "torch": torch.__version__,
        "seeds": SEEDS,
        "found": found,
    }
    Path(__file__).with_name("figure2-check.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
