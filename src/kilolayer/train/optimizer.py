"""Optimizers, and their state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Adam, AdamW or RAdam over the trained parameters; matrices and tables are decayed, vectors and scalars are not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    settings = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "foreach": True}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}
    return kinds[config.optimizer]([group for group in groups if group["params"]], **settings)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter/slot`, such as `embedding.weight/exp_avg`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{slot}": value
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, slot = key.rpartition("/")
        if name not in parameters:
            raise InputError(f"the optimizer's state names {name!r}, which the model does not have")
        # Adam counts its steps on the CPU; the moments live beside their parameter.
        device = value.device if value.dim() == 0 else parameters[name].device
        optimizer.state[parameters[name]][slot] = value.to(device)
