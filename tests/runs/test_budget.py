"""The plan's figures against the models that it speaks of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kilolayer as kl
from kilolayer.models.image_input import ImageDecoder
from kilolayer.runs.budget import Work, budget
from kilolayer.runtime.runtime import PLAIN
from kilolayer.speed.fast import fast_form
from kilolayer.speed.operators import kernels
from kilolayer.speed.runtime import FAST

WORK = Work(batch=3, length=10, beam=2, precision="fp32")
SHAPES = ["encoder", "decoder", "encoder_decoder"]


def small(shape: str, recipe: str = "deepnorm", **options: object) -> kl.ModelConfig:
    sizes = {"dim": 32, "heads": 4, "ffn_dim": 48, "layers": 3, "vocab_size": 40}
    return kl.ModelConfig(shape=shape, recipe=kl.recipes.get(recipe), **{**sizes, **options})  # pyright: ignore


def run(config: kl.ModelConfig) -> torch.Tensor:
    model = kl.build_model(config)
    source, target = torch.randint(1, 40, (2, WORK.batch, WORK.length))
    out = model(source, target) if isinstance(model, kl.EncoderDecoder) else model(source)
    assert out.logits is not None
    return out.logits


@pytest.mark.matrix(6)
@pytest.mark.parametrize("recipe", kl.recipes.names())
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted_once(shape: str, recipe: str) -> None:
    config = small(shape, recipe, tie_embeddings=False, positions="t5")
    cost = budget(config, WORK)
    assert cost.parameters == sum(parameter.numel() for parameter in kl.build_model(config).parameters())
    assert sum(cost.parts.values()) == cost.parameters == cost.active_parameters


@pytest.mark.matrix(3)
@pytest.mark.parametrize("options", [{}, {"activation": "swiglu", "kv_heads": 2}, {"positions": "rotary"}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_what_torch_counts(shape: str, options: dict[str, object]) -> None:
    config = small(
        shape, **options, **({"output_transform": True} if shape == "encoder" and "activation" not in options else {})
    )
    with FlopCounterMode(display=False) as counter:
        run(config)
    tokens = WORK.batch * WORK.length
    # Torch counts all keys of a causal query; the plan counts the half that it sees.
    causal = 0 if shape == "encoder" else 2 * tokens * config.dim * WORK.length * 3
    # On the CPU torch does not count fused attention at all.
    attention = {"encoder": 1, "decoder": 1, "encoder_decoder": 3}[shape] * 4 * tokens * config.dim * WORK.length * 3
    counted = counter.get_total_flops() + attention - causal
    assert budget(config, WORK).forward_flops_per_token * tokens == pytest.approx(counted)


def kept_for_backward(config: kl.ModelConfig, precision: str = "fp32", *inputs: torch.Tensor, **options: torch.Tensor) -> int:
    """The bytes that autograd holds after a forward, weights aside. inputs: by default, tokens for source and target."""
    model = kl.build_model(config)
    if precision == "bf16":
        model.cast_weights(torch.bfloat16)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    model = fast_form(model)
    inputs = inputs or tuple(torch.randint(1, 40, (2, WORK.batch, WORK.length)))[: 1 + isinstance(model, kl.EncoderDecoder)]
    with kernels.assumed("cpu"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(*inputs, **options)
    assert out.logits is not None
    owned = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in owned)


@pytest.mark.matrix(12)
@pytest.mark.parametrize("recipe", kl.recipes.names())
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layers_activations_are_what_autograd_keeps(shape: str, recipe: str) -> None:
    # Without padding: SDPA on the CPU keeps a copy of a mask for each layer.
    depths = [small(shape, recipe, layers=layers, pad_id=None) for layers in (4, 8)]
    real = [kept_for_backward(config) for config in depths]
    planned = [budget(config, WORK).training.activations for config in depths]
    assert planned[1] - planned[0] == pytest.approx(real[1] - real[0], rel=0.01)
    assert planned[1] == pytest.approx(real[1], rel=0.02)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("recipe", ["deepnorm", "admin", "sub_ln", "normformer", "pre_ln", "dlcl"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_the_residual_is_precise_and_kernels_keep_what_they_keep(shape: str, recipe: str) -> None:
    depths = [small(shape, recipe, layers=layers, pad_id=None) for layers in (4, 8)]
    real = [kept_for_backward(config, "bf16") for config in depths]
    work = Work(WORK.batch, WORK.length, WORK.beam, "bf16")
    planned = [budget(config, work).training.activations for config in depths]
    assert planned[1] - planned[0] == pytest.approx(real[1] - real[0], rel=0.02)
    assert planned[1] == pytest.approx(real[1], rel=0.03)


SPARSE = [
    kl.MoE(experts=4),
    kl.MoE(experts=5, top_k=3, every=3, router="linear"),
    kl.MoE(experts=8, top_k=1, every=1, router_dim=6),
]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln", "r_fixup"])
@pytest.mark.parametrize("moe", SPARSE, ids=lambda moe: f"{moe.experts}-{moe.router}")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_uses_the_parameters_of_its_experts_alone(shape: str, moe: kl.MoE, recipe: str) -> None:
    config = small(shape, recipe, moe=moe)
    cost, model = budget(config, WORK), kl.build_model(config)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    of_one = sum(each[0].numel() for name, each in model.named_parameters() if "experts" in name and each.dim() > 1)
    assert cost.parameters - cost.active_parameters == (moe.experts - moe.top_k) * of_one
    named = {part: sum(p.numel() for name, p in model.named_parameters() if part in name) for part in ("experts", "router")}
    for part, count in named.items():
        assert sum(cost.parts.get(f"{side} {part}", 0) for side in ("encoder", "decoder")) == count > 0


def test_with_as_many_experts_as_a_token_uses_all_is_active() -> None:
    cost = budget(small("decoder", moe=kl.MoE(experts=2)), WORK)
    assert cost.active_parameters == cost.parameters


@pytest.mark.matrix(3)
@pytest.mark.parametrize("moe", SPARSE, ids=lambda moe: f"{moe.experts}-{moe.router}")
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_flops_of_sparse_models_are_those_of_their_products(moe: kl.MoE, activation: str) -> None:
    def grouped(rows: list[int], weight: list[int], *_: object, **__: object) -> int:
        return 2 * math.prod(rows) * weight[1]

    config = small("encoder", moe=moe, activation=activation, pad_id=None)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.kilolayer.grouped_product: grouped}) as counter:
        run(config)
    tokens = WORK.batch * WORK.length
    attention = 4 * tokens * config.dim * WORK.length * 3
    assert budget(config, WORK).forward_flops_per_token * tokens == pytest.approx(counter.get_total_flops() + attention)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
@pytest.mark.parametrize("moe", SPARSE[::2], ids=lambda moe: f"{moe.experts}-{moe.router}")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sparse_layers_activations_are_what_autograd_keeps(shape: str, moe: kl.MoE, recipe: str) -> None:
    shallow, deep = (small(shape, recipe, layers=layers, pad_id=None, moe=moe) for layers in (4, 8))
    real = kept_for_backward(deep) - kept_for_backward(shallow)
    planned = budget(deep, WORK).training.activations - budget(shallow, WORK).training.activations
    assert planned == pytest.approx(real, rel=0.01)


def test_dropout_masks_of_experts_are_counted() -> None:
    moe = kl.MoE(experts=4)
    plain, dropped = (budget(small("encoder", activation_dropout=p, moe=moe), WORK) for p in (0.0, 0.1))
    rows = WORK.batch * WORK.length * (1 + 2 + 1)  # three layers, the second of them sparse, top-2
    assert dropped.training.activations - plain.training.activations == rows * 48 * (1 + 4)


def test_optimizer_and_precision() -> None:
    config = small("decoder")
    single, half = budget(config, WORK), budget(config, Work(3, 10, 2, "bf16"))
    count, model = single.parameters, kl.build_model(config)
    assert (single.training.weights, single.training.gradients, single.training.optimizer) == (4 * count, 4 * count, 8 * count)
    masters = sum(weight.nbytes for weight in model.cast_weights(torch.bfloat16).values())
    weights = sum(weight.nbytes for weight in model.parameters())
    assert (half.training.weights, half.training.gradients, half.training.optimizer) == (weights, weights, 8 * count + masters)
    # Products are halved, the residual stays.
    assert 0.5 < half.training.activations / single.training.activations < 0.75


def test_recomputation_keeps_the_inputs_of_the_layers_and_one_layer() -> None:
    shallow, deep = (budget(small("encoder", layers=layers), WORK).training for layers in (10, 20))
    state = WORK.batch * WORK.length * 32 * 4
    assert deep.activations_recomputed - shallow.activations_recomputed == 10 * state
    assert deep.activations_recomputed < deep.activations
    assert deep.layer > deep.logits
    assert deep.peak_recomputed <= deep.peak == deep.weights + deep.optimizer + deep.activations + deep.layer


def test_recomputation_keeps_what_attention_has_drawn_random_numbers_for() -> None:
    work, layers = Work(1, 200, 2, "bf16"), 8
    plain, dropped = (budget(small("encoder", layers=layers, attention_dropout=p), work).training for p in (0.0, 0.1))
    drawn = 200 * (32 * 2 + 4 * 4)  # the output in bf16, and an fp32 number for each head and query
    more = dropped.activations_recomputed - plain.activations_recomputed
    assert more == pytest.approx((layers - 1) * drawn, abs=100)  # the layer that is recomputed has them in any case


@pytest.mark.parametrize("shape", ["decoder", "encoder_decoder"])
def test_decoding_memory_is_the_caches(shape: str) -> None:
    config = small(shape, kv_heads=2)
    model = kl.build_model(config)
    cache = model.new_cache(WORK.beam * WORK.length)  # the hypotheses of a sentence lie in one row
    text = torch.randint(1, 40, (WORK.batch, WORK.length))
    if isinstance(model, kl.EncoderDecoder):
        model.decode(text, model.encode(text), cache=cache)
    else:
        model(text, cache=cache)
    target = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values) if part is not None)
    source = sum(part.nbytes for layer in cache.layers for part in layer.memory or ())
    decoding = budget(config, WORK).decoding
    assert decoding is not None
    assert (decoding.target_cache, decoding.source_cache) == (target, source)


def test_an_encoder_does_not_decode() -> None:
    assert budget(small("encoder"), WORK).decoding is None


def test_dropout_masks_are_counted() -> None:
    plain, dropped = (budget(small("encoder", dropout=p, activation_dropout=p), WORK) for p in (0.0, 0.1))
    tokens = WORK.batch * WORK.length
    added = dropped.training.activations - plain.training.activations
    assert added == 3 * tokens * (2 * 32 + 48 * (1 + 4))


def test_the_loss_is_part_of_the_budget() -> None:
    logits = run(small("encoder"))
    assert budget(small("encoder"), WORK).training.logits == logits.nbytes  # their gradient takes their place


def test_scores_at_some_places_alone_cost_less() -> None:
    config, work = small("encoder"), replace(WORK, scored=4)
    positions = torch.arange(4).expand(WORK.batch, 4)
    with FlopCounterMode(display=False) as counter:
        logits = kl.build_model(config)(torch.randint(1, 40, (WORK.batch, WORK.length)), positions=positions).logits
    assert logits is not None
    assert budget(config, work).training.logits == logits.nbytes
    tokens = WORK.batch * WORK.length
    counted = counter.get_total_flops() + 4 * tokens * config.dim * WORK.length * 3  # fused attention, which torch leaves out
    assert budget(config, work).forward_flops_per_token * tokens == pytest.approx(counted)


@pytest.mark.parametrize("form", ["plain", "fast"])
@pytest.mark.parametrize("positions", ["rotary", "xpos", "t5", "none"])
def test_every_kind_of_positions_is_planned(positions: str, form: str) -> None:
    config = small("decoder", positions=positions)
    runtime = PLAIN if form == "plain" else FAST
    cost = budget(config, WORK, runtime=runtime)
    assert cost.training.peak > cost.training.peak_recomputed > 0


@pytest.mark.parametrize("class_token", [False, True])
def test_flops_of_an_image_encoder_are_what_torch_counts(class_token: bool) -> None:
    image = kl.ImageInput(size=16, patch=4, class_token=class_token)
    config = kl.ModelConfig(
        shape="encoder",
        image=image,
        dim=32,
        heads=4,
        ffn_dim=48,
        layers=2,
        vocab_size=None,
        head=kl.Head(outputs=5, pool="first" if class_token else "mean"),
    )
    work = Work(batch=3, length=image.length, precision="fp32")
    model = kl.build_model(config)
    assert isinstance(model, kl.ImageEncoder)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(3, 3, 16, 16))
    attention = 4 * work.batch * work.length**2 * config.dim * 2
    counted = counter.get_total_flops() + attention
    assert budget(config, work).forward_flops_per_token * work.batch * work.length == pytest.approx(counted)


IMAGE = kl.ImageInput(size=16, patch=4, class_token=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["classes", "some patches", "decoder"])
def test_an_image_encoder_keeps_what_is_planned(kind: str, precision: Any) -> None:
    options = {"vocab_size": None, "head": kl.Head(outputs=5)} if kind == "classes" else {"vocab_size": 48}
    decoder = ImageDecoder(dim=16, heads=2, layers=2) if kind == "decoder" else None
    image = replace(IMAGE, decoder=decoder, mask_token=kind == "some patches")
    config = small("encoder", image=image, pad_id=None, positions="learned", **options)
    chosen, masked = torch.arange(4).expand(3, 4), torch.zeros(3, 16, dtype=torch.bool)
    given = {"classes": {}, "some patches": {"positions": chosen, "masked": masked}, "decoder": {"visible": chosen}}[kind]
    work = Work(3, 5 if kind == "decoder" else 17, precision=precision, scored=4 if kind == "some patches" else None)
    real = kept_for_backward(config, precision, torch.randn(3, 3, 16, 16), **given)
    assert budget(config, work, runtime=FAST).training.activations == pytest.approx(real, rel=0.03)


def test_a_plan_in_bf16_has_the_workspaces_of_a_gpu() -> None:
    single, half = (budget(small("encoder"), replace(WORK, precision=each)).training for each in ("fp32", "bf16"))
    assert (single.workspaces, half.workspaces) == (0, 3 * 32 * 2**20)
    assert half.peak > half.least > half.workspaces
