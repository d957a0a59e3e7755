"""Learning rate, eps and weight decay by what a weight is, against torch's own optimizers with a group for each weight."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.optimizers.recipe_rates import recipe_rates
from kilolayer.optimizers.weight_factors import layer_rates
from kilolayer.recipes.base import Depths, Learned, Part, Place, Plan, Rates, Side
from kilolayer.recipes.pre_ln import PreLN
from kilolayer.recipes.role import Role
from kilolayer.tasks.train_config import TrainConfig
from tests.optimizers.random_steps import take_steps

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True)}
SIZES: dict[str, Any] = {"vocab_size": 9, "dim": 8, "heads": 2, "ffn_dim": 12}
YES, ONE = torch.tensor(True), torch.tensor(1.0)


@dataclass(frozen=True)
class Uneven(PreLN):
    """Every kind of weight has factors of its own, and one learned scale a rate of its own."""

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=True, skip=Learned(1.0, "scalar", rate=0.01), branch=Learned(0.5, "vector"))

    def rates(self, weight: Role | Part, side: Side, depths: Depths, width: int) -> Rates:
        if weight in (Role.QUERY_KEY, Role.VALUE):  # one matrix
            weight = Role.QUERY_KEY
        order = [*Role, *Part].index(weight) + 2
        return Rates(lr=1 / order, eps=1 / (depths.of(side) + order), decay=order / width)


def by_name(name: str, layers: dict[str, int], width: int, source: str) -> Rates:
    """The factors, from the name of a weight."""
    owner, *path = name.split(".")
    side = owner if owner in layers else source if owner == "embedding" else [*layers][0 if "source" in owner else -1]
    last, module = path[-1], name.split(".")[-2]
    kinds = {
        "embedding": Part.EMBEDDING,
        "source_embedding": Part.EMBEDDING,
        "vocabulary": Part.VOCABULARY,
        "at_input": Part.POSITIONS,
        "top_norm": Part.TOP,
        "pre_norm": Part.NORM,
        "skip": Part.SCALE,
        "branch": Part.SCALE,
        "router": Role.ROUTER if last in ("weight", "embeddings") else Part.SCALE,
        "dense": Role.HEAD,
        "query_key_value": Role.QUERY_KEY,
        "query": Role.QUERY_KEY,
        "key_value": Role.QUERY_KEY,
        "input": Role.FFN_IN,
        "output": Role.HEAD if owner == "head" else Role.ATTENTION_OUTPUT if "attention" in name else Role.FFN_OUT,
    }
    kind = Part.BIAS if last == "bias" and isinstance(kinds[module], Role) else kinds[module]
    order = [*Role, *Part].index(kind) + 2
    own = 0.01 if module == "skip" else 1.0
    return Rates(lr=own / order, eps=1 / (layers[side] + order), decay=order / width)


def encoder() -> kl.Encoder:
    torch.manual_seed(3)
    moe = kl.MoE(experts=3, every=2)
    return kl.Encoder(**SIZES, layers=2, recipe=Uneven(), positions="learned", max_length=5, head=kl.Head(), moe=moe)


MODELS = {
    "encoder with head and experts": (encoder, {"encoder": 2}, "encoder"),
    "decoder": (lambda: kl.Decoder(**SIZES, layers=3, recipe=Uneven(), tie_embeddings=False), {"decoder": 3}, "decoder"),
    "one table": (
        lambda: kl.EncoderDecoder(**SIZES, encoder_layers=2, decoder_layers=1, recipe=Uneven()),
        {"encoder": 2, "decoder": 1},
        "encoder",
    ),
    "three tables": (
        lambda: kl.EncoderDecoder(**SIZES, encoder_layers=2, decoder_layers=1, recipe=Uneven(), tie_embeddings=False),
        {"encoder": 2, "decoder": 1},
        "decoder",
    ),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["plain", "fast", "inside another module"])
def test_every_weight_has_the_factors_of_what_it_is(name: str, form: str) -> None:
    make, layers, source = MODELS[name]
    model = make()
    found = recipe_rates({"plain": model, "fast": kl.fast(model), "inside another module": nn.ModuleList([model])}[form])
    for key, weight in model.named_parameters():
        assert astuple(found[weight]) == pytest.approx(astuple(by_name(key, layers, 8, source))), key


def test_the_convolutions_of_a_map_head_are_matrices_of_a_head() -> None:
    """CompleteP's rule for a head: 1 / width on the learning rate of what has a width as its input."""
    sizes: dict[str, Any] = {"image": kl.ImageInput(size=8, patch=4), "dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4}
    recipe = kl.recipes.get("complete_p", base_width=8)
    model = kl.ImageEncoder(**sizes, recipe=recipe, map_head=kl.MapHead(classes=3))
    found = recipe_rates(model)
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convolutions) == 16
    assert {found[part.weight].lr for part in convolutions} == {8 / 16}
    assert {found.get(part.bias, Rates()).lr for part in convolutions if part.bias is not None} == {1.0}


