"""A model written out for the CPU against the model itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.search import generate
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.stack import Stack
from kilolayer.speed.int8_product import Int8Product
from kilolayer.speed.packed_product import PackedProduct
from kilolayer.speed.runtime import FAST
from kilolayer.speed.written import WrittenStack, WrittenVocabulary, unroll_for_cpu

PAD, EOS = 0, 3
VOCABULARY = 23
OPTIONS: list[dict[str, Any]] = [
    *({"recipe": name} for name in kl.recipes.names()),
    *({"positions": kind} for kind in ("rotary", "xpos", "t5", "none")),
    {"positions": "learned", "max_length": 16},
    {"kv_heads": 2},
    {"tie_embeddings": True},
    {"norm": "rms"},
    {"activation": "gelu"},
    {"activation": "swiglu", "recipe": "sub_ln", "norm": "rms"},
    {"dropout": 0.3, "drop_path": 0.2},
]
METHODS = {
    "greedy": SearchConfig(method="greedy"),
    "beam": SearchConfig(beam=4, n_best=3),
    "samples": SearchConfig(method="sample", n_best=3, seed=7),
    "top-k": SearchConfig(method="sample", top_k=5, top_p=0.9, seed=1),
}


def with_noise(model: Any) -> Any:
    """Every scale, shift and bias away from where it starts; distributions that differ from step to step."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
        (model.vocabulary or model.embedding).weight.mul_(3)
    return model.eval()


def translator(dtype: torch.dtype = torch.float64, **options: Any) -> kl.EncoderDecoder:
    torch.manual_seed(0)
    options = {"tie_embeddings": False, **options}
    return with_noise(kl.EncoderDecoder(VOCABULARY, 16, 4, 24, 2, 3, dtype=dtype, **options))


def sources(lengths: Sequence[int] = (6, 2, 4, 1, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [[*torch.randint(4, VOCABULARY, (length - 1,), generator=generator).tolist(), EOS] for length in lengths]
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


def written_out(model: Any, source: Tensor, config: SearchConfig) -> list[list[Hypothesis]]:
    """`generate` as a run's model does on the CPU: without the model's modules."""
    return generate(FAST.bind(model), source, config)


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]], rel: float) -> None:
    assert [[each.tokens for each in row] for row in found] == [[each.tokens for each in row] for row in expected]
    scores = [[each.score for row in rows for each in row] for rows in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], rel=rel)


@pytest.mark.matrix(32)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_hypotheses(options: dict[str, Any], method: SearchConfig) -> None:
    model = translator(**options)
    assert isinstance(unroll_for_cpu(model).decoder, WrittenStack)
    assert_same(written_out(model, sources(), method), generate(model, sources(), method), rel=1e-9)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("recipe", ["deepnorm", "admin", "sub_ln"])
def test_the_same_hypotheses_in_fp32_whose_matrices_are_packed(recipe: str) -> None:
    model = translator(torch.float32, recipe=recipe)
    config = SearchConfig(beam=4, n_best=2)
    together = written_out(model, sources(), config)
    assert_same(together, generate(model, sources(), config), rel=1e-5)
    for row, hypotheses in zip(sources(), together, strict=True):
        assert_same(written_out(model, row[row != PAD][None], config), [hypotheses], rel=1e-5)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "t5"])
@pytest.mark.parametrize("recipe", ["deepnorm", "r_fixup"])
def test_a_decoder_continues_the_same(positions: str, recipe: str) -> None:
    model = with_noise(kl.Decoder(VOCABULARY, 16, 4, 24, 2, recipe, positions=positions, dtype=torch.float64))
    for config in METHODS.values():
        assert_same(written_out(model, sources(), config), generate(model, sources(), config), rel=1e-9)


