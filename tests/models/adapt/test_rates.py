"""Parameter groups of adapted models: the rates of our own model under the same recipe, weight by weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.models.adapt.stacks import find
from kilolayer.recipes.base import Depths, Part, Place, Plan, Rates, Side
from kilolayer.recipes.role import Role
from tests.models.adapt.adaptable_models import BUILDERS, DIM, LAYERS, bart, bert, gpt2, t5, torch_encoder, vit
from tests.models.adapt.test_same_as_ours import final_norms, name_of
from tests.models.adapt.twins import our_model, twins

VALUES = ("lr", "weight_decay", "eps")
KINDS: list[Role | Part] = [*Role, *Part]


class Apart(kl.recipes.Recipe):
    """Gives every kind of weight of each stack factors of its own."""

    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=True, inner_norm=True, head_scale=place.kind.endswith("attention"), post_norm=True)

    def rates(self, weight: Role | Part, side: Side, depths: Depths, width: int) -> Rates:
        kind = Role.QUERY_KEY if weight is Role.VALUE else weight
        number = KINDS.index(kind) + (100 if side == "decoder" else 10)
        return Rates(number, number / 7, number / 3)


class ApartPost(Apart):
    def plan(self, place: Place) -> Plan:
        return Plan(pre_norm=True, out_norm=True)

    def input_norm(self, side: Side, depths: Depths) -> bool:
        return True


def mark(model: nn.Module, **options: Any) -> None:
    """Put the options of its group beside each weight, as tensors of its shape."""
    groups = kl.parameter_groups(model, **options)
    weights = [weight for group in groups for weight in group["params"]]
    assert len(weights) == len(set(weights))
    assert set(weights) == {weight for weight in model.parameters() if weight.requires_grad}
    for group in groups:
        for weight in group["params"]:
            for name in VALUES:
                setattr(weight, name, torch.full_like(weight, group.get(name, 1e-8)))


POST = ["nn.TransformerEncoder", "nn.TransformerDecoder", "nn.Transformer", "BERT", "RoBERTa", "BART", "Marian"]
PRE = [f"nn.Transformer{part}, norm_first" for part in ("Encoder", "Decoder", "")] + ["GPT-2", "ViT"]
CASES = [
    *((title, recipe) for title in POST for recipe in ("keel", kl.recipes.parse(ApartPost()))),
    *((title, kl.recipes.parse(Apart())) for title in PRE),
    *((title, kl.recipes.get("complete_p", base_width=DIM, base_depth=1, alpha=0.5)) for title in PRE),
    *((title, "layer_scale") for title in PRE),
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("title", "recipe"), CASES, ids=[f"{title}-{name_of(recipe)}" for title, recipe in CASES])
def test_each_weight_has_the_rates_of_its_twin(title: str, recipe: Any) -> None:
    model = BUILDERS[title]()
    kl.adapt(model, recipe, seed=1)
    found = find(model)
    ours = our_model(found, recipe, 1e-5, "relu")
    for each in (model, ours):
        mark(each, lr=1e-2, weight_decay=0.1, layer_decay=0.5)
    norms = {side: norm for side, norm in final_norms(model).items() if norm is not None}
    pairs = [*twins(found, ours, norms)]
    assert pairs
    for theirs, own in pairs:
        for name in VALUES:
            torch.testing.assert_close(theirs(name), own(name), rtol=1e-12, atol=0)


def rates_of(model: nn.Module, **options: Any) -> dict[str, dict[str, float]]:
    """The options of each weight by its name."""
    names = {weight: name for name, weight in model.named_parameters()}
    groups = kl.parameter_groups(model, lr=1.0, weight_decay=1.0, **options)
    return {names[weight]: group for group in groups for weight in group["params"]}


def test_six_layers_of_torch_have_six_rates() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 6)
    kl.adapt(model, "deepnorm")
    found = rates_of(model, layer_decay=0.5)
    assert [found[f"layers.{index}.linear1.weight"]["lr"] for index in range(6)] == [0.5**index for index in range(5, -1, -1)]


BELOW = {
    "BERT": (lambda: bert("BertForMaskedLM"), "deepnorm", ("bert.embeddings.",), "cls.predictions.transform.dense.weight"),
    "GPT-2": (lambda: gpt2("GPT2LMHeadModel"), "sub_ln", ("transformer.wte", "transformer.wpe"), "transformer.ln_f.weight"),
    "BART": (
        lambda: bart("BartModel"),
        "deepnorm",
        ("shared", "encoder.embed", "decoder.embed", "encoder.layernorm_e", "decoder.layernorm_e"),
        None,
    ),
    "T5": (lambda: t5("T5Model"), "sub_ln", ("shared",), "decoder.final_layer_norm.weight"),
    "ViT": (lambda: vit("ViTForImageClassification"), "layer_scale", ("vit.embeddings.",), "classifier.weight"),
    "torch's in a module of one's own": (
        lambda: nn.ModuleDict({"table": nn.Embedding(5, DIM), "stack": torch_encoder(), "head": nn.Linear(DIM, 2)}),
        "keel",
        ("table", "stack.layers.0.recipe_self_attention.input_norm"),
        "head.weight",
    ),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", BELOW)
def test_what_is_below_the_layers_decays_most_and_what_is_above_not_at_all(name: str) -> None:
    build, recipe, below, above = BELOW[name]
    model = build()
    for adapted in (False, True):
        if adapted:
            kl.adapt(model, recipe)
        found = rates_of(model, layer_decay=0.5)
        lowest = {each for each, group in found.items() if group["lr"] == 0.5**LAYERS}
        assert lowest == {each for each in found if each.startswith(below)}
        assert above is None or found[above]["lr"] == 1


def test_the_weights_around_the_layers_have_the_rates_of_their_kind() -> None:
    model = gpt2("GPT2LMHeadModel", tie_word_embeddings=False)
    kl.adapt(model, kl.recipes.parse(Apart()))
    found = {name: group["lr"] - 100 for name, group in rates_of(model).items()}
    for name, kind in {
        "transformer.wte.weight": Part.EMBEDDING,
        "transformer.wpe.weight": Part.POSITIONS,
        "transformer.ln_f.weight": Part.TOP,
        "lm_head.weight": Part.VOCABULARY,
    }.items():
        assert KINDS[int(found[name])] is kind
    model = bart("BartForSequenceClassification")
    kl.adapt(model, kl.recipes.parse(ApartPost()))
    found = {name: group["lr"] for name, group in rates_of(model).items()}
    for name, kind, first in (
        ("model.shared.weight", Part.EMBEDDING, 10),
        ("model.encoder.embed_positions.weight", Part.POSITIONS, 10),
        ("model.decoder.embed_positions.weight", Part.POSITIONS, 100),
        ("model.decoder.layernorm_embedding.weight", Part.TOP, 100),
        ("classification_head.dense.weight", Role.HEAD, 100),
    ):
        assert found[name] == first + KINDS.index(kind)


def test_complete_ps_eps_is_in_every_group() -> None:
    model = gpt2("GPT2LMHeadModel")
    kl.adapt(model, kl.recipes.get("complete_p", base_width=DIM, base_depth=1))
    assert {group["eps"] for group in kl.parameter_groups(model, lr=1e-3)} == {1e-8 / LAYERS}
    assert {group["eps"] for group in kl.parameter_groups(nn.ModuleList([model]), lr=1e-3, eps=1e-6)} == {1e-6 / LAYERS}


def test_a_decay_that_would_do_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert len(kl.parameter_groups(model, lr=1.0)) == 2
    with pytest.raises(InputError, match="layer_decay would have no effect"):
        kl.parameter_groups(model, lr=1.0, layer_decay=0.5)
