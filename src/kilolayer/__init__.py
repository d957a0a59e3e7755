"""Kilolayer: build, train, diagnose and ship very deep and very sparse Transformers.

The public names are resolved on first use, so that importing this package imports no torch.
"""

from __future__ import annotations

import importlib
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
    from kilolayer.models.head import Head as Head
    from kilolayer.models.image_encoder import ImageEncoder as ImageEncoder
    from kilolayer.models.image_input import ImageInput as ImageInput
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

_HOMES = {
    "Decoder": "kilolayer.models.decoder",
    "Diagnosis": "kilolayer.probe.diagnosis",
    "Encoder": "kilolayer.models.encoder",
    "EncoderDecoder": "kilolayer.models.encoder_decoder",
    "Head": "kilolayer.models.head",
    "ImageEncoder": "kilolayer.models.image_encoder",
    "ImageInput": "kilolayer.models.image_input",
    "MoE": "kilolayer.moe.config",
    "ModelConfig": "kilolayer.models.config",
    "adapt": "kilolayer.models.adapt.adapt",
    "bake": "kilolayer.models.adapt.bake",
    "TrainedRun": "kilolayer.runs.trained_run",
    "build_model": "kilolayer.models.build",
    "calibrate": "kilolayer.models.calibrate",
    "clip_grad_norm_": "kilolayer.moe.clip",
    "compare_runs": "kilolayer.compare.session",
    "diagnose": "kilolayer.probe.diagnose",
    "export": "kilolayer.runs.export",
    "fast": "kilolayer.speed.runtime",
    "fold": "kilolayer.models.fold",
    "forecast": "kilolayer.probe.forecast",
    "freeze_experts": "kilolayer.moe.layer",
    "from_huggingface": "kilolayer.huggingface.imported",
    "full_state_dict": "kilolayer.moe.full_state",
    "load": "kilolayer.runs.load",
    "load_full_state_dict": "kilolayer.moe.full_state",
    "load_model": "kilolayer.models.saved_model",
    "parameter_groups": "kilolayer.optimizers.parameter_groups",
    "record": "kilolayer.speed.recorded_step",
    "reduce_gradients": "kilolayer.moe.shard",
    "run_comparison": "kilolayer.compare.session",
    "save": "kilolayer.models.saved_model",
    "shard_experts": "kilolayer.moe.shard",
    "train": "kilolayer.training.train",
    "update_balance": "kilolayer.moe.balance",
}

__all__ = [
    "Decoder",
    "Diagnosis",
    "Encoder",
    "EncoderDecoder",
    "Head",
    "ImageEncoder",
    "ImageInput",
    "MoE",
    "ModelConfig",
    "TrainedRun",
    "adapt",
    "bake",
    "build_model",
    "calibrate",
    "clip_grad_norm_",
    "compare_runs",
    "diagnose",
    "export",
    "fast",
    "fold",
    "forecast",
    "freeze_experts",
    "from_huggingface",
    "full_state_dict",
    "load",
    "load_full_state_dict",
    "load_model",
    "optimizers",
    "parameter_groups",
    "recipes",
    "record",
    "reduce_gradients",
    "run_comparison",
    "save",
    "shard_experts",
    "tasks",
    "train",
    "update_balance",
]


def __getattr__(name: str) -> Any:
    if name in ("optimizers", "recipes", "tasks"):
        return importlib.import_module(f"kilolayer.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kilolayer' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
