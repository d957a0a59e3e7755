"""A diagnosis of models of other libraries, against gradients, states and steps that are computed here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.probe.diagnosis_page import render_diagnosis
from tests.models.adapt.adaptable_models import SOURCE, STATES, TARGET, bert, gpt2, llama, t5

LR = 1e-3


class Own(nn.Module):
    """A model of one's own, whose layers no library knows."""

    def __init__(self, layers: int = 3, gain: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer[1].weight, std=gain)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def torch_encoder(layers: int = 3, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, layers)


def loss_of(model: Any) -> Tensor:
    if isinstance(model, nn.TransformerEncoder):
        mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return model(STATES, src_key_padding_mask=mask)[~mask].square().mean()
    if isinstance(model, Own):
        return model(torch.linspace(-1, 1, 32).reshape(4, 8)).square().mean()
    if "T5" in type(model).__name__:
        return model(input_ids=SOURCE, decoder_input_ids=TARGET).last_hidden_state.square().mean()
    return model(SOURCE).last_hidden_state.square().mean()


def adapted(model: Any, recipe: str) -> Any:
    kl.adapt(model, recipe, seed=1)
    return model


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (bert, {"encoder": lambda model: model.encoder.layer}),
    "bert with DeepNorm": (lambda: adapted(bert(), "deepnorm"), {"encoder": lambda model: model.encoder.layer}),
    "gpt2": (gpt2, {"model": lambda model: model.h}),
    "gpt2 with Sub-LN": (lambda: adapted(gpt2(), "sub_ln"), {"model": lambda model: model.h}),
    "llama": (llama, {"model": lambda model: model.layers}),
    "t5": (t5, {"encoder": lambda model: model.encoder.block, "decoder": lambda model: model.decoder.block}),
    "torch": (torch_encoder, {"model": lambda model: model.layers}),
    "one's own": (Own, {"model": lambda model: model.layers}),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_states_and_updates_are_those_of_the_model(name: str) -> None:
    make, lists = MODELS[name]
    torch.manual_seed(3)
    model = make().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = kl.diagnose(model, loss_of).measured
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())

    other = copy.deepcopy(model).eval()
    states: list[Tensor] = []
    *_, last = lists.values()
    last(other)[-1].register_forward_hook(lambda _layer, _inputs, out: states.append(out[0] if isinstance(out, tuple) else out))
    value = loss_of(other)
    value.backward()
    assert found.loss == pytest.approx(value.item())
    assert list(found.gradients.layers) == list(lists)
    for side, get in lists.items():
        norms = [torch.cat([w.grad.flatten() for w in layer.parameters() if w.grad is not None]).norm() for layer in get(other)]
        assert found.gradients.layers[side] == pytest.approx([norm.item() for norm in norms])
        assert len(found.residual[side]) == len(norms) + 1
        assert found.norm_inputs[side]
    assert found.residual[next(reversed(lists))][-1] == pytest.approx(states[-1].square().mean().sqrt().item())
    torch.optim.Adam(other.parameters(), lr=LR, betas=(0.9, 0.98)).step()
    loss_of(other)
    moved = (states[-1] - states[0]).norm() / states[0].norm()
    assert found.updates.adam_all == pytest.approx(moved.item(), rel=1e-5)
    assert 0 < found.updates.sgd_matrices <= found.updates.sgd_all * 2


def test_the_input_of_a_norm_is_measured() -> None:
    model = Own()
    found = kl.diagnose(model, loss_of).measured
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    expected = []
    for layer in model.layers:
        expected.append(x.square().mean().sqrt().item())
        x = layer(x)
    assert found.norm_inputs["model"]["0"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_vanishing_gradient_is_found_and_the_advice_is_for_a_loop_of_ones_own() -> None:
    def loss(model: Any) -> Tensor:
        return (model(STATES) * STATES.flip(1)).mean()

    torch.manual_seed(0)
    deep = torch_encoder(40)
    found = kl.diagnose(deep, loss)
    assert "vanishing gradient" in [finding.kind for finding in found.findings]
    assert 'kl.adapt(model, "deepnorm")' in found.options()
    assert "--" not in str(found)
    kl.adapt(deep, "deepnorm", seed=1)
    assert "vanishing gradient" not in [finding.kind for finding in kl.diagnose(deep, loss).findings]


def test_advice_that_does_not_fit_the_model_is_left_out() -> None:
    torch.manual_seed(0)
    found = kl.diagnose(Own(40, gain=0.01), loss_of)
    assert not any("kl.adapt" in option or "--" in option for finding in found.findings for option in finding.options)


def test_it_prints_and_has_a_page() -> None:
    found = kl.diagnose(gpt2(), loss_of)
    assert "GPT2Model, 2 layers, before training" in str(found)
    assert "model 2" in str(found)
    assert "<svg" in render_diagnosis("gpt2", found)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (nn.Linear(3, 3), lambda model: model(torch.ones(3)).sum(), "holds no layers in a list"),
        (Own(), None, "diagnosed with a loss"),
        (Own(), 5, "diagnosed with a loss"),
        (Own(), lambda model: model(torch.ones(2, 8)), r"of shape \(2, 8\)"),
        (Own(), lambda model: 3.0, "the loss is 3.0"),
        (Own(), lambda model: torch.ones(()), "not a number with a gradient"),
    ],
)
def test_what_cannot_be_measured_says_what_it_takes(model: nn.Module, loss: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        kl.diagnose(model, loss)
    assert refused.value.fix
