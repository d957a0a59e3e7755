"""Kilolayer's own training step, by the package that is imported: this commit's, or an older one with the same names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from batch import PAD, batch
from jobs import Setting

import kilolayer as kl
from kilolayer.data.batches import Batch
from kilolayer.data.windows import TextBatch
from kilolayer.layers.stack import Stack
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.step import Stepper

LR = 1e-4


def model_config(setting: Setting, **others: Any) -> kl.ModelConfig:
    """The model of a setting. others: options that override its own."""
    translates = setting.task == "translation"
    options: dict[str, Any] = {
        "shape": "encoder_decoder" if translates else "decoder",
        "layers": setting.layers,
        "dim": setting.dim,
        "heads": setting.heads,
        "ffn_dim": setting.ffn_dim,
        "vocab_size": setting.vocabulary,
        "tie_embeddings": True,  # as in all peers
        "recipe": kl.recipes.get(setting.recipe),
        "moe": kl.MoE(experts=setting.experts) if setting.experts else None,
        "pad_id": PAD if setting.padded else None,
        "dropout": setting.dropout,
        "attention_dropout": setting.dropout,
        "activation_dropout": setting.dropout if translates else 0.0,
    }
    return kl.ModelConfig(**options | others)


def kilolayer(setting: Setting, device: torch.device, **train: Any) -> Callable[[], float]:
    """The trainer's own step: bf16 weights with fp32 masters, compiled layers, recorded as a graph; eager on a CPU.

    train: options of training that override the usual ones.
    """
    model = kl.build_model(model_config(setting), device=device, seed=1)
    if setting.twin:
        widen(model.stacks()[0], model_config(setting, ffn_dim=2 * setting.ffn_dim), device)
    source, target, labels = batch(setting, torch.device("cpu"))
    tokens = int((labels != PAD).sum())
    read = Batch(source, target, labels, tokens) if setting.task == "translation" else TextBatch(target, labels, tokens)
    if model.config.recipe.calibration() is not None:
        kl.calibrate(model, tuple(part.to(device) for part in read.parts[:-1]))
    usual = {"optimizer": "adamw", "weight_decay": 0.01, "precision": "bf16", "label_smoothing": 0.0}
    config = TrainConfig(**usual | train)
    optimizer = make_optimizer(model.train(), config, model.cast_weights(torch.bfloat16), **fast_runtime())
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), device, say=_refuse, **fast_runtime())

    def step() -> float:
        result = stepper.step([read], LR)
        if result.fault is not None:
            _refuse(f"{result.fault} is not finite, and the update was left out")
        return result.loss

    return step


def fast_runtime() -> dict[str, Any]:
    """The option that makes an optimizer and its steps fast; in an older package, where they always are, there is none."""
    if importlib.util.find_spec("kilolayer.runtime") is None:
        return {}
    from kilolayer.speed.runtime import FAST

    return {"runtime": FAST}


def widen(stack: Stack, config: kl.ModelConfig, device: torch.device) -> None:
    """Replace every second layer by one of another configuration."""
    wide = kl.build_model(config, device=device, seed=1).stacks()[0]
    for index in range(1, len(stack.blocks), 2):
        stack.blocks[index] = wide.blocks[index]


def _refuse(message: str) -> None:
    """Raise: the trainer would continue more slowly, or with less work, which must not be measured."""
    raise RuntimeError(message)
