"""What reaches the lowest layers at the start: the gradient of the first twentieth of the layers over that of the last.

Feed-forward sublayers alone, in the stack and stream that the recipe asks for.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl

# Of 1,000 sublayers of width 128: the ratio, and by which factor it may differ for the batch and the width of the networks.
THOUSAND = {
    ("complete_p", 1.0): (1.00, 1.02),
    ("complete_p", 0.5): (1.44, 1.2),
    ("deepnorm", None): (1.00, 1.02),
    ("keel", None): (1.00, 1.02),
    ("lns", None): (11.1, 1.35),
    ("peri_ln", None): (9.0, 1.35),
    ("pre_ln", None): (7.6, 1.35),
}
# At any depth: even by design, or less the higher a layer stands, as what it adds to has grown.
EVEN = ("complete_p", "deepnorm", "keel", "layer_scale", "r_fixup", "t_fixup")
FALLING = ("dlcl", "lns", "mix_ln", "normformer", "peri_ln", "pre_ln", "sub_ln")
RANGES = {**dict.fromkeys(EVEN, (0.9, 1.1)), **dict.fromkeys(FALLING, (2.0, 50.0))}


class Passed(nn.Module):
    """In the place of an attention sublayer: x as it is."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f  # by whose weights a stack tells its dtype

    def forward(self, x: Tensor, *seen: Any) -> Tensor:
        return x


def first_over_last(recipe: str, layers: int, width: int, **options: Any) -> float:
    torch.manual_seed(1)
    if recipe == "pre_ln":
        options["init"] = "xavier"  # what the growth of the sum, and so the ratio, follows from
    model: Any = kl.Encoder(None, width, 1, 4 * width, layers, kl.recipes.get(recipe, **options), positions="none", pad_id=None)
    for block in model.encoder.layers():
        block.self_attention = Passed(block.self_attention.f)  # pyright: ignore[reportAttributeAccessIssue]
    states = model(embeddings=torch.randn(2, 16, width)).states
    (states * torch.randn(states.shape)).sum().backward()
    matrices = [[w.grad for w in block.feedforward.f.parameters() if w.dim() > 1] for block in model.encoder.layers()]
    norms = [math.sqrt(sum(float(gradient.square().sum()) for gradient in each)) for each in matrices]
    part = layers // 20
    return math.hypot(*norms[:part]) / max(math.hypot(*norms[-part:]), 1e-300)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("recipe", [name for name in kl.recipes.names() if name != "rezero"])
def test_no_layer_is_out_of_reach(recipe: str) -> None:
    low, high = RANGES.get(recipe, (1e-3, 1e3))
    assert low < first_over_last(recipe, 60, 32) < high


def test_rezero_starts_with_all_branches_off() -> None:
    assert first_over_last("rezero", 20, 32) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "alpha"), THOUSAND, ids=str)
def test_at_a_thousand_sublayers(recipe: str, alpha: float | None) -> None:
    expected, factor = THOUSAND[recipe, alpha]
    found = first_over_last(recipe, 1000, 128, **({} if alpha is None else {"alpha": alpha}))
    assert expected / factor < found < expected * factor
