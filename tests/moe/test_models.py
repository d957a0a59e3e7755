"""Sparse models: every shape under every recipe, and all that a dense model can do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer import config
from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.layers.block import Block
from kilolayer.models.outputs import DecoderOutput, EncoderDecoderOutput, EncoderOutput
from kilolayer.moe.layer import expert_parameters, sparse_layers
from kilolayer.probe.propagation import gradient_profile
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.written import unroll_for_cpu

MOE = kl.MoE(experts=4)
SOURCE = torch.tensor([[3, 5, 2, 9, 4, 0], [0, 0, 7, 1, 8, 6]])
TARGET = torch.tensor([[1, 6, 4, 0, 0], [0, 4, 2, 7, 3]])
SHAPES = ["encoder", "decoder", "encoder_decoder"]
each_recipe = pytest.mark.parametrize("recipe", kl.recipes.names())
each_shape = pytest.mark.parametrize("shape", SHAPES)
AnyModel = kl.Encoder | kl.Decoder | kl.EncoderDecoder


def build(
    shape: str = "encoder_decoder",
    recipe: str = "deepnorm",
    moe: kl.MoE | None = MOE,
    dtype: Any = torch.float64,
    **options: Any,
) -> AnyModel:
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4, "vocab_size": 11, "moe": moe, **options}
    made = kl.ModelConfig(shape=shape, recipe=kl.recipes.get(recipe), **sizes)  # pyright: ignore[reportArgumentType]
    return kl.build_model(made, dtype=dtype, seed=3)


def run(model: AnyModel) -> EncoderOutput | DecoderOutput | EncoderDecoderOutput:
    return model(SOURCE, TARGET) if isinstance(model, kl.EncoderDecoder) else model(SOURCE)


def loss(model: AnyModel) -> Tensor:
    out = run(model)
    assert out.logits is not None
    return out.logits.logsumexp(-1).square().mean() + out.router_loss


def gradients(model: AnyModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.matrix(6)
@each_recipe
@each_shape
def test_every_recipe_takes_experts(shape: str, recipe: str) -> None:
    model = build(shape, recipe, dropout=0.1, activation_dropout=0.1, drop_path=0.1).train()
    found = gradients(model)
    assert set(found) == set(dict(model.named_parameters()))
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    out = run(model)
    sides = 2 if shape == "encoder_decoder" else 1
    assert out.routing is not None
    assert len(out.routing) == 2 * sides == len(sparse_layers(model))
    summed = sum(float(told.router_loss.detach()) for told in out.routing)
    assert float(out.router_loss.detach()) == pytest.approx(summed)
    assert 0.01 * 2 * sides * 0.9 < summed < 0.01 * 4 * 2 * sides


def test_the_encoders_records_come_first() -> None:
    out = run(build(encoder_layers=2, decoder_layers=6, layers=None))
    assert out.routing is not None
    real = [int((SOURCE != 0).sum()), *[int((TARGET != 0).sum())] * 3]
    assert [int(told.load.sum()) for told in out.routing] == [2 * count for count in real]


@pytest.mark.parametrize(("every", "sparse"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (5, [5])])
def test_experts_stand_in_the_last_of_each_group_of_layers(every: int, sparse: list[int]) -> None:
    model = build("encoder", layers=5, moe=kl.MoE(experts=4, every=every))
    blocks = model.encoder.blocks  # pyright: ignore[reportAttributeAccessIssue]
    assert [index for index, block in enumerate(blocks, 1) if block.is_sparse] == sparse


def test_names_say_what_they_are() -> None:
    model = build("encoder", "sub_ln", moe=kl.MoE(experts=4, loss_free=1e-3))
    names = {name for name, _ in model.named_parameters() if name.startswith("encoder.blocks.1.feedforward.f.")}
    assert {name.removeprefix("encoder.blocks.1.feedforward.f.") for name in names} == {
        "router.weight",
        "router.embeddings",
        "router.log_temperature",
        *(f"experts.{part}.{kind}" for part in ("input", "inner_norm", "output") for kind in ("weight", "bias")),
    }
    assert "encoder.blocks.1.feedforward.f.router.selection_bias" in model.state_dict()
    assert {name for name, _ in expert_parameters(model)} == {
        name for name in dict(model.named_parameters()) if "experts" in name
    }
    assert all(len(parameter) == 4 for _, parameter in expert_parameters(model))
    assert list(sparse_layers(model)) == ["encoder.blocks.1.feedforward.f", "encoder.blocks.3.feedforward.f"]


def test_shared_shifts_are_no_experts() -> None:
    shapes = {name: parameter.shape for name, parameter in expert_parameters(build("encoder", "r_fixup"))}
    assert set(shapes) == {
        f"encoder.blocks.{layer}.feedforward.f.experts.{part}.weight" for layer in (1, 3) for part in ("input", "output")
    }


@pytest.mark.matrix(4)
@each_recipe
def test_each_expert_starts_as_a_dense_network_does(recipe: str) -> None:
    moe = kl.MoE(experts=3, every=1, top_k=1)
    sizes = {"dim": 128, "ffn_dim": 256, "layers": 2, "dtype": torch.float32, "activation": "swiglu"}
    sparse, dense = (build("decoder", recipe, moe=each, **sizes) for each in (moe, None))
    for name in ("input.weight", "output.weight"):
        matrices = sparse.state_dict()[f"decoder.blocks.1.feedforward.f.experts.{name}"]
        expected = dense.state_dict()[f"decoder.blocks.1.feedforward.f.{name}"]
        assert [float(matrix.std()) for matrix in matrices] == pytest.approx([float(expected.std())] * 3, rel=0.02)
        assert len({float(matrix.sum()) for matrix in matrices}) == (3 if expected.any() else 1)
    weight = sparse.state_dict()["decoder.blocks.0.feedforward.f.router.weight"]
    compared = 2  # half of the experts would be one dimension
    assert tuple(weight.shape) == (compared, 128)
    deviation = {"post_ln": 0.02, "pre_ln": (3 * 128) ** -0.5}.get(recipe, (2 / (128 + compared)) ** 0.5)
    assert float(weight.std()) == pytest.approx(deviation, rel=0.25)


@pytest.mark.matrix(6)
@each_recipe
def test_meta_then_materialized_equals_direct(recipe: str) -> None:
    moe = kl.MoE(experts=4, loss_free=1e-3)
    direct = build(recipe=recipe, moe=moe, dtype=None)
    other = kl.build_model(direct.config, device="meta", seed=3).materialize("cpu")
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in direct.state_dict().items())


def test_half_precision_models_hold_routers_in_fp32() -> None:
    lowered = build(dtype=None)
    precise = lowered.cast_weights(torch.bfloat16, torch.bfloat16)
    built, made = build(dtype=torch.bfloat16), build(dtype=None).to(torch.bfloat16)
    materialized = kl.build_model(built.config, device="meta", seed=3).materialize("cpu", torch.bfloat16)
    for model in (lowered, built, made, materialized):
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
        assert {dtype for name, dtype in dtypes.items() if "router" in name} == {torch.float32}
        assert {dtype for name, dtype in dtypes.items() if "router" not in name} == {torch.bfloat16}
    routers = {parameter for name, parameter in lowered.named_parameters() if "router" in name}
    assert not routers & set(precise)
    out = run(lowered)
    assert out.router_loss.dtype == torch.float32
    assert out.states.dtype == torch.bfloat16
    assert out.states.isfinite().all()


def test_lowered_experts_are_bf16_and_their_norms_as_the_residual() -> None:
    model = build("encoder", "sub_ln", dtype=None)
    model.cast_weights(torch.bfloat16)
    found = {
        name.rsplit("f.", 1)[1]: value.dtype for name, value in model.named_parameters() if "blocks.1.feedforward.f" in name
    }
    assert {name for name, dtype in found.items() if dtype == torch.bfloat16} == {
        f"experts.{part}.{kind}" for part in ("input", "output") for kind in ("weight", "bias")
    }
    gradients(model)


@pytest.mark.matrix(3)
@torch.no_grad()
@pytest.mark.parametrize("moe", [MOE, kl.MoE(experts=4, second="sampling", capacity=0.5), kl.MoE(experts=5, top_k=3, every=1)])
@each_shape
def test_a_padded_batch_equals_its_sentences_one_by_one(shape: str, moe: kl.MoE) -> None:
    model = build(shape, "sub_ln", moe).eval()
    together = run(model).states
    for row in range(2):
        source, target = SOURCE[row][SOURCE[row] != 0][None], TARGET[row][TARGET[row] != 0][None]
        alone = model(source, target).states if isinstance(model, kl.EncoderDecoder) else model(source).states
        tokens = TARGET if isinstance(model, kl.EncoderDecoder) else SOURCE
        torch.testing.assert_close(together[row][tokens[row] != 0][None], alone, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("router", ["xmoe", "linear"])
def test_decoding_step_by_step_equals_the_whole(router: str) -> None:
    model = build("decoder", "deepnorm", kl.MoE(experts=4, router=router, capacity=0.5)).eval()  # pyright: ignore[reportArgumentType]
    assert isinstance(model, kl.Decoder)
    whole, cache = model(SOURCE).logits, model.new_cache(6)
    steps = [model(step, cache=cache).logits for step in SOURCE.split([2, 1, 1, 2], dim=1)]
    real = SOURCE != 0
    torch.testing.assert_close(torch.cat(steps, dim=1)[real], whole[real], rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_search_finds_what_the_whole_model_prefers(method: str) -> None:
    model = build().eval()
    assert isinstance(model, kl.EncoderDecoder)
    assert unroll_for_cpu(model) is model  # sparse layers are not written out
    source = torch.tensor([[5, 6, 7, 3], [8, 9, 3, 0]])
    found = generate(model, source, SearchConfig(method=method, max_length_factor=0.0, max_length_extra=6))  # pyright: ignore
    for row, hypotheses in enumerate(found):
        for each in hypotheses:
            text = torch.tensor([[2, *each.tokens, *([3] if each.ended else [])]])
            scores = model(source[row][source[row] != 0][None], text[:, :-1]).logits.log_softmax(dim=-1)
            expected = float(scores.gather(2, text[:, 1:, None]).sum())
            assert each.log_probability == pytest.approx(expected)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("moe", [MOE, kl.MoE(experts=4, second="random", loss_free=1e-3), kl.MoE(experts=4, second="sampling")])
@pytest.mark.parametrize("what", ["selective", "layer"])
def test_recomputation_changes_nothing(what: str, moe: kl.MoE) -> None:
    model = build("encoder", "sub_ln", moe, dropout=0.2, activation_dropout=0.2).train()
    found = []
    for recompute in ("none", what):
        form = fast_form(model, recompute)  # pyright: ignore[reportArgumentType]
        torch.manual_seed(1)
        model.zero_grad()
        out = run(form)
        assert out.routing is not None
        assert out.logits is not None
        (out.logits.logsumexp(-1).mean() + out.router_loss).backward()
        kept = {name: weight.grad for name, weight in model.named_parameters()}
        found.append((out.router_loss.detach(), [told.load for told in out.routing], kept))
    (loss_before, loads_before, gradients_before), (loss_after, loads_after, gradients_after) = found
    assert torch.equal(loss_before, loss_after)
    assert all(torch.equal(a, b) for a, b in zip(loads_before, loads_after, strict=True))
    for name, gradient in gradients_before.items():
        torch.testing.assert_close(gradients_after[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize(
    ("shape", "recipe", "moe", "graphs"),
    [
        ("encoder_decoder", "sub_ln", {"z_loss": 1e-3}, 4),
        ("decoder", "deepnorm", {"router": "linear", "capacity": 1.0}, 2),
        ("encoder", "sub_ln", {"every": 1, "loss_free": 1e-3}, 1),
    ],
)
def test_one_dense_and_one_sparse_layer_are_compiled_a_side(shape: str, recipe: str, moe: dict[str, Any], graphs: int) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(shape, recipe, kl.MoE(experts=4, **moe), layers=6, dtype=torch.float32).train()
    form = fast_form(model)
    compile_layers(form, "aot_eager")
    for rows, source_length, target_length in [(8, 16, 24), (2, 40, 16), (120, 17, 17)]:
        source, target = torch.randint(1, 11, (rows, source_length)), torch.randint(1, 11, (rows, target_length))
        source[0, -3:], target[0, -2:] = 0, 0
        found = []
        for each in (form, model):
            model.zero_grad()
            out = each(source, target) if isinstance(each, kl.EncoderDecoder) else each(source)
            (out.states.square().mean() + out.router_loss).backward()
            assert out.routing is not None
            found.append(({name: weight.grad for name, weight in model.named_parameters()}, [r.load for r in out.routing]))
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
        for name, gradient in found[1][0].items():
            torch.testing.assert_close(found[0][0][name], gradient, rtol=1e-4, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_the_compilers_own_code_computes_the_same() -> None:
    torch._dynamo.reset()
    model = build("decoder", "sub_ln", layers=2, dtype=torch.float32).train()
    form, expected = fast_form(model), gradients(model)
    compile_layers(form)
    for name, gradient in gradients(form).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.matrix(3)
@torch.no_grad()
@pytest.mark.parametrize("recipe", ["deepnorm", "admin", "post_ln", "ds_init"])
@pytest.mark.parametrize("moe", [kl.MoE(experts=4, loss_free=1e-3), kl.MoE(experts=4, router="linear")])
def test_a_folded_model_computes_the_same(recipe: str, moe: kl.MoE) -> None:
    model = build(recipe=recipe, moe=moe)
    if recipe == "admin":
        kl.calibrate(model, (SOURCE, TARGET))
    for name, buffer in model.named_buffers():
        if "selection_bias" in name:
            buffer.normal_(0, 0.1)
    plain = kl.fold(model)
    out, folded = run(model), run(plain)
    assert plain.config.recipe.name == "post_ln"
    assert out.routing is not None
    assert folded.routing is not None
    torch.testing.assert_close(folded.states, out.states, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(a.load, b.load) for a, b in zip(out.routing, folded.routing, strict=True))


@torch.no_grad()
def test_a_trained_admin_vector_folds_into_experts_and_routers() -> None:
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2, "vocab_size": 11, "moe": MOE, "positions": "none"}
    recipe = kl.recipes.get("admin", weight="trainable", start="closed")
    model = kl.build_model(kl.ModelConfig(shape="encoder", recipe=recipe, **sizes), dtype=torch.float64)  # pyright: ignore
    for name, parameter in model.named_parameters():
        if "skip" in name:
            parameter.uniform_(0.5, 2.0)
    torch.testing.assert_close(run(kl.fold(model)).states, run(model).states, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("start", ["released", "paper"])
def test_admin_is_calibrated_with_experts(start: str) -> None:
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4, "vocab_size": 11, "moe": MOE}
    model = kl.build_model(kl.ModelConfig(recipe=kl.recipes.get("admin", start=start), **sizes))  # pyright: ignore
    found = kl.calibrate(model, (SOURCE, TARGET))
    assert len(found.encoder) == 8
    assert len(found.decoder) == 12
    assert all(scale > 0 and math.isfinite(scale) for scale in (*found.encoder, *found.decoder))


def test_gradient_profiles_read_the_experts_matrices() -> None:
    model = build("encoder")
    profile = gradient_profile(model, lambda each: loss(each)).encoder  # pyright: ignore[reportArgumentType]
    found = gradients(model)
    for layer, part in ((0, "f"), (1, "f.experts")):
        matrices = [found[f"encoder.blocks.{layer}.feedforward.{part}.{name}.weight"] for name in ("input", "output")]
        assert profile[layer] == pytest.approx(float(torch.cat([matrix.flatten() for matrix in matrices]).norm()))


def test_dense_models_have_no_routing() -> None:
    out = run(build(moe=None))
    assert out.routing is None
    assert float(out.router_loss) == 0
    assert all(type(block) is Block for block in build("encoder", moe=None).encoder.blocks)  # pyright: ignore


def test_a_sparse_layer_leaves_the_start_of_all_others_as_it_is() -> None:
    dense, sparse = build(moe=None).state_dict(), build().state_dict()
    assert all(torch.equal(value, dense[name]) for name, value in sparse.items() if name in dense)


def test_configurations_hold_experts() -> None:
    table = {"shape": "decoder", "moe": {"experts": 8, "top_k": 1, "router": "linear", "z_loss": 1e-3}}
    made = config.build(kl.ModelConfig, table)
    assert made.moe == kl.MoE(experts=8, top_k=1, router="linear", z_loss=1e-3)
    assert config.build(kl.ModelConfig, config.table_of(made)) == made
    assert "[moe]" in config.dump(config.table_of(made))
    assert config.build(kl.ModelConfig, {"moe": "none"}).moe is None
    typed = config.overrides(["--moe.experts", "4", "--moe.gate=sigmoid"])
    assert config.build(kl.ModelConfig, typed).moe == kl.MoE(experts=4, gate="sigmoid")


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: kl.MoE(experts=4, top_k=5), "top_k must be at most 4"),
    (lambda: kl.MoE(experts=0), "experts is 0"),
    (lambda: kl.MoE(every=0), "every is 0"),
    (lambda: kl.MoE(top_k=0), "top_k is 0"),
    (lambda: kl.MoE(router="linear", gate="sigmoid"), "gate='sigmoid' has no effect on a linear router"),
    (lambda: kl.MoE(router="linear", router_dim=8), "router_dim=8 has no effect on a linear router"),
    (lambda: kl.MoE(router="linear", temperature=0.3), "temperature=0.3 has no effect on a linear router"),
    (lambda: kl.MoE(router="xmeo"), "did you mean 'xmoe'"),  # pyright: ignore[reportArgumentType]
    (lambda: kl.MoE(top_k=1, second="random"), "second='random' has no effect with top_k=1"),
    (lambda: kl.MoE(top_k=3, second="sampling"), "no effect with top_k=3"),
    (lambda: kl.MoE(second="sampling", loss_free=1e-3), "ignores the biases"),
    (lambda: kl.MoE(capacity=0.0), "capacity is 0.0"),
    (lambda: kl.MoE(temperature=0.001), "at least 0.01"),
    (lambda: kl.MoE(router_dim=0), "router_dim is 0"),
    (lambda: kl.MoE(balance=-1.0), "balance is -1.0"),
    (lambda: kl.MoE(z_loss=float("nan")), "z_loss is nan"),
    (lambda: kl.MoE(loss_free=True), "loss_free is True"),
    (lambda: kl.MoE(loss_free=5.0), "below 1"),
    (lambda: kl.MoE(num_experts=4), "num_experts: write experts"),  # pyright: ignore[reportCallIssue]
    (lambda: config.build(kl.ModelConfig, {"experts": 4}), "'experts'; did you mean 'moe.experts'"),
    (lambda: config.build(kl.ModelConfig, {"experts": 4}, "model"), "'model.experts'; did you mean 'model.moe.experts'"),
    (lambda: config.build(kl.ModelConfig, {"equation": "x"}), "unknown option 'equation'"),
    (lambda: build("encoder", moe=kl.MoE(experts=4, every=5)), "every must be at most 4"),
    (lambda: config.build(kl.ModelConfig, {"moe": {"expert": 4}}), "did you mean 'experts'"),
    (lambda: config.build(kl.ModelConfig, {"moe": 4}), r"write it as a table, \[moe\]"),
    (lambda: kl.Encoder(11, 16, 2, 32, 2, mo=kl.MoE()), "did you mean 'moe'"),  # pyright: ignore[reportCallIssue]
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_tell_the_fix(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_one_sparse_side_is_enough() -> None:
    out = run(build(encoder_layers=4, decoder_layers=1, layers=None, moe=kl.MoE(experts=4, every=2)))
    assert out.routing is not None
    assert len(out.routing) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("moe", [MOE, kl.MoE(experts=4, second="random", capacity=1.0, loss_free=1e-3)])
def test_no_sparse_layer_in_its_fast_form_stalls_an_accelerator(moe: kl.MoE, dtype: torch.dtype) -> None:
    model = fast_form(build(recipe="sub_ln", moe=moe, dtype=dtype).cuda().train())
    assert isinstance(model, kl.EncoderDecoder)
    source, target = SOURCE.cuda(), TARGET.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = model(source, target)
        (out.logits.float().logsumexp(-1).mean() + out.router_loss).backward()
        assert out.routing is not None
        if moe.loss_free:
            kl.update_balance(model, [told.load for told in out.routing])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize(("every", "where"), [(1, "every layer"), (3, "every 3rd layer"), (12, "every 12th layer")])
def test_a_configuration_tells_its_experts_in_words(every: int, where: str) -> None:
    config = kl.ModelConfig(layers=12, moe=kl.MoE(experts=8, top_k=1, every=every))
    assert config.experts == f"8 experts, top-1, in {where}"
    assert config.widths.endswith(f", {config.experts}")
    assert kl.ModelConfig(layers=12).experts == ""
