"""A baked model is a plain one of its own library and computes the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import FoldError, InputError
from kilolayer.recipes.base import Recipe
from tests.models.adapt.adaptable_models import BUILDERS, bart, bert, gpt2, marian, run, torch_encoder, transformers

TRAINED = kl.recipes.get("admin", start="closed", weight="trainable")
CASES: list[tuple[str, str | Recipe]] = [
    *((title, "deepnorm") for title in ("nn.TransformerEncoder", "nn.TransformerDecoder", "nn.Transformer")),
    *((title, recipe) for title in ("BERT", "RoBERTa", "BART") for recipe in ("deepnorm", TRAINED)),
    ("Marian", "deepnorm"),
    *((title, "layer_scale") for title in ("GPT-2", "Llama", "T5", "ViT", "nn.Transformer, norm_first")),
    *((title, "lns") for title in ("GPT-2", "Llama", "T5", "ViT", "nn.Transformer, norm_first")),
    ("GPT-2", kl.recipes.get("complete_p", base_width=16, base_depth=1)),
]


def adapted(title: str, recipe: str | Recipe) -> Any:
    """A model under a recipe, with weights as training leaves them."""
    model = BUILDERS[title]()
    kl.adapt(model, recipe, seed=1)
    spread(model)
    return model.eval()


def spread(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("title", "recipe"), CASES, ids=str)
def test_a_baked_model_is_plain_and_the_same_function(title: str, recipe: str | Recipe) -> None:
    model, plain = adapted(title, recipe), BUILDERS[title]()
    states, real = run(model)
    report = kl.bake(model)
    assert report.sublayers in (4, 6, 10)
    torch.testing.assert_close(run(model)[0][real], states[real], rtol=0, atol=1e-6 if title == "Llama" else 1e-11)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    own = {
        name for name, module in model.named_modules() if getattr(module, "eps", 0) != getattr(_module(plain, name), "eps", 0)
    }
    assert own == set(report.own_eps)
    assert len(own) == (
        0 if title in ("BERT", "RoBERTa", "BART") or recipe != "deepnorm" else 2 if title in ("nn.Transformer", "Marian") else 1
    )


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (lambda: bert("BertForMaskedLM"), "deepnorm"),
        (lambda: bert("BertForMaskedLM"), TRAINED),
        (lambda: bart("BartForConditionalGeneration"), "deepnorm"),
        (lambda: gpt2("GPT2LMHeadModel"), "layer_scale"),
    ],
)
def test_a_baked_model_is_saved_and_loaded_by_its_own_class(build: Any, recipe: str | Recipe, tmp_path: Path) -> None:
    model = build()
    kl.adapt(model, recipe, seed=1)
    spread(model)
    model.eval()
    ids = torch.tensor([[5, 6, 7, 9, 11], [9, 8, 7, 4, 3]])
    logits = model(ids).logits
    kl.bake(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(loaded(ids).logits, logits, rtol=0, atol=1e-10)


def test_marians_first_norms_have_an_eps_that_its_configuration_does_not_hold(tmp_path: Path) -> None:
    model = marian("MarianMTModel").eval()
    alpha = kl.adapt(model, "deepnorm", seed=1).constants["encoder"].alpha
    ids = torch.tensor([[5, 6, 7, 9, 3]])
    logits = model(ids, decoder_input_ids=ids).logits
    report = kl.bake(model)
    assert report.own_eps["model.encoder.layers.0.self_attn_layer_norm"] == pytest.approx(1e-5 / alpha**2)
    assert "eps of its own" in repr(report)
    torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, logits, rtol=0, atol=1e-12)
    model.save_pretrained(tmp_path)
    loaded = transformers.MarianMTModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(loaded(ids, decoder_input_ids=ids).logits, logits, rtol=0, atol=1e-4)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("build", "recipe", "words"),
    [
        (gpt2, "sub_ln", "inner_norm"),
        (gpt2, "normformer", "post_norm, head_scale"),
        (gpt2, "peri_ln", "input_norm"),
        (bert, "keel", "pre_norm"),
        (marian, TRAINED, "no norm before it"),
    ],
)
def test_what_no_weight_can_hold_is_refused_and_left_as_it_is(build: Any, recipe: str | Recipe, words: str) -> None:
    model = build()
    kl.adapt(model, recipe, seed=1)
    states = run(model)[0]
    with pytest.raises(FoldError, match=words):
        kl.bake(model)
    torch.testing.assert_close(run(model)[0], states, rtol=0, atol=0)


def test_a_model_without_a_recipe_is_refused() -> None:
    with pytest.raises(InputError, match="no recipe"):
        kl.bake(bert())


def test_a_part_is_adapted_and_the_whole_is_baked() -> None:
    model = bert("BertForMaskedLM").eval()
    kl.adapt(model.bert, "deepnorm", seed=1)
    ids = torch.tensor([[5, 6, 7]])
    logits = model(ids).logits
    assert kl.bake(model).own_eps == {}
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-12)


class OwnBert(nn.Module):
    """BERT's parts with a convolution between embeddings and layers."""

    def __init__(self) -> None:
        super().__init__()
        whole = bert()
        self.embeddings, self.encoder = whole.embeddings, whole.encoder
        self.mix = nn.Conv1d(16, 16, 3, padding=1, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states = self.embeddings(input_ids=ids)
        return self.encoder(states + self.mix(states.mT).mT).last_hidden_state


class MixedEncoder(nn.Module):
    """A convolution before the layers, in the encoder's place."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.layer, self.encoder = encoder.layer, [encoder]
        self.mix = nn.Conv1d(16, 16, 3, padding=1, dtype=torch.float64)

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.encoder[0](states + self.mix(states.mT).mT, *args, **kwargs)


class MixedBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = bert()
        self.bert.encoder = MixedEncoder(self.bert.encoder)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.bert(ids).last_hidden_state


@pytest.mark.parametrize("build", [OwnBert, MixedBert])
def test_a_norm_of_embeddings_that_the_layers_do_not_read_directly_is_left_as_it_is(build: Any) -> None:
    model = build().eval()
    kl.adapt(model, "deepnorm", seed=1)
    spread(model)
    ids = torch.tensor([[5, 6, 7, 9]])
    states = model(ids)
    assert len(kl.bake(model).own_eps) == 1
    torch.testing.assert_close(model(ids), states, rtol=0, atol=1e-11)


class Block(nn.Module):
    """A layer after a convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mix = layer, nn.Conv1d(16, 16, 3, padding=1, dtype=torch.float64)

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.layer(states + self.mix(states.mT).mT, *args, **kwargs)


def test_what_blocks_compute_between_layers_stays_the_same() -> None:
    model = bert().eval()
    model.encoder.layer = nn.ModuleList(map(Block, model.encoder.layer))
    learned = copy.deepcopy(model)
    kl.adapt(model, "deepnorm", seed=1)
    spread(model)
    states = run(model)[0]
    assert len(kl.bake(model).own_eps) == 2
    torch.testing.assert_close(run(model)[0], states, rtol=0, atol=1e-11)
    kl.adapt(learned, TRAINED, seed=1)
    with pytest.raises(FoldError, match="no norm before it"):
        kl.bake(learned)


def test_the_states_between_the_layers_are_alpha_times_larger() -> None:
    model = bert().eval()
    alpha = kl.adapt(model, "deepnorm", seed=1).constants["encoder"].alpha
    ids = torch.tensor([[5, 6, 7]])
    *before, last = model(ids, output_hidden_states=True).hidden_states
    kl.bake(model)
    *after, same = model(ids, output_hidden_states=True).hidden_states
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, alpha * theirs, rtol=0, atol=1e-11)
    torch.testing.assert_close(same, last, rtol=0, atol=1e-11)


def test_a_copy_is_baked_alone() -> None:
    model: Any = torch_encoder().eval()
    kl.adapt(model, "deepnorm", seed=1)
    other = copy.deepcopy(model)
    states = run(model)[0]
    kl.bake(other)
    assert not other.layers[0].self_attn._forward_hooks
    assert other.use_nested_tensor
    assert not model.use_nested_tensor
    torch.testing.assert_close(run(model)[0], states, rtol=0, atol=0)


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name)


def test_a_copy_of_an_adapted_model_says_how_to_load_it_and_a_baked_model_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = bert()
    kl.adapt(model, "deepnorm")
    copy.deepcopy(model).save_pretrained(tmp_path / "copied")
    assert "load it with kl.load_model" in caplog.text
    caplog.clear()
    kl.bake(model)
    model.save_pretrained(tmp_path / "baked")
    assert not caplog.text
