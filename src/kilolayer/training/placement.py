"""Distributes a model over the processes: its experts, if there are several, and its matrices, if `train.shard` says so."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kilolayer.errors import OptionError
from kilolayer.models.build import build_model
from kilolayer.models.calibrate import calibrate
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.sharded import is_shard
from kilolayer.models.shards import (
    gather_rows,
    gathered_outside_layers,
    local,
    materialize_shards,
    rows_of,
    shard_matrices,
    shard_mesh,
)
from kilolayer.models.trainable import Trainable
from kilolayer.moe.full_state import join_state, load_full_state_dict, own_state
from kilolayer.moe.layer import expert_parameters, idle_parameters
from kilolayer.moe.shard import shard_experts
from kilolayer.parallel.processes import Processes
from kilolayer.runs.run import check_fit, load_weights

Shard = Literal["none", "full", "hybrid"]


class Placement:
    """Builds a run's model, and converts between this process's part of its state and the whole.

    Saved states are of the whole model, by name, regardless of the number of processes: what four save, one can load.
    shard, unit: `train.shard` and `train.shard_unit`. dtype: of the matrix products of a sharded model.
    """

    def __init__(
        self,
        config: ModelConfig,
        processes: Processes,
        device: torch.device,
        seed: int,
        *,
        shard: Shard = "none",
        unit: int = 1,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.processes, self.device, self.seed = config, processes, device, seed
        self.unit, self.mesh = unit, None
        if shard != "none":
            self._check_shards()
            if processes.group is not None:
                self.mesh = shard_mesh(processes.group, device.type, hybrid=shard == "hybrid")
        self.shares_experts = config.moe is not None and processes.group is not None
        self.model = self._build(dtype)

    @property
    def together(self) -> bool:
        """Whether all processes run every forward pass at the same time, because each has only a part of the model."""
        return self.shares_experts or self.mesh is not None

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        here = sum(parameter.numel() for parameter in self.model.parameters())  # a sharded one counts whole
        of_experts = sum(parameter.numel() for _, parameter in expert_parameters(self.model))
        return here + (self.processes.size - 1) * of_experts

    @property
    def active_parameters(self) -> int:
        """The number of parameters that a token passes through."""
        return self.parameters - idle_parameters(self.model, self.config.moe)

    def full_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect the whole model's tensors on the first process; call it on all. The result is empty on the others.

        state: tensors by the name of a parameter or buffer, or by NAME/mean and the like for the optimizer's state of one.
        """
        shards = self._shards()
        rest = {name: tensor for name, tensor in state.items() if _owner(name) not in shards}
        whole = join_state(self.model, rest) if self.processes.first or self.shares_experts else {}
        for name, tensor in state.items():
            if name not in rest:
                gathered = gather_rows(local(tensor), shards[_owner(name)])
                if self.processes.first:
                    whole[name] = gathered.cpu()
        return whole

    def own_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This process's part of the whole model's tensors."""
        shards = self._shards()
        parts = own_state(self.model, state)
        return {name: rows_of(each, shards[_owner(name)]) if _owner(name) in shards else each for name, each in parts.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Load the weights of a whole model, which were found in `folder`."""
        parts = own_state(self.model, weights)
        if self.mesh is None:
            load_weights(self.model, parts, folder)
            return
        check_fit(self.model, parts, folder)
        for name, tensor in self.model.state_dict().items():
            given = parts[name]
            local(tensor).copy_(rows_of(given, tensor) if is_shard(tensor) and not is_shard(given) else local(given))

    def calibrate(self, inputs: tuple[Tensor, ...] | Mapping[str, Tensor]) -> None:
        """Set residual scales from a batch. A model whose parts are on several processes is built once more for that: with all
        its experts on each, and in shards with products in full precision."""
        if not self.together:
            assert isinstance(self.model, Model)
            calibrate(self.model, inputs)
            return
        if not self.shares_experts:
            precise = self._build(None).train()
            assert isinstance(precise, Model)
            calibrate(precise, inputs)
            found = precise.state_dict()
            for name, tensor in self.model.state_dict().items():
                local(tensor).copy_(local(found[name]))
            return
        whole = build_model(self.config, device=self.device, seed=self.seed).train()
        calibrate(whole, inputs)
        if self.mesh is None:
            load_full_state_dict(self.model, whole.state_dict())
        else:
            self.load(whole.state_dict(), Path("calibration"))

    def make_equal(self) -> None:
        """Copy the first process's weights to all processes, except for those of which each has its own part."""
        experts = {name for name, _ in expert_parameters(self.model)}
        state = self.model.state_dict().items()
        self.processes.broadcast_(tensor for name, tensor in state if name not in experts and not is_shard(tensor))

    def callable_in_parts(self) -> AbstractContextManager[None]:
        """A context in which parts of the model can be called, such as its encoder; otherwise only the whole model can be."""
        return nullcontext() if self.mesh is None else gathered_outside_layers(self.model)

    def _shards(self) -> dict[str, Tensor]:
        """The sharded tensors of the model, by name."""
        if self.mesh is None:
            return {}
        return {name: tensor for name, tensor in self.model.state_dict().items() if is_shard(tensor)}

    def _build(self, dtype: torch.dtype | None) -> Trainable:
        if not (self.shares_experts or self.mesh is not None):
            return build_model(self.config, device=self.device, seed=self.seed)
        assert self.processes.group is not None
        model = build_model(self.config, device="meta", seed=self.seed)
        if self.shares_experts:
            shard_experts(model, self.processes.group.processes, one_batch=False)
        if self.mesh is None:
            return model.materialize(self.device)
        shard_matrices(model, self.mesh, unit=self.unit, dtype=dtype)
        materialize_shards(model, self.device)
        return model

    def _check_shards(self) -> None:
        # torchrun may have started several before, and go on with one after the others have died.
        if self.processes.group is None and not dist.is_torchelastic_launched():
            raise OptionError(
                "there is one process, which has nobody to share the model with",
                where="train.shard",
                fix='let torchrun start several, or set it to "none"',
            )
        if not isinstance(self.config, ModelConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise OptionError(
                "the task has a model of its own, whose layers are not known",
                where="train.shard",
                fix='set it to "none"',
            )


def _owner(name: str) -> str:
    """The parameter's name: NAME for NAME/mean."""
    return name.partition("/")[0]
