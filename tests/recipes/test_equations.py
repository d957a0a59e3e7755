"""Every recipe computes the equation of its paper: models against a naive fp64 re-computation, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from tests.recipes import naive_transformer as naive
from tests.recipes.naive_transformer import NaiveTransformer, add_sinusoids
from tests.recipes.tiny_models import HEADS, PADDING, SHAPES, SOURCE, TARGET, build, randomise

EQUATIONS: list[tuple[str, dict[str, Any], type[NaiveTransformer]]] = [
    ("admin", {}, naive.Admin),
    ("admin", {"weight": "trainable"}, naive.Admin),
    ("admin", {"start": "released"}, naive.Admin),
    ("admin", {"start": "closed"}, naive.Admin),
    ("b2t", {}, naive.B2T),
    ("b2t", {"rescale": True}, naive.B2T),
    ("complete_p", {}, naive.CompleteP),
    ("complete_p", {"base_width": 2, "base_depth": 5, "alpha": 0.5}, naive.CompleteP),
    ("deepnorm", {}, naive.DeepNorm),
    ("deepnorm", {"alpha_scale": 2.5}, naive.DeepNorm),
    ("deepnorm", {"beta_scale": 0.5}, naive.DeepNorm),
    ("deepnorm", {"alpha": "one"}, naive.DeepNorm),
    ("deepnorm", {"beta": "one"}, naive.DeepNorm),
    ("dlcl", {"norm": "pre"}, naive.PreNormDLCL),
    ("dlcl", {"norm": "post"}, naive.PostNormDLCL),
    ("ds_init", {}, naive.PostLN),
    ("ds_init", {"alpha": 0.5, "scaled": "variance"}, naive.PostLN),
    ("keel", {}, naive.Keel),
    ("layer_scale", {}, naive.LayerScale),
    ("lns", {}, naive.LayerNormScaling),
    ("mix_ln", {}, naive.MixLN),
    ("mix_ln", {"share": 0.7}, naive.MixLN),
    ("normformer", {}, naive.NormFormer),
    ("normformer", {"residual_scale": True}, naive.NormFormer),
    ("normformer", {"cross_attention": True}, naive.NormFormer),
    ("peri_ln", {}, naive.PeriLN),
    ("peri_ln", {"embedding_norm": False}, naive.PeriLN),
    ("post_ln", {}, naive.PostLN),
    ("post_ln_init", {}, naive.PostLN),
    ("pre_ln", {}, naive.PreLN),
    ("r_fixup", {}, naive.RFixup),
    ("resi_dual", {}, naive.ResiDual),
    ("resi_dual", {"scale": 0.1}, naive.ResiDual),
    ("rezero", {}, naive.ReZero),
    ("sub_ln", {}, naive.SubLN),
    ("sub_ln", {"cross_gain": False}, naive.SubLN),
    ("t_fixup", {}, naive.TFixup),
    ("x0_residual", {}, naive.X0Residual),
]


CASES = [
    pytest.param(
        shape, recipe, options, equation, id="-".join([recipe, *(f"{key}={value}" for key, value in options.items()), shape])
    )
    for recipe, options, equation in EQUATIONS
    for shape in SHAPES
    if not {"cross_gain", "cross_attention"} & set(options) or shape == "encoder_decoder"  # elsewhere there is none
]


def build_random(shape: str, recipe: str, recipe_options: Mapping[str, Any] | None = None, **options: Any) -> nn.Module:
    model = build(shape, recipe, recipe_options, **options).eval()
    randomise(model.state_dict())
    return model


def modelled(model: nn.Module, shape: str, embeddings: Tensor | None = None) -> dict[str, Tensor]:
    """The model's outputs where there is no padding, read from the ids or from `embeddings` in the place of the first."""
    ids = TARGET if shape == "decoder" else SOURCE
    first = "source" if shape == "encoder_decoder" else "tokens"
    mask = "source_mask" if shape == "encoder_decoder" else "mask"
    inputs = {first: ids} if embeddings is None else {"embeddings": embeddings, mask: ids != PADDING}
    with torch.no_grad():
        if shape == "encoder_decoder":
            out = model(**inputs, target=TARGET)
            return real_parts(out.states, out.logits, TARGET) | {"memory": out.memory[SOURCE != PADDING]}
        out = model(**inputs)
        return real_parts(out.states, out.logits, ids)


def computed(reference: NaiveTransformer, shape: str, source: Tensor, target: Tensor, vocabulary: str) -> dict[str, Tensor]:
    """What the equations give for `modelled`, from the embedded source and target."""
    table = reference.weight(f"{vocabulary}.weight")
    if shape == "encoder":
        states = reference.encode(source, SOURCE != PADDING)
        return real_parts(states, states @ table.T, SOURCE)
    if shape == "decoder":
        states = reference.decode(target, TARGET != PADDING)
        return real_parts(states, states @ table.T, TARGET)
    memory = reference.encode(source, SOURCE != PADDING)
    states = reference.decode(target, TARGET != PADDING, memory, SOURCE != PADDING)
    return real_parts(states, states @ table.T, TARGET) | {"memory": memory[SOURCE != PADDING]}


def real_parts(states: Tensor, logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"states": states[ids != PADDING], "logits": logits[ids != PADDING]}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("shape", "recipe", "options", "equation"), CASES)
def test_recipe_computes_its_equation(
    shape: str, recipe: str, options: dict[str, Any], equation: type[NaiveTransformer]
) -> None:
    model = build_random(shape, recipe, options)
    reference = equation(model.state_dict(), SHAPES[shape], HEADS, **options)
    expected = computed(reference, shape, reference.embed(SOURCE), reference.embed(TARGET), "embedding")
    assert_equal(modelled(model, shape), expected)
    assert not reference.unread, "the model has weights that its equation does not"


def test_no_recipe_is_without_its_equation() -> None:
    assert {recipe for recipe, _, _ in EQUATIONS} == set(kl.recipes.names())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["ids", "embeddings"])
def test_sinusoids_are_added_at_the_input(shape: str, given: str) -> None:
    model = build_random(shape, "post_ln", positions="sinusoidal")
    reference = naive.PostLN(model.state_dict(), SHAPES[shape], HEADS)
    source, target = reference.embed(SOURCE), reference.embed(TARGET)
    embeddings = None
    if given == "embeddings" and shape == "decoder":
        target = embeddings = target.sin()
    elif given == "embeddings":
        source = embeddings = source.sin()
    source, target = add_sinusoids(source, SOURCE != PADDING), add_sinusoids(target, TARGET != PADDING)
    assert_equal(modelled(model, shape, embeddings), computed(reference, shape, source, target, "embedding"))


@pytest.mark.parametrize(
    ("options", "source_table", "vocabulary"),
    [
        ({"tie_embeddings": "output"}, "source_embedding", "embedding"),
        ({"tie_embeddings": False}, "source_embedding", "vocabulary"),
        ({"scale_embeddings": False}, "embedding", "embedding"),
    ],
)
def test_each_side_reads_its_own_table(options: dict[str, Any], source_table: str, vocabulary: str) -> None:
    model = build_random("encoder_decoder", "r_fixup", **options)
    reference = naive.RFixup(model.state_dict(), SHAPES["encoder_decoder"], HEADS)
    scaled = options.get("scale_embeddings", True)
    source, target = reference.embed(SOURCE, source_table, scaled), reference.embed(TARGET, "embedding", scaled)
    assert_equal(modelled(model, "encoder_decoder"), computed(reference, "encoder_decoder", source, target, vocabulary))
    assert not reference.unread, "the model has a table that is not read"
