"""Distributes a model over the processes: each holds all dense weights and, if there are several, its share of the experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kilolayer.models.build import build_model
from kilolayer.models.calibrate import calibrate
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.trainable import Trainable
from kilolayer.moe.full_state import join_state, load_full_state_dict, own_state
from kilolayer.moe.layer import expert_parameters, idle_parameters
from kilolayer.moe.shard import shard_experts
from kilolayer.parallel.processes import Processes
from kilolayer.runs.run import load_weights


class Placement:
    """Builds a run's model, and converts between this process's part of its state and the whole.

    Saved states are of the whole model, by name, regardless of the number of processes: what four save, one can load.
    """

    def __init__(self, config: ModelConfig, processes: Processes, device: torch.device, seed: int) -> None:
        self.config, self.processes, self.device, self.seed = config, processes, device, seed
        self.shared = config.moe is not None and processes.group is not None
        self.model = self._build()

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        here = sum(parameter.numel() for parameter in self.model.parameters())
        of_experts = sum(parameter.numel() for _, parameter in expert_parameters(self.model))
        return here + (self.processes.size - 1) * of_experts

    @property
    def active_parameters(self) -> int:
        """The number of parameters that a token passes through."""
        return self.parameters - idle_parameters(self.model, self.config.moe)

    def full_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect the whole model's tensors on the first process; call it on all. The result is empty on the others."""
        return join_state(self.model, state)

    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of the whole model's tensors."""
        return own_state(self.model, state)

    def load(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Load the weights of a whole model, which were found in `folder`."""
        load_weights(self.model, self.own_state(weights), folder)

    def calibrate(self, inputs: tuple[Tensor, ...] | Mapping[str, Tensor]) -> None:
        """Set residual scales from a batch. This needs the whole model, which each process builds temporarily."""
        if not self.shared:
            assert isinstance(self.model, Model)
            calibrate(self.model, inputs)
            return
        whole = build_model(self.config, device=self.device, seed=self.seed).train()
        calibrate(whole, inputs)
        load_full_state_dict(self.model, whole.state_dict())

    def make_equal(self) -> None:
        """Copy the first process's weights to all processes, except for the experts, which differ."""
        experts = {name for name, _ in expert_parameters(self.model)}
        self.processes.broadcast_(tensor for name, tensor in self.model.state_dict().items() if name not in experts)

    def _build(self) -> Trainable:
        if not self.shared:
            return build_model(self.config, device=self.device, seed=self.seed)
        assert self.processes.group is not None
        model = build_model(self.config, device="meta", seed=self.seed)
        shard_experts(model, self.processes.group.processes, one_batch=False)
        return model.materialize(self.device)