def test_the_vector_for_hidden_patches_moves_as_the_positions_of_its_decoder() -> None:
    image = {"size": 8, "patch": 4, "decoder": {"layers": 2, "dim": 8, "heads": 2, "ffn_dim": 16}}
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4, "vocab_size": 48, "positions": "learned"}
    model = kl.build_model({"shape": "encoder", "image": image, **sizes, "recipe": {"name": "complete_p", "base_width": 4}})
    weights, found, by_layer = dict(model.named_parameters()), recipe_rates(model), layer_rates(model, 0.5)
    mask, positions = weights["decoder.mask_token"], weights["decoder.positions.weight"]
    assert found[mask] == found[positions] != Rates()
    assert by_layer[mask] == by_layer[positions] == 0.5**4


@pytest.mark.parametrize("recipe", ["pre_ln", "deepnorm", "r_fixup"])
def test_recipes_without_rules_leave_all_weights_alike(recipe: str) -> None:
    assert recipe_rates(kl.Decoder(**SIZES, layers=2, recipe=recipe)) == {}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
def test_each_weight_moves_as_a_group_of_torchs_optimizer(kind: Any, sums: bool, layer_decay: float) -> None:
    eps = 0.3  # large enough that its factor shows
    config = TrainConfig(optimizer=kind, lr=0.1, eps=eps, weight_decay=0.3, layer_decay=layer_decay)
    model, peer = encoder(), encoder()
    peer.load_state_dict(model.state_dict())
    ours = make_optimizer(model, config, sums=sums)
    changes: list[dict[str, float]] = []

    def update() -> None:
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        ours.collect()
        norms_of = ours.update(ONE, YES, measures=True)
        ours.clear()
        changes.append({name: float((weight.detach() - before[name]).norm()) for name, weight in model.named_parameters()})
        found = {
            name: float(norm)
            for group, norms in zip(ours.groups, norms_of or [], strict=True)
            for name, norm in zip(group.names, norms, strict=True)
        }
        assert found == pytest.approx(changes[-1], rel=2e-3, abs=1e-6)

    def group(name: str, weight: nn.Parameter) -> dict[str, Any]:
        rates = by_name(name, {"encoder": 2}, 8, "encoder")
        path = name.split(".")
        above = {"embedding": 2, "head": 0}.get(path[0], 2 if path[1] == "positions" else 0)
        if "blocks" in path:
            above = 2 - (int(path[path.index("blocks") + 1]) + 1)
        decayed = weight.dim() > (2 if ".experts." in name else 1)
        lr = 0.1 * rates.lr * layer_decay**above
        return {"params": [weight], "lr": lr, "eps": eps * rates.eps, "weight_decay": 0.3 * rates.decay * decayed}

    groups = [group(name, weight) for name, weight in peer.named_parameters()]
    take_steps(model, update, 8)  # RAdam's rectification begins after the fifth
    take_steps(peer, KINDS[kind](groups, betas=(0.9, 0.98), foreach=False).step, 8)
    torch.testing.assert_close(dict(model.named_parameters()), dict(peer.named_parameters()), rtol=1e-5, atol=1e-6)


def test_state_is_put_back_to_the_bit_whatever_the_groups() -> None:
    config = TrainConfig(optimizer="adamw", lr=0.1, weight_decay=0.3)
    straight, broken = encoder(), encoder()
    whole, first = make_optimizer(straight, config), make_optimizer(broken, config)
    assert len(whole.groups) > 10
    for model, optimizer in ((straight, whole), (broken, first)):
        take_steps(model, lambda optimizer=optimizer: optimizer.update(ONE, YES), 3)
    fresh = make_optimizer(broken, config)
    fresh.load(dict(reversed(first.tensors().items())))
    for model, optimizer in ((straight, whole), (broken, fresh)):
        take_steps(model, lambda optimizer=optimizer: optimizer.update(ONE, YES), 3)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), broken.parameters(), strict=True))


def test_unusual_factors_are_listed_by_stack_and_weight() -> None:
    listed = Uneven().unusual_rates(Depths(decoder=3), 8)
    assert listed["decoder ffn_in"] == by_name("decoder.blocks.0.feedforward.f.input.weight", {"decoder": 3}, 8, "decoder")
    assert listed["decoder feedforward skip"].lr == pytest.approx(0.01 * listed["decoder scale"].lr)
    assert "decoder feedforward branch" not in listed
    assert PreLN().unusual_rates(Depths(3, 3), 8) == {}
