"""The initial weights that a recipe names, beside torch's own initializers in the way that the cited code calls them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import KilolayerError
from kilolayer.recipes.base import Depths
from kilolayer.recipes.init import INITS

DIM, FFN = 256, 768
Made = dict[str, tuple[Tensor, Tensor]]
"""By projection: weight and bias."""


def linear(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    made = nn.Linear(columns, rows)
    return made.weight.detach(), made.bias.detach()


def xavier(rows: int, columns: int, gain: float = 1.0, normal: bool = False) -> tuple[Tensor, Tensor]:
    weight = torch.empty(rows, columns)
    (nn.init.xavier_normal_ if normal else nn.init.xavier_uniform_)(weight, gain)
    return weight, torch.zeros(rows)


def of_fairseq() -> Made:
    """`MultiheadAttention.reset_parameters` touches weights and the output's bias; the network is left as nn.Linear has it."""
    inputs = [(xavier(DIM, DIM, 1 / math.sqrt(2))[0], linear(DIM, DIM)[1]) for _ in range(3)]
    network = {"in": linear(FFN, DIM), "out": linear(DIM, FFN)}
    return {**dict(zip(("query", "key", "value"), inputs, strict=True)), "output": xavier(DIM, DIM), **network}


def of_fairseq_0_8() -> Made:
    """One matrix of three times the width for query, key and value; the helper `Linear` is Xavier's with bias 0."""
    joint = xavier(3 * DIM, DIM)[0].chunk(3)
    inputs = {name: (weight, torch.zeros(DIM)) for name, weight in zip(("query", "key", "value"), joint, strict=True)}
    return {**inputs, "output": xavier(DIM, DIM), "in": xavier(FFN, DIM), "out": xavier(DIM, FFN)}


def of_torch() -> Made:
    names = ("query", "key", "value", "output")
    return {**{name: linear(DIM, DIM) for name in names}, "in": linear(FFN, DIM), "out": linear(DIM, FFN)}


def of_bert() -> Made:
    shapes = {**dict.fromkeys(("query", "key", "value", "output"), (DIM, DIM)), "in": (FFN, DIM), "out": (DIM, FFN)}
    return {name: (nn.init.normal_(torch.empty(shape), std=0.02), torch.zeros(shape[0])) for name, shape in shapes.items()}


def of_xavier(normal: bool = True) -> Made:
    shapes = {**dict.fromkeys(("query", "key", "value", "output"), (DIM, DIM)), "in": (FFN, DIM), "out": (DIM, FFN)}
    return {name: xavier(*shape, normal=normal) for name, shape in shapes.items()}


THEIRS: dict[str, Callable[[], Made]] = {
    "xavier": of_xavier,
    "xavier_uniform": lambda: of_xavier(normal=False),
    "fairseq": of_fairseq,
    "fairseq_0.8": of_fairseq_0_8,
    "torch": of_torch,
    "bert": of_bert,
}


def ours(model: nn.Module, block: str = "encoder.blocks.1") -> Made:
    parts = dict(model.get_submodule(block).named_parameters())
    weights, biases = (parts[f"self_attention.f.query_key_value.{kind}"].detach().chunk(3) for kind in ("weight", "bias"))
    found = dict(zip(("query", "key", "value"), zip(weights, biases, strict=True), strict=True))
    others = {"output": "self_attention.f.output", "in": "feedforward.f.input", "out": "feedforward.f.output"}
    return found | {name: (parts[f"{path}.weight"].detach(), parts[f"{path}.bias"].detach()) for name, path in others.items()}


def assert_drawn_alike(one: Tensor, other: Tensor, where: str) -> None:
    """Deviation and extremes, which tell a uniform distribution from a normal one; a bias has few values."""
    few = one.dim() == 1
    assert float(one.std()) == pytest.approx(float(other.std()), rel=0.12 if few else 0.02), where
    assert float(one.abs().max()) == pytest.approx(float(other.abs().max()), rel=0.25), where


def test_every_init_has_its_counterpart() -> None:
    assert set(THEIRS) == set(INITS)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("meta", [False, True], ids=["direct", "meta"])
