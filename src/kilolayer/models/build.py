"""Build a model from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kilolayer.config import build
from kilolayer.errors import OptionError, shown
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.image_encoder import ImageEncoder

SHAPES = {"encoder": Encoder, "decoder": Decoder, "encoder_decoder": EncoderDecoder}


def build_model(
    config: ModelConfig | Mapping[str, Any],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> Encoder | Decoder | EncoderDecoder:
    """Build the model that `config` describes, with freshly initialized weights; on the meta device, without allocating memory.

    config: a ModelConfig, or the table [model] of a configuration file, as a dict.
    seed: fixes the weights; without it, a seed is drawn from torch's default generator.
    """
    if not isinstance(config, ModelConfig):
        config = _read(config)
    kind = SHAPES[config.shape] if config.image is None else ImageEncoder
    return kind.from_config(config, device, dtype, seed)


def _read(table: Mapping[str, Any]) -> ModelConfig:
    if not isinstance(table, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"the configuration is {shown(table)}", fix="give a ModelConfig, or a dict of its options")
    if isinstance(table.get("model"), Mapping):
        raise OptionError("this is the configuration of a run, not of a model", fix='give its table: config["model"]')
    return build(ModelConfig, table)
