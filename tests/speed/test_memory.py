"""The memory rounded once against a memory that every layer rounds for itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.speed.compiler import Recompute
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.memory import Memory
from kilolayer.speed.operators import kernels

pytestmark = pytest.mark.filterwarnings("default")  # the compiler warns about itself


def small_model(recipe: str, **options: object) -> kl.EncoderDecoder:
    model = kl.EncoderDecoder(50, 32, 4, 64, 2, 3, recipe, **options).train()  # pyright: ignore
    model.cast_weights(torch.bfloat16)
    return model


def texts(length: int) -> tuple[Tensor, Tensor]:
    source, target = torch.randint(1, 50, (2, 4, length), generator=torch.Generator().manual_seed(length))
    source[2, 5:], target[3, 7:] = 0, 0
    return source, target


def scores_and_gradients(model: kl.EncoderDecoder, source: Tensor, target: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(source, target)
    (F.cross_entropy(out.logits.float().flatten(0, 1), target.flatten()) + out.router_loss).backward()
    return [out.logits.detach(), *[weight.grad for weight in model.parameters() if weight.grad is not None]]


def each_layer_rounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Memory, "of", classmethod(lambda cls, states, dtype: cls(states, states)))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("what", ["none", "selective", "layer"])
@pytest.mark.parametrize(
    ("recipe", "options"), [("deepnorm", {}), ("sub_ln", {}), ("deepnorm", {"moe": kl.MoE(experts=4)})], ids=str
)
def test_numbers_are_those_of_layers_that_round_for_themselves(
    recipe: str, options: dict[str, object], what: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = fast_form(small_model(recipe, **options), what)
    with kernels.assumed("cpu"):
        found = scores_and_gradients(form, *texts(12))
        each_layer_rounds(monkeypatch)
        expected = scores_and_gradients(form, *texts(12))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_one_compiled_layer_serves_all_and_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    form, found = fast_form(small_model("deepnorm")), {}
    for apart in (False, True):
        if apart:
            each_layer_rounds(monkeypatch)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compile_layers(form, "aot_eager")
        found[apart] = [each for length in (12, 17) for each in scores_and_gradients(form, *texts(length))]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for ours, theirs in zip(found[False], found[True], strict=True):
        assert torch.equal(ours, theirs)


def test_all_layers_read_one_rounded_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    form, seen = fast_form(small_model("deepnorm")), []
    read = Memory.read

    def noted(memory: Memory) -> Tensor:
        seen.append(read(memory))
        return seen[-1]

    monkeypatch.setattr(Memory, "read", noted)
    with kernels.assumed("cpu"):
        out = form(*texts(12))
    assert out.memory.dtype == torch.float32
    assert len(seen) == 3
    assert {each.data_ptr() for each in seen} == {seen[0].data_ptr()}
    assert torch.equal(seen[0], out.memory.bfloat16())


def test_gradients_of_layers_are_added_in_fp32() -> None:
    states = torch.randn(2, 3, 8, requires_grad=True)
    memory = Memory.of(states, torch.bfloat16)
    gradients = torch.randn(50, 2, 3, 8).bfloat16()
    torch.autograd.backward([memory.read() for _ in gradients], list(gradients))
    assert states.grad is not None
    assert torch.allclose(states.grad.double(), gradients.double().sum(dim=0), atol=1e-5)


def test_where_nothing_is_rounded_layers_read_the_states_themselves() -> None:
    states = torch.randn(2, 3, 8)
    assert Memory.of(states, torch.float32).read() is states


def test_decoding_step_by_step_gives_the_scores_of_the_whole() -> None:
    model, (source, target) = small_model("deepnorm").eval(), texts(12)
    form = fast_form(model)
    with kernels.assumed("cpu"):
        cache, memory = form.new_cache(12), form.encode(source)
        steps = [form.decode(target[:, step : step + 1], memory, cache=cache).logits for step in range(7)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(source, target).logits[:, :7], rtol=0.05, atol=0.05)
