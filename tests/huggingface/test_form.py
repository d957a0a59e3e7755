"""Which class a model goes to, and why one goes nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.huggingface.form import NoPlainForm, PlainForm, find_form

POST_LN = {"admin", "deepnorm", "ds_init", "post_ln", "post_ln_init"}
SIZES: dict[str, Any] = {"vocab_size": 20, "dim": 16, "heads": 2, "ffn_dim": 24}


def translator(recipe: Any, **options: Any) -> kl.EncoderDecoder:
    return kl.EncoderDecoder(**SIZES, encoder_layers=2, decoder_layers=2, recipe=recipe, **options).eval()


@pytest.mark.matrix(3)
@pytest.mark.parametrize("recipe", sorted(kl.recipes.names()))
def test_every_recipe_goes_to_its_class_or_says_why_not(recipe: str) -> None:
    decoder = kl.Decoder(**SIZES, layers=2, recipe=recipe, pad_id=None).eval()
    found = [find_form(model, 32) for model in (translator(recipe), decoder)]
    if recipe in POST_LN | {"pre_ln"}:
        classes = [form.foreign.model_type for form in found if isinstance(form, PlainForm)]
        assert classes == ["marian" if recipe in POST_LN else "pegasus", "opt"]
    else:
        assert all(isinstance(form, NoPlainForm) for form in found)
        assert ["plain" in form.why for form in found] == [True, True]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"positions": "rotary"}, "positions are rotary"),
        ({"moe": kl.MoE(experts=2, top_k=1)}, "experts"),
        ({"recipe": "pre_ln", "tie_embeddings": False}, "do not share one table"),
        ({"recipe": "pre_ln", "final_norm": False}, "no final norm"),
        ({"norm_eps": 1e-6}, "norm_eps"),
    ],
)
def test_a_translator_that_fits_no_class_says_why(options: dict[str, Any], reason: str) -> None:
    form = find_form(translator(**{"recipe": "post_ln", **options}), 32)
    assert isinstance(form, NoPlainForm)
    assert reason in form.why


def test_a_trained_w_needs_a_table_of_positions_which_opt_has_and_marian_has_not() -> None:
    recipe = kl.recipes.get("admin", weight="trainable")
    decoder = kl.Decoder(**SIZES, layers=2, recipe=recipe, pad_id=None).eval()
    models = (translator(recipe), decoder)
    for model in models:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".skip." in name:
                    parameter.add_(torch.rand_like(parameter))
    seq2seq, causal = (find_form(model, 32) for model in models)
    assert isinstance(seq2seq, NoPlainForm)
    assert "positions are learned" in seq2seq.why
    assert isinstance(causal, PlainForm)
    tokens = torch.randint(0, 20, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(causal.model(tokens).logits, decoder(tokens).logits, rtol=0, atol=1e-5)


def test_an_encoder_fits_no_class() -> None:
    form = find_form(kl.Encoder(**SIZES, layers=2, recipe="deepnorm").eval(), 32)
    assert isinstance(form, NoPlainForm)
    assert "encoder" in form.why
