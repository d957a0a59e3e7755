"""The recipes' numbers: as formulas, and as measured on the weights of built models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer import recipes
from kilolayer.errors import OptionError
from kilolayer.recipes.base import Recipe

# (encoder layers, decoder layers): alpha_e, beta_e, alpha_d, beta_d, to the digits published in the papers' formulas.
DEEPNORM = {
    (6, 6): (1.4179, 0.4970, 2.0598, 0.3433),
    (18, 18): (1.9987, 0.3526, 2.7108, 0.2608),
    (50, 50): (2.7505, 0.2562, 3.4996, 0.2021),
    (100, 100): (3.4157, 0.2063, 4.1618, 0.1699),
    (500, 500): (5.6482, 0.1248, 6.2233, 0.1136),
    (60, 12): (2.6331, 0.2676, 2.4495, 0.2887),
}
DEEPNORM_SINGLE = {12: (2.2134, 0.3195), 100: (3.7606, 0.1880), 1000: (6.6874, 0.1057)}
SUB_LN = {(12, 12): (1.9484, 1.8930), (18, 18): (2.1829, 1.9972), (100, 100): (3.1739, 2.3883)}
SUB_LN_DECODER = {12: 1.7827, 24: 1.9675, 96: 2.2929}
ADMIN_CLOSED = {6: 2.017, 18: 3.041, 100: 6.075}  # encoder layers, two residual sublayers each


def near(value: float, digits: int = 4) -> object:
    return pytest.approx(value, abs=0.5 * 10**-digits + 1e-12)


@pytest.mark.parametrize(("depths", "values"), DEEPNORM.items())
def test_deepnorm_of_an_encoder_decoder(depths: tuple[int, int], values: tuple[float, ...]) -> None:
    described = kl.recipes.get("deepnorm").describe(encoder_layers=depths[0], decoder_layers=depths[1])
    assert described.encoder is not None
    assert described.decoder is not None
    found = (described.encoder.alpha, described.encoder.beta, described.decoder.alpha, described.decoder.beta)
    assert found == tuple(map(near, values))


@pytest.mark.parametrize(("layers", "values"), DEEPNORM_SINGLE.items())
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_deepnorm_of_one_stack(layers: int, values: tuple[float, float], side: str) -> None:
    described = kl.recipes.get("deepnorm").describe(**{f"{side}_layers": layers})
    constants = getattr(described, side)
    assert (constants.alpha, constants.beta) == tuple(map(near, values))
    assert getattr(described, "decoder" if side == "encoder" else "encoder") is None


def test_deepnorm_multipliers() -> None:
    plain = kl.recipes.get("deepnorm").describe(encoder_layers=18, decoder_layers=18).decoder
    scaled = kl.recipes.get("deepnorm", alpha_scale=2, beta_scale=0.5).describe(encoder_layers=18, decoder_layers=18).decoder
    assert plain is not None
    assert scaled is not None
    assert (scaled.alpha, scaled.beta) == pytest.approx((2 * plain.alpha, 0.5 * plain.beta))


# DeepNet, Table 11, at 18L-18L: each row takes one of the two away, in both stacks, and keeps the other.
TABLE_11 = [
    ({"alpha": "one"}, (1, 0.3526, 1, 0.2608)),
    ({"beta": "one"}, (1.9987, 1, 2.7108, 1)),
    ({"alpha": "one", "beta_scale": 2.0}, (1, 0.7052, 1, 0.5216)),
]


@pytest.mark.parametrize(("options", "values"), TABLE_11)
def test_deepnorm_without_alpha_or_without_beta(options: dict[str, object], values: tuple[float, ...]) -> None:
    described = kl.recipes.get("deepnorm", **options).describe(encoder_layers=18, decoder_layers=18)
    assert described.encoder is not None
    assert described.decoder is not None
    found = (described.encoder.alpha, described.encoder.beta, described.decoder.alpha, described.decoder.beta)
    assert found == pytest.approx(values, abs=2e-4)


def test_deepnorm_without_both_is_post_ln() -> None:
    torch.manual_seed(1)
    neither = kl.EncoderDecoder(30, 16, 2, 32, 3, 2, kl.recipes.get("deepnorm", alpha="one", beta="one")).eval()
    torch.manual_seed(1)
    plain = kl.EncoderDecoder(30, 16, 2, 32, 3, 2, kl.recipes.get("post_ln", init="xavier")).eval()
    source, target = torch.randint(1, 30, (2, 2, 5))
    assert torch.equal(neither(source, target).logits, plain(source, target).logits)


@pytest.mark.parametrize(("depths", "values"), SUB_LN.items())
def test_sub_ln_of_an_encoder_decoder(depths: tuple[int, int], values: tuple[float, float]) -> None:
    described = kl.recipes.get("sub_ln").describe(encoder_layers=depths[0], decoder_layers=depths[1])
    assert described.encoder is not None
    assert described.decoder is not None
    assert (described.encoder.gamma, described.decoder.gamma) == tuple(map(near, values))


@pytest.mark.parametrize(("layers", "gamma"), SUB_LN_DECODER.items())
def test_sub_ln_of_a_decoder(layers: int, gamma: float) -> None:
    described = kl.recipes.get("sub_ln").describe(decoder_layers=layers)
    assert described.decoder is not None
    assert described.decoder.gamma == near(gamma)


@pytest.mark.parametrize(("layers", "omega"), ADMIN_CLOSED.items())
def test_admin_closed_form(layers: int, omega: float) -> None:
    described = kl.recipes.get("admin", start="closed").describe(encoder_layers=layers)
    assert described.encoder is not None
    assert described.encoder.omega == near(omega, 3)


# Recipe, options, encoder and decoder layers: the constants of encoder and decoder.
SINCE = [
    ("keel", {}, (6, 6), {"alpha": 12}, {"alpha": 18}),
    ("keel", {}, (0, 500), None, {"alpha": 1000}),
    ("lns", {}, (4, 9), {"first_layer_scale": 1, "last_layer_scale": 0.5}, {"first_layer_scale": 1, "last_layer_scale": 1 / 3}),
    ("mix_ln", {}, (12, 24), {"post_layers": 3}, {"post_layers": 6}),
    ("mix_ln", {}, (3, 7), {"post_layers": 1}, {"post_layers": 1}),
    ("mix_ln", {"share": 0.5}, (7, 0), {"post_layers": 3}, None),
    ("layer_scale", {}, (18, 24), {"start": 0.1}, {"start": 1e-5}),
    ("layer_scale", {}, (19, 36), {"start": 1e-5}, {"start": 1e-6}),
    ("layer_scale", {"start": 0.3}, (36, 0), {"start": 0.3}, None),
    ("complete_p", {}, (12, 200), {"branch": 1 / 6}, {"branch": 1 / 100}),
    ("complete_p", {"base_depth": 12}, (0, 200), None, {"branch": 0.06}),
    ("complete_p", {"base_depth": 12, "alpha": 0.5}, (0, 48), None, {"branch": 0.5}),
]


@pytest.mark.parametrize(("name", "options", "depths", "encoder", "decoder"), SINCE)
def test_constants_of_recipes_since_the_papers(
    name: str,
    options: dict[str, float],
    depths: tuple[int, int],
    encoder: dict[str, float] | None,
    decoder: dict[str, float] | None,
) -> None:
    described = kl.recipes.get(name, **options).describe(encoder_layers=depths[0], decoder_layers=depths[1])
    assert described.encoder == (None if encoder is None else pytest.approx(encoder))
    assert described.decoder == (None if decoder is None else pytest.approx(decoder))


def test_a_constant_that_a_recipe_does_not_have_is_named() -> None:
    constants = kl.recipes.get("deepnorm").describe(encoder_layers=6).encoder
    with pytest.raises(AttributeError, match="no 'gamma'; it has: alpha, beta"):
        constants.gamma  # noqa: B018


WIDTH, FFN, LAYERS = 256, 512, (3, 2)  # encoder and decoder layers

# What each recipe multiplies Xavier's deviation by, written from the papers: (stack, layer, role) to a factor.
# Roles: qk, v, o (attention), in, out (feed-forward). N, M are the depths above.
N, M = LAYERS
L = 2 * N + 3 * M


def deepnorm_gain(side: str, layer: int, role: str) -> float:
    beta = 0.87 * (N**4 * M) ** (-1 / 16) if side == "encoder" else (12 * M) ** (-1 / 4)
    return 1.0 if role == "qk" else beta


def sub_ln_gain(side: str, layer: int, role: str) -> float:
    gamma = math.sqrt(math.log(3 * M) * math.log(2 * N) / 3) if side == "encoder" else math.sqrt(math.log(3 * M))
    return 1.0 if role == "qk" else gamma


def t_fixup_gain(side: str, layer: int, role: str) -> float:
    factor = 0.67 * N ** (-1 / 4) if side == "encoder" else (9 * M) ** (-1 / 4)
    return 1.0 if role == "qk" else factor


def r_fixup_gain(side: str, layer: int, role: str) -> float:
    return {"qk": L ** (-1 / 6), "v": L ** (-1 / 6), "o": 0.0, "in": L ** (-1 / 2), "out": 0.0}[role]


def ds_init_gain(side: str, layer: int, role: str) -> float:
    return 1 / math.sqrt(layer)


def ds_init_code_gain(side: str, layer: int, role: str) -> float:
    return layer ** (-1 / 4)


def post_ln_init_gain(side: str, layer: int, role: str) -> float:
    return 1 / ((N if side == "encoder" else M) - layer + 1)


def admin_released_gain(side: str, layer: int, role: str) -> float:
    return 1 / math.sqrt(2) if role in ("qk", "v") else 1.0  # one matrix [3d, d] has the fans of both together


def b2t_rescaled_gain(side: str, layer: int, role: str) -> float:
    return (N if side == "encoder" else M) ** -0.5


def xavier_gain(side: str, layer: int, role: str) -> float:
    return 1.0


GAINS = [
    (kl.recipes.get("deepnorm"), deepnorm_gain),
    (kl.recipes.get("deepnorm", beta="one"), xavier_gain),
    (kl.recipes.get("sub_ln"), sub_ln_gain),
    (kl.recipes.get("t_fixup"), t_fixup_gain),
    (kl.recipes.get("r_fixup"), r_fixup_gain),
    (kl.recipes.get("ds_init"), ds_init_gain),
    (kl.recipes.get("ds_init", scaled="variance"), ds_init_code_gain),
    (kl.recipes.get("post_ln_init"), post_ln_init_gain),
    (kl.recipes.get("admin", start="released"), admin_released_gain),
    (kl.recipes.get("b2t", rescale=True), b2t_rescaled_gain),
    *[(kl.recipes.get(name, init="xavier"), xavier_gain) for name in ("normformer", "post_ln", "pre_ln")],
    *[
        (kl.recipes.get(name), xavier_gain)
        for name in (
            *("admin", "complete_p", "dlcl", "keel", "layer_scale", "lns", "mix_ln"),
            *("peri_ln", "rezero", "b2t", "resi_dual", "x0_residual"),
        )
    ],
]


def test_every_recipe_has_its_row() -> None:
    assert {recipe.name for recipe, _ in GAINS} == set(kl.recipes.names())


def build(recipe: Recipe, meta: bool) -> kl.EncoderDecoder:
    model = kl.EncoderDecoder(100, WIDTH, 4, FFN, N, M, recipe, tie_embeddings=False, device="meta" if meta else None)
    return model.materialize("cpu") if meta else model


@pytest.mark.matrix(3)
@pytest.mark.parametrize("meta", [False, True], ids=["direct", "meta"])
@pytest.mark.parametrize(("recipe", "gain"), GAINS, ids=lambda each: getattr(each, "name", ""))
def test_deviations_measured_on_built_weights(recipe: Recipe, gain: object, meta: bool) -> None:
    assert callable(gain)
    weights = {name: weight.detach() for name, weight in build(recipe, meta).named_parameters()}
    xavier = math.sqrt(2 / (WIDTH + WIDTH))
    for side, layers in (("encoder", N), ("decoder", M)):
        for layer in range(1, layers + 1):
            block = f"{side}.blocks.{layer - 1}"
            matrices: list[tuple[str, torch.Tensor, float]] = []
            query, key, value = weights[f"{block}.self_attention.f.query_key_value.weight"].chunk(3)
            matrices += [("qk", query, xavier), ("qk", key, xavier), ("v", value, xavier)]
            matrices += [("o", weights[f"{block}.self_attention.f.output.weight"], xavier)]
            if side == "decoder":
                key, value = weights[f"{block}.cross_attention.f.key_value.weight"].chunk(2)
                matrices += [("qk", weights[f"{block}.cross_attention.f.query.weight"], xavier), ("qk", key, xavier)]
                matrices += [("v", value, xavier), ("o", weights[f"{block}.cross_attention.f.output.weight"], xavier)]
            wide = math.sqrt(2 / (WIDTH + FFN))
            matrices += [("in", weights[f"{block}.feedforward.f.input.weight"], wide)]
            matrices += [("out", weights[f"{block}.feedforward.f.output.weight"], wide)]
            for role, matrix, std in matrices:
                assert float(matrix.std()) == pytest.approx(gain(side, layer, role) * std, rel=0.02), (block, role)
    biases = {name: weight for name, weight in weights.items() if name.endswith("bias")}
    assert all(bool((bias == 0).all()) for bias in biases.values())
    if recipe.name == "r_fixup":
        assert all(bias.dim() == 0 for bias in biases.values())  # its scalar shifts alone: no linear layer has a bias
    else:
        assert any(bias.dim() == 1 for bias in biases.values())


SINGLE_LAYERS = 5
# One stack of five layers: factor on query and key, on value and attention output, on FFN in, on FFN out, of layer 3.
SINGLES = [
    (kl.recipes.get("deepnorm"), (1, (8 * 5) ** -0.25, (8 * 5) ** -0.25, (8 * 5) ** -0.25)),
    (kl.recipes.get("deepnorm", beta_scale=0.5), (1, *[0.5 * (8 * 5) ** -0.25] * 3)),
    (kl.recipes.get("sub_ln"), (1, *[math.sqrt(math.log(10))] * 3)),
    (kl.recipes.get("t_fixup"), (1, *[0.67 * 5**-0.25] * 3)),
    (kl.recipes.get("ds_init", alpha=0.5), [0.5 / math.sqrt(3)] * 4),
    (kl.recipes.get("post_ln_init"), [1 / 3] * 4),
    (kl.recipes.get("r_fixup"), (10 ** (-1 / 6), 10 ** (-1 / 6), 10 ** (-1 / 2), 0)),
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("shape", [kl.Encoder, kl.Decoder])
@pytest.mark.parametrize(("recipe", "gains"), SINGLES, ids=lambda each: str(each)[:30] if isinstance(each, Recipe) else "")
def test_deviations_of_one_stack_with_grouped_heads_and_a_gate(shape: type, recipe: Recipe, gains: tuple[float, ...]) -> None:
    model = shape(100, 512, 4, 512, SINGLE_LAYERS, recipe, kv_heads=2, activation="swiglu")
    side = "encoder" if shape is kl.Encoder else "decoder"
    weights = {name: weight.detach() for name, weight in model.named_parameters() if f"{side}.blocks.2." in name}
    block = f"{side}.blocks.2"
    query, key, value = weights[f"{block}.self_attention.f.query_key_value.weight"].split([512, 256, 256])
    gate, up = weights[f"{block}.feedforward.f.input.weight"].chunk(2)
    output = 0 if recipe.name == "r_fixup" else gains[1]
    measured = [
        (query, gains[0], 512 + 512),
        (key, gains[0], 512 + 256),
        (value, gains[1], 512 + 256),
        (weights[f"{block}.self_attention.f.output.weight"], output, 512 + 512),
        (gate, gains[2], 512 + 512),
        (up, gains[2], 512 + 512),
        (weights[f"{block}.feedforward.f.output.weight"], gains[3], 512 + 512),
    ]
    for index, (matrix, gain, fans) in enumerate(measured):
        assert float(matrix.std()) == pytest.approx(gain * math.sqrt(2 / fans), rel=0.02), index


def test_sub_ln_without_cross_gain_leaves_cross_attention_at_xavier() -> None:
    model = kl.EncoderDecoder(100, WIDTH, 4, FFN, N, M, kl.recipes.get("sub_ln", cross_gain=False))
    weights = model.state_dict()
    cross = weights["decoder.blocks.0.cross_attention.f.output.weight"]
    own = weights["decoder.blocks.0.self_attention.f.output.weight"]
    assert float(cross.std()) == pytest.approx(WIDTH**-0.5, rel=0.02)
    assert float(own.std()) == pytest.approx(math.sqrt(math.log(3 * M) / WIDTH), rel=0.02)


@pytest.mark.parametrize(
    ("name", "uniform"), [("admin", True), ("deepnorm", False), ("ds_init", True), ("r_fixup", True), ("t_fixup", True)]
)
def test_the_distribution_is_the_papers(name: str, uniform: bool) -> None:
    matrix = build(kl.recipes.get(name), False).state_dict()["encoder.blocks.0.feedforward.f.input.weight"]
    extreme = float(matrix.abs().max() / matrix.std())
    assert (extreme < math.sqrt(3) * 1.02) if uniform else (extreme > 3.5)


@pytest.mark.parametrize(
    ("name", "tied", "source_gain", "target_gain"),
    [
        ("deepnorm", True, 1.0, 1.0),
        ("t_fixup", True, (9 * N) ** (-1 / 4), (9 * N) ** (-1 / 4)),
        ("t_fixup", False, (9 * N) ** (-1 / 4), (9 * M) ** (-1 / 4)),
    ],
)
def test_embeddings(name: str, tied: bool, source_gain: float, target_gain: float) -> None:
    model = kl.EncoderDecoder(2000, WIDTH, 4, FFN, N, M, name, tie_embeddings=tied, pad_id=3)
    source = model.embedding if model.source_embedding is None else model.source_embedding
    assert float(source.weight.detach().std()) == pytest.approx(source_gain * WIDTH**-0.5, rel=0.02)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(target_gain * WIDTH**-0.5, rel=0.02)
    assert bool((source.weight[3] == 0).all())
    if not tied:
        assert model.vocabulary is not None
        assert float(model.vocabulary.weight.detach().std()) == pytest.approx(WIDTH**-0.5, rel=0.02)


def test_r_fixup_starts_an_untied_output_table_at_zero() -> None:
    model = kl.EncoderDecoder(100, WIDTH, 4, FFN, N, M, "r_fixup", tie_embeddings=False)
    assert model.vocabulary is not None
    assert not model.vocabulary.weight.any()


def test_embeddings_are_multiplied_by_the_root_of_the_width() -> None:
    tokens = torch.tensor([[5, 6]])
    scaled, plain = (
        kl.Encoder(10, 16, 2, 32, 1, positions="none", scale_embeddings=scale)(tokens, hidden_states=True).hidden_states
        for scale in (True, False)
    )
    torch.manual_seed(0)
    table = kl.Encoder(10, 16, 2, 32, 1, positions="none").embedding
    assert table is not None
    assert scaled is not None
    torch.testing.assert_close(scaled[0], 4.0 * table.weight[tokens])
    assert plain is not None
    assert float(plain[0].detach().std()) == pytest.approx(16**-0.5, rel=0.5)


def test_a_share_of_layers_is_not_one_short_by_rounding() -> None:
    """0.29 * 100 is 28.999999999999996."""
    constants = recipes.get("mix_ln", share=0.29).constants("encoder", recipes.Depths(encoder=100))
    assert constants["post_layers"] == 29


@pytest.mark.parametrize("depth", [6.5, "6", True, None])
def test_a_depth_is_a_whole_number(depth: Any) -> None:
    with pytest.raises(OptionError, match=r"the number of decoder layers is .*\n.*whole number"):
        recipes.Depths(decoder=depth)