@pytest.mark.parametrize("init", THEIRS)
def test_matrices_and_biases_are_drawn_as_the_cited_code_draws_them(init: str, meta: bool) -> None:
    torch.manual_seed(0)
    recipe = kl.recipes.get("post_ln", init=init)
    model = kl.EncoderDecoder(100, DIM, 4, FFN, 2, 2, recipe, device="meta" if meta else None)
    model = model.materialize("cpu") if meta else model
    theirs = THEIRS[init]()
    for name, (weight, bias) in ours(model).items():
        assert_drawn_alike(weight, theirs[name][0], name)
        assert_drawn_alike(bias, theirs[name][1], f"bias of {name}")


@pytest.mark.parametrize(("init", "deviation"), [("bert", 0.02), ("torch", DIM**-0.5)])
def test_the_tables_of_the_vocabulary(init: str, deviation: float) -> None:
    model = kl.Decoder(2000, DIM, 4, FFN, 1, kl.recipes.get("pre_ln", init=init), tie_embeddings=False)
    for name, weight in model.named_parameters():
        if name in ("embedding.weight", "vocabulary.weight"):
            assert float(weight.detach().std()) == pytest.approx(deviation, rel=0.02)


def test_a_recipes_gain_multiplies_weights_and_biases() -> None:
    """TorchScale divides whatever nn.Linear drew by its constant, biases included."""
    torch.manual_seed(0)
    recipe = kl.recipes.get("deepnorm", init="torch")
    beta = recipe.constants("encoder", Depths(2, 2)).beta
    made, plain = ours(kl.EncoderDecoder(100, DIM, 4, FFN, 2, 2, recipe)), of_torch()
    for name in ("value", "output", "in", "out"):
        assert_drawn_alike(made[name][0], beta * plain[name][0], name)
        assert_drawn_alike(made[name][1], beta * plain[name][1], f"bias of {name}")
    assert_drawn_alike(made["query"][0], plain["query"][0], "query")


def test_experts_start_as_dense_networks_do() -> None:
    torch.manual_seed(0)
    recipe = kl.recipes.get("pre_ln", init="torch")
    model = kl.Decoder(100, DIM, 4, FFN, 1, recipe, moe=kl.MoE(experts=2, every=1))
    experts = model.get_submodule("decoder.blocks.0.feedforward.f.experts")
    plain = of_torch()
    for name, part in (("in", "input"), ("out", "output")):
        for weight, bias in zip(
            *(getattr(experts.get_submodule(part), kind).detach() for kind in ("weight", "bias")), strict=True
        ):
            assert_drawn_alike(weight, plain[name][0], name)
            assert_drawn_alike(bias, plain[name][1], name)


def test_adapted_models_start_as_the_recipe_says() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 4, FFN, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    kl.adapt(model, kl.recipes.get("post_ln", init="bert"))
    first = dict(model.layers[0].named_parameters())
    for name in ("linear1.weight", "self_attn.in_proj_weight"):
        assert float(first[name].detach().std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("name", "depths", "init"),
    [
        ("post_ln", Depths(6, 6), "torch"),
        ("pre_ln", Depths(6, 6), "torch"),
        ("normformer", Depths(6, 6), "fairseq"),
        ("deepnorm", Depths(6, 6), "xavier"),
        ("sub_ln", Depths(6, 6), "xavier"),
        ("ds_init", Depths(6, 6), "xavier_uniform"),
        ("admin", Depths(6, 6), "xavier_uniform"),
    ],
)
def test_defaults(name: str, depths: Depths, init: str) -> None:
    recipe = kl.recipes.get(name)
    assert recipe.default_init(depths) == init
    assert INITS[init].text in recipe.notes(depths)


def test_admin_released_starts_as_its_code() -> None:
    assert kl.recipes.get("admin", start="released").default_init(Depths(6, 6)) == "fairseq_0.8"


def test_an_unknown_init_names_the_known_ones() -> None:
    with pytest.raises(KilolayerError, match=r"fairseq_0\.8"):
        kl.recipes.get("post_ln", init="glorot")
