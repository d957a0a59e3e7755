"""What a model is where nothing is said: one answer from Python, from a table and from a task."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, table_of
from kilolayer.tasks.config import RunConfig

SMALL: dict[str, Any] = {"vocab_size": 11, "dim": 16, "heads": 2, "ffn_dim": 24}


@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln"])
def test_a_decoder_alone_has_two_tables_and_the_other_shapes_one(recipe: str) -> None:
    made = {
        "encoder": kl.Encoder(**SMALL, layers=1, recipe=recipe),
        "decoder": kl.Decoder(**SMALL, layers=1, recipe=recipe),
        "encoder_decoder": kl.EncoderDecoder(**SMALL, encoder_layers=1, decoder_layers=1, recipe=recipe),
    }
    for shape, model in made.items():
        tied = shape != "decoder"
        assert (model.vocabulary is None) is tied
        config = build(kl.ModelConfig, {"shape": shape, "recipe": recipe, **SMALL})
        assert config.tie_embeddings is tied is kl.ModelConfig(shape=shape).tie_embeddings  # pyright: ignore
        assert table_of(config)["tie_embeddings"] is tied
    assert build(RunConfig, {"task": "causal_lm"}).model.tie_embeddings is False
    assert kl.Decoder(**SMALL, layers=1, tie_embeddings=True).vocabulary is None


def test_admin_says_once_that_it_trains_without_its_calibration(caplog: pytest.LogCaptureFixture) -> None:
    tokens = torch.randint(1, 11, (2, 5))
    with caplog.at_level(logging.WARNING):
        calibrated = kl.Encoder(**SMALL, layers=2, recipe="admin").train()
        kl.calibrate(calibrated, tokens)
        calibrated(tokens)
        kl.Encoder(**SMALL, layers=2, recipe=kl.recipes.get("admin", start="closed")).train()(tokens)
        bare = kl.Encoder(**SMALL, layers=2, recipe="admin")
        bare.eval()(tokens)
        with torch.no_grad():
            bare.train()(tokens)
        assert not caplog.records
        bare(tokens)
        bare(tokens)
    assert [record.message for record in caplog.records if "kilolayer.calibrate(model, batch)" in record.message] == [
        "the recipe admin trains without its calibration: call kilolayer.calibrate(model, batch) before the first step"
    ]
