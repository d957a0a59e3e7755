"""What stands around a model's tables: token types, a transform and a bias before scores, tokens that are never predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.errors import InputError, OptionError

TOKENS = torch.tensor([[5, 6, 7, 3], [9, 8, 7, 6]])


def test_scores_are_the_written_out_formula() -> None:
    model = kl.Encoder(20, 16, 2, 32, 2, activation="gelu_tanh", output_transform=True, output_bias=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    out, weights = model(TOKENS), model.state_dict()
    hidden = F.gelu(out.states @ weights["transform.dense.weight"].T + weights["transform.dense.bias"], approximate="tanh")
    normed = F.layer_norm(hidden, (16,), weights["transform.norm.weight"], weights["transform.norm.bias"], 1e-5)
    expected = normed @ weights["embedding.weight"].T + weights["output_bias.weight"]
    torch.testing.assert_close(out.logits, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kl.fast(model)(TOKENS).logits, expected, rtol=1e-12, atol=1e-12)


def test_what_is_never_predicted_has_no_probability_and_gets_no_gradient() -> None:
    model = kl.Decoder(20, 16, 2, 32, 2, "pre_ln", tie_embeddings=False, dtype=torch.float64)
    less = kl.build_model(replace(model.config, first_predicted=3), dtype=torch.float64)
    less.load_state_dict(model.state_dict())
    loss = F.cross_entropy(less(TOKENS).logits.flatten(0, 1), TOKENS.flatten())
    expected = F.cross_entropy(model(TOKENS).logits[..., 3:].flatten(0, 1), TOKENS.flatten() - 3)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    gradient = less.get_parameter("vocabulary.weight").grad
    assert gradient is not None
    assert not gradient[:3].any()
    assert gradient[3:].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kl.Encoder(20, 16, 2, 32, 2, kl.recipes.get("peri_ln"), embedding_norm=True), "has such a norm"),
        (lambda: kl.Encoder(20, 16, 2, 32, 2, output_bias=True, head=kl.Head()), "output_bias has no effect"),
        (lambda: kl.Encoder(None, 16, 2, 32, 2, output_transform=True), "output_transform has no effect"),
        (lambda: kl.Encoder(20, 16, 2, 32, 2, activation="swiglu", output_transform=True), "swiglu, which needs a gate"),
        (lambda: kl.ModelConfig(shape="decoder", token_types=2), "no token types"),
        (lambda: kl.ModelConfig(shape="decoder", output_transform=True), "applies to encoders"),
        (lambda: kl.ModelConfig(vocab_size=9, first_predicted=9), "first_predicted is 9"),
        (lambda: kl.Encoder(20, 16, 2, 32, 2)(TOKENS, types=TOKENS), "no token types"),
        (lambda: kl.Encoder(20, 16, 2, 32, 2, token_types=2)(TOKENS, types=TOKENS), "range from 3 to 9"),
        (lambda: kl.Encoder(20, 16, 2, 32, 2, token_types=2)(TOKENS, types=TOKENS[:1]), "shape"),
    ],
)
def test_what_has_no_effect_or_no_place_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises((InputError, OptionError), match=message):
        make()
