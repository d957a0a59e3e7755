"""Names of the last release still work, and say what they are called now."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer import errors
from kilolayer.layers.initialize import KeyedGenerator, initialize


def encoder() -> kl.Encoder:
    return kl.Encoder(layers=1, dim=8, heads=2, ffn_dim=16, vocab_size=9)


def test_an_error_has_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="errors.IdleOptionError is now kilolayer.errors.UnusedOptionError"):
        old = errors.IdleOptionError
    assert old is errors.UnusedOptionError
    with pytest.raises(AttributeError, match="no attribute 'IdlOptionError'"):
        errors.IdlOptionError  # noqa: B018  # pyright: ignore


def test_fields_have_their_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="the argument start is now init"):
        old = kl.recipes.Learned(start=0.5, shape="scalar")  # pyright: ignore
    assert old == kl.recipes.Learned(init=0.5, shape="scalar")
    with pytest.warns(DeprecationWarning, match="Learned.start is now .init"):
        assert old.start == 0.5
    with pytest.warns(DeprecationWarning, match="the argument normalise is now normalize"):
        assert kl.recipes.Combination(normalise="sum") == kl.recipes.Combination("sum")  # pyright: ignore


def test_methods_have_their_old_names() -> None:
    model, other = encoder(), encoder()
    before = model.state_dict()
    with pytest.warns(DeprecationWarning, match="Encoder.lower is now .cast_weights"):
        assert len(model.lower(torch.bfloat16)) == len(other.cast_weights(torch.bfloat16))
    assert {each.dtype for each in model.state_dict().values()} == {torch.bfloat16, torch.float32}
    with pytest.warns(DeprecationWarning, match="Encoder.initialise is now .initialize"):
        model.float().initialise()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with pytest.warns(DeprecationWarning, match="Encoder.materialise is now .materialize"):
        made = kl.Encoder(layers=1, dim=8, heads=2, ffn_dim=16, vocab_size=9, device="meta").materialise("cpu")
    assert not any(each.is_meta for each in made.parameters())


def test_positions_to_predict_were_places() -> None:
    model, tokens, positions = encoder().eval(), torch.tensor([[1, 2, 3]]), torch.tensor([[2]])
    with pytest.warns(DeprecationWarning, match="the argument places is now positions"):
        old = model(tokens, places=positions).logits
    assert torch.equal(old, model(tokens, positions=positions).logits)


def test_what_has_its_new_name_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kl.recipes.Learned(0.5, "scalar").init == 0.5
        encoder().cast_weights(torch.bfloat16)


class OldModule(nn.Module):
    """A module that was written for the last release."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def fill(self, noise: KeyedGenerator) -> None:
        noise.normal_(self.weight, 1.0)


def test_modules_with_fill_are_initialized() -> None:
    old = OldModule()
    with pytest.warns(DeprecationWarning, match=r"OldModule.fill\(noise\) is now reset_parameters\(generator\)"):
        initialize(old, seed=1)
    expected = torch.empty(3)
    KeyedGenerator(1, "").normal_(expected, 1.0)
    assert torch.equal(old.weight, expected)


@pytest.mark.parametrize("name", ["embedding", "encoder.blocks.0.feedforward.f.input", "encoder.blocks.0.feedforward.f.output"])
def test_a_module_resets_itself_without_a_generator(name: str) -> None:
    """As torch's modules do: reproducible by `torch.manual_seed`, and other values at each call."""
    module = encoder().get_submodule(name)

    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        return module.weight.detach().clone()  # pyright: ignore[reportCallIssue]

    first = weights(1)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
    assert 0.05 < float(first.std()) < 0.6


def test_a_module_of_torch_in_a_model_is_refused() -> None:
    """Its `reset_parameters` draws from torch's generator, by the order of construction."""
    with pytest.raises(errors.InputError, match="nothing says how they start"):
        initialize(nn.Sequential(nn.Linear(2, 3)), seed=1)