@torch.no_grad()
def test_the_model_is_left_as_it_was() -> None:
    model = translator(recipe="admin", dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    written = unroll_for_cpu(model)
    generate(written, sources(), SearchConfig())
    assert unroll_for_cpu(written) is written
    assert not isinstance(model.decoder, WrittenStack)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_hidden_states_come_from_the_modules() -> None:
    model = translator()
    tokens = sources()
    states, expected = (each(tokens, tokens, hidden_states=True).hidden_states for each in (unroll_for_cpu(model), model))
    assert states is not None
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


def test_what_is_not_known_comes_back_as_it_is() -> None:
    lowered, hooked, extended, half = translator(), translator(), translator(), translator(torch.bfloat16)
    lowered.cast_weights(torch.bfloat16)
    hooked.decoder.blocks[0].register_forward_hook(lambda *_: None)
    extended.decoder.sublayers()[0].f.add_module("query_norm", nn.LayerNorm(4, dtype=torch.float64))
    for model in (lowered, hooked, extended, half):
        assert unroll_for_cpu(model) is model


class NegatedStack(Stack):
    def top(self, x: Tensor) -> Tensor:
        return -super().top(x)


def of_own_class(model: Any) -> None:
    model.decoder.__class__ = NegatedStack


def with_own_vocabulary(model: Any) -> None:
    model.vocabulary = nn.Linear(16, VOCABULARY, dtype=torch.float64)
    nn.init.uniform_(model.vocabulary.bias, -9, 9)


def with_own_forward(model: Any) -> None:
    network = model.decoder.blocks[0].feedforward.f
    plain = network.forward
    network.forward = lambda x: -3 * plain(x)


@torch.no_grad()
@pytest.mark.parametrize("change", [of_own_class, with_own_vocabulary, with_own_forward])
def test_what_a_user_has_changed_decodes_as_it_is(change: Callable[[Any], None]) -> None:
    model = translator()
    change(model)
    fast = kl.fast(model)
    assert unroll_for_cpu(fast) is fast
    assert_same(generate(fast, sources(), SearchConfig(beam=2)), generate(model, sources(), SearchConfig(beam=2)), rel=1e-9)


@torch.no_grad()
def test_a_hook_on_all_modules_is_called() -> None:
    model = translator()
    hook = register_module_forward_hook(lambda module, _, y: -y if isinstance(module, FeedForward) else None)
    try:
        assert unroll_for_cpu(model) is model
    finally:
        hook.remove()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_matrix_gives_the_product(rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(20, 12), torch.randn(20) if biased else None, torch.randn(rows, 12)
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(PackedProduct(weight, bias)(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.int8
@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("least", [0, -64])
@pytest.mark.parametrize("reduced", [True, False])
def test_the_int8_product_of_integers_is_exact(rows: int, biased: bool, least: int, reduced: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randint(-127, 128, (70, 300)), torch.randint(-1000, 1000, (70,)) if biased else None
    weight[:, 0] = 127
    weight[3] = 0
    product = Int8Product(weight.float(), None if bias is None else bias.float())
    product.reduce_range |= reduced
    greatest = least + (127 if product.reduce_range else 255)
    x = torch.randint(least, greatest + 1, (rows, 300))
    x[0, :2] = torch.tensor([least, greatest])  # a step of x is 1, as one of the weights is: nothing is rounded
    exact = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(product(x.float()), exact.float(), rtol=1e-6, atol=0.01)


@pytest.mark.int8
@torch.no_grad()
def test_the_int8_product_is_as_near_as_its_steps_allow() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(90, 257) * torch.logspace(-3, 2, 90)[:, None], torch.randn(9, 257)
    product = Int8Product(weight, None)
    step_of_x = (x.max() - x.min()).double() / (127 if product.reduce_range else 255)
    step_of_weight = weight.abs().amax(dim=1).double() / 127
    # Half a step of each factor times the other, and half a step of x more, by which its range moves so that 0 is met.
    most = step_of_x * (weight.abs().sum(dim=1) + 257 / 2 * step_of_weight)
    most = most + step_of_weight / 2 * x.abs().sum(dim=1, keepdim=True)
    assert ((product(x) - x.double() @ weight.double().T).abs() < most).all()


@pytest.mark.int8
@torch.no_grad()
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_int8_logits_are_near_those_of_fp32(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.written.LEAST_INT8", 0)
    model, tokens = translator(torch.float32, recipe=recipe), sources()
    written = unroll_for_cpu(model, int8=True)
    found, expected = written(tokens, tokens).logits, model(tokens, tokens).logits
    near = 0.1 if Int8Product(torch.ones(1, 1), None).reduce_range else 0.05  # 7 bits of x on processors whose sums saturate
    assert 0 < (found - expected).norm() < near * expected.norm()
    assert unroll_for_cpu(written) is written


@pytest.mark.int8
@torch.no_grad()
def test_int8_is_for_large_matrices_alone() -> None:
    torch.manual_seed(0)
    model = kl.Decoder(600, 256, 4, 1024, 1).eval()
    written = unroll_for_cpu(model, int8=True)
    assert isinstance(written.decoder, WrittenStack)
    assert isinstance(written.vocabulary, WrittenVocabulary)
    attention, feedforward = (sublayer.f for sublayer in written.decoder.written[0])
    assert isinstance(vars(written.vocabulary)["product"], PackedProduct)
    assert {type(vars(attention)[name]) for name in ("query_key_value", "output")} == {PackedProduct}
    assert {type(vars(feedforward)[name]) for name in ("input", "output")} == {Int8Product}


@pytest.mark.parametrize("model", [translator(torch.float64), kl.Decoder(9, 8, 2, 8, 2, moe=kl.MoE(experts=2))])
def test_int8_refuses_what_it_cannot_compute(model: Any) -> None:
    with pytest.raises(OptionError, match="use fp32"):
        unroll_for_cpu(model, int8=True)
