"""Kilolayer: build, train, diagnose and ship very deep and very sparse Transformers.

The public names are those that type checkers see imported here. They are resolved on first use, so that importing this package
imports no torch.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.version import VERSION

if TYPE_CHECKING:
    from kilolayer import optimizers as optimizers
    from kilolayer import recipes as recipes
    from kilolayer import tasks as tasks
    from kilolayer.compare.session import compare_runs as compare_runs
    from kilolayer.compare.session import run_comparison as run_comparison
    from kilolayer.huggingface.imported import from_huggingface as from_huggingface
    from kilolayer.models.adapt.adapt import adapt as adapt
    from kilolayer.models.adapt.bake import bake as bake
    from kilolayer.models.build import build_model as build_model
    from kilolayer.models.calibrate import calibrate as calibrate
    from kilolayer.models.config import ModelConfig as ModelConfig
    from kilolayer.models.decoder import Decoder as Decoder
    from kilolayer.models.encoder import Encoder as Encoder
    from kilolayer.models.encoder_decoder import EncoderDecoder as EncoderDecoder
    from kilolayer.models.fold import fold as fold
    from kilolayer.models.fully_shard import fully_shard as fully_shard
    from kilolayer.models.head import Head as Head
    from kilolayer.models.image_encoder import ImageEncoder as ImageEncoder
    from kilolayer.models.image_input import ImageInput as ImageInput
    from kilolayer.models.map_head import MapHead as MapHead
    from kilolayer.models.saved_model import load_model as load_model
    from kilolayer.models.saved_model import save as save
    from kilolayer.moe.balance import update_balance as update_balance
    from kilolayer.moe.clip import clip_grad_norm_ as clip_grad_norm_
    from kilolayer.moe.config import MoE as MoE
    from kilolayer.moe.full_state import full_state_dict as full_state_dict
    from kilolayer.moe.full_state import load_full_state_dict as load_full_state_dict
    from kilolayer.moe.layer import freeze_experts as freeze_experts
    from kilolayer.moe.shard import reduce_gradients as reduce_gradients
    from kilolayer.moe.shard import shard_experts as shard_experts
    from kilolayer.optimizers.parameter_groups import parameter_groups as parameter_groups
    from kilolayer.probe.diagnose import diagnose as diagnose
    from kilolayer.probe.diagnosis import Diagnosis as Diagnosis
    from kilolayer.probe.forecast import forecast as forecast
    from kilolayer.runs.export import export as export
    from kilolayer.runs.load import load as load
    from kilolayer.runs.trained_run import TrainedRun as TrainedRun
    from kilolayer.speed.recorded_step import record as record
    from kilolayer.speed.runtime import fast as fast
    from kilolayer.training.train import train as train

__version__ = VERSION

_PUBLIC = re.compile(r"^    from (\S+) import (\w+) as \w+$", re.MULTILINE)
_HOMES: dict[str, str] = {name: module for module, name in _PUBLIC.findall(Path(__file__).read_text("utf-8"))}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kilolayer' has no attribute {name!r}; it has: {', '.join(__all__)}")
    if _HOMES[name] == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
