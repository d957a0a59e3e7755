"""A model from its configuration."""

from __future__ import annotations

import dataclasses

import torch

from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder

SHAPES = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}


def build_model(
    config: ModelConfig, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Encoder | Decoder | EncoderDecoder:
    """The model that `config` describes, with fresh weights; on the meta device, without memory."""
    options = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    del options["shape"], options["encoder_layers"], options["decoder_layers"], options["layers"]
    if config.shape == "encoder_decoder":
        depths = {"encoder_layers": config.depths.encoder, "decoder_layers": config.depths.decoder}
    else:
        del options["source_vocab_size"]
        depths = {"layers": max(config.depths.encoder, config.depths.decoder)}
    return SHAPES[config.shape](**options, **depths, device=device, dtype=dtype)
