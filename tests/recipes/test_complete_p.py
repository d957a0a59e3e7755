"""CompleteP's rules of training, against the parameterisation of its authors' code with torch's AdamW."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import OptionError
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.recipes.base import Depths, Part
from kilolayer.recipes.role import Role
from kilolayer.tasks.train_config import TrainConfig
from tests.recipes import naive_transformer as naive
from tests.recipes.tiny_models import HEADS, PADDING, SHAPES, TARGET, build

LR, EPS, DECAY, BETAS = 0.05, 0.01, 0.2, (0.9, 0.98)
YES, ONE = torch.tensor(True), torch.tensor(1.0, dtype=torch.float64)
LABELS = TARGET.roll(1, 1)


def loss_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[TARGET != PADDING], LABELS[TARGET != PADDING])


class AuthorsForm:
    """A decoder whose tables start alike at every width: read as they are, and scored after a division by the width's ratio."""

    def __init__(self, start: dict[str, Tensor], base_width: int, base_depth: int, alpha: float) -> None:
        self.options = {"base_width": base_width, "base_depth": base_depth, "alpha": alpha}
        self.wider, self.deeper = 8 / base_width, SHAPES["decoder"]["decoder"] / base_depth
        self.alpha = alpha
        # A table of ours is one of theirs divided by sqrt(m_N).
        self.weights = {
            name: (value * (math.sqrt(self.wider) if name.startswith("embedding") else 1)).clone().requires_grad_()
            for name, value in start.items()
        }

    def logits(self) -> Tensor:
        reference = naive.CompleteP(self.weights, SHAPES["decoder"], HEADS, **self.options)
        states = reference.decode(reference.embed(TARGET) / math.sqrt(self.wider), TARGET != PADDING)
        return states / math.sqrt(self.wider) @ self.weights["embedding.weight"].T

    def optimizer(self) -> torch.optim.AdamW:
        by_depth = self.deeper ** (self.alpha - 1)
        groups = []
        for name, weight in self.weights.items():
            if name.startswith("embedding"):
                lr, decay = LR, DECAY
            elif "top_norm" in name:
                lr, decay = LR, 0.0
            elif weight.dim() == 2:
                lr, decay = LR * by_depth / self.wider, DECAY * self.wider
            else:
                lr, decay = LR * by_depth, 0.0
            groups.append({"params": [weight], "lr": lr, "weight_decay": decay})
        return torch.optim.AdamW(groups, betas=BETAS, eps=EPS / self.wider / self.deeper**self.alpha, foreach=False)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("base_width", "base_depth", "alpha"), [(8, 2, 1.0), (2, 1, 1.0), (2, 1, 0.5), (32, 8, 0.75)])
def test_it_learns_as_the_authors_parameterisation_does(base_width: int, base_depth: int, alpha: float) -> None:
    torch.manual_seed(2)
    model = build("decoder", "complete_p", {"base_width": base_width, "base_depth": base_depth, "alpha": alpha})
    peer = AuthorsForm({name: weight.detach() for name, weight in model.named_parameters()}, base_width, base_depth, alpha)
    config = TrainConfig(optimizer="adamw", lr=LR, eps=EPS, weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1])
    ours, theirs = make_optimizer(model, config), peer.optimizer()
    for _ in range(5):
        logits = model(TARGET).logits
        expected = peer.logits()
        torch.testing.assert_close(logits[TARGET != PADDING], expected[TARGET != PADDING], rtol=1e-9, atol=1e-9)
        ours.clear()
        loss_of(logits).backward()
        theirs.zero_grad()
        loss_of(expected).backward()
        ours.update(ONE, YES)
        theirs.step()


def test_at_the_base_nothing_is_changed() -> None:
    recipe = kl.recipes.get("complete_p", base_width=64, base_depth=6)
    assert recipe.unusual_rates(Depths(6, 6), 64) == {}
    assert recipe.output_factor(64) == 1
    torch.manual_seed(4)
    at_base = kl.EncoderDecoder(11, 64, 2, 24, 6, 6, recipe)
    torch.manual_seed(4)
    plain = kl.EncoderDecoder(11, 64, 2, 24, 6, 6, kl.recipes.get("pre_ln", init="xavier"))
    batch = torch.randint(1, 11, (2, 3, 5))
    assert torch.equal(at_base(*batch).logits, plain(*batch).logits)


def test_factors_at_four_times_the_width_and_ten_times_the_depth() -> None:
    recipe = kl.recipes.get("complete_p", base_width=256, base_depth=20)
    found = {weight: astuple(recipe.rates(weight, "decoder", Depths(decoder=200), 1024)) for weight in (*Role, *Part)}
    matrix, small = pytest.approx((1 / 4, 1 / 40, 4)), pytest.approx((1, 1 / 40, 1))
    table = pytest.approx((1 / 2, 1 / 20, 2))
    assert found == {
        **dict.fromkeys(Role, matrix),
        **dict.fromkeys((Part.NORM, Part.BIAS, Part.SCALE, Part.POSITIONS, Part.TOP), small),
        **dict.fromkeys((Part.EMBEDDING, Part.VOCABULARY), table),
    }


def test_a_scaled_output_is_that_of_a_vocabulary_alone() -> None:
    recipe = kl.recipes.get("complete_p", base_width=4)
    sizes = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2, "recipe": recipe}
    scores = kl.Encoder(11, **sizes)
    assert "output_scale" in str(scores.encoder)
    assert "0.5000" in str(scores.encoder.output_scale)
    for other in (kl.Encoder(11, **sizes, head=kl.Head()), kl.Encoder(None, **sizes, pad_id=None)):
        assert str(other.encoder.output_scale) == "Identity()"
    both = kl.EncoderDecoder(11, 16, 2, 24, 2, 2, recipe)
    assert str(both.encoder.output_scale) == "Identity()"
    assert "0.5000" in str(both.decoder.output_scale)


def test_tables_without_the_root_of_the_width_are_refused() -> None:
    with pytest.raises(OptionError, match="scale_embeddings"):
        kl.Decoder(11, 8, 2, 12, 2, "complete_p", scale_embeddings=False)
