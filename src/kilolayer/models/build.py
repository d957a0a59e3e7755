"""A model from its configuration."""

from __future__ import annotations

import torch

from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder

SHAPES = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}


def build_model(
    config: ModelConfig,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> Encoder | Decoder | EncoderDecoder:
    """The model that `config` describes, with fresh weights; on the meta device, without memory.

    seed: fixes the weights; without it, one number is drawn from torch's default generator.
    """
    return SHAPES[config.shape].from_config(config, device, dtype, seed)
