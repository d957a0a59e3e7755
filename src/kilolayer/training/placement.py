"""Distributes a model over the processes: its experts, if there are several, and its matrices, if `train.shard` says so."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kilolayer.errors import OptionError
from kilolayer.files.saved_tensors import outline_of, rows_from
from kilolayer.models.build import build_model
from kilolayer.models.calibrate import calibrate
from kilolayer.models.config import ModelConfig
from kilolayer.models.model import Model
from kilolayer.models.sharded import is_shard
from kilolayer.models.shards import (
    expert_mesh,
    gathered_outside_layers,
    local,
    materialize_shards,
    row_range,
    shard_matrices,
    shard_mesh,
)
from kilolayer.models.trainable import Trainable
from kilolayer.moe.full_state import join_state, load_full_state_dict, owner
from kilolayer.moe.layer import expert_parameters, idle_parameters
from kilolayer.moe.shard import expert_group, shard_experts
from kilolayer.parallel.processes import Processes
from kilolayer.runs.checkpoint import Part
from kilolayer.runs.division import check_processes
from kilolayer.runs.run import check_fit
from kilolayer.tasks.train_config import Shard
from kilolayer.terminal import counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Placement:
    """Builds a run's model, and converts between this process's part of its state and the whole.

    Saved states are of the whole model, by name, regardless of the number of processes: what four save, one can load. The
    first process saves it, or if there are shards, each process its own rows.
    shard, unit, reshards: `train.shard`, `shard_unit` and `reshard_after_forward`. dtype: of the products of a sharded model.
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
        reshards: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config, self.processes, self.device, self.seed = config, processes, device, seed
        self.unit, self.reshards, self.mesh = unit, reshards, None
        if shard != "none":
            check_processes(config, processes, unit)
            if processes.group is not None:
                self.mesh = shard_mesh(processes.group, device.type, hybrid=shard == "hybrid")
        self.shares_experts = config.moe is not None and processes.group is not None
        self.expert_mesh = None
        if self.mesh is not None and config.moe is not None and config.moe.experts % processes.size:
            self.expert_mesh = self._mesh_of_experts(config.moe.experts)
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
        group = expert_group(self.model)
        return here + (0 if group is None else group.size - 1) * of_experts

    @property
    def active_parameters(self) -> int:
        """The number of parameters that a token passes through."""
        return self.parameters - idle_parameters(self.model, self.config.moe)

    def saved_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this process saves of the model's tensors; call it on all.

        state: tensors by the name of a parameter or buffer, or by NAME/mean and the like for the optimizer's state of one.
        """
        if self.mesh is None:
            return join_state(self.model, state) if self.processes.first or self.shares_experts else {}
        divided = self._rows()
        own = {name for name, (rows, _) in divided.items() if rows}
        if self.mesh.ndim > 1 and self.mesh.get_local_rank("copy"):
            own -= self._shards().keys()  # the first copy saves them
        return {
            name: local(tensor)
            for name, tensor in state.items()
            if (self.processes.first if owner(name) not in divided else owner(name) in own)
        }

    def part(self) -> Part:
        """Which part of a checkpoint `saved_state` returns."""
        if self.mesh is None:
            return Part()
        count = self.processes.size if self.shares_experts else self.mesh["shard"].size()
        some = {name: (rows.start, whole) for name, (rows, whole) in self._rows().items() if len(rows) < whole}
        return Part(self.processes.rank, count, some)

    def own_state(self, state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        """This process's part of the whole model's tensors of these names."""
        rows = self._rows()
        return {name: rows_from(state, name, rows[owner(name)][0] if owner(name) in rows else None) for name in names}

    def outline(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors, on the meta device, of which this process has these."""
        rows = self._rows()
        shapes = {
            name: (rows[owner(name)][1], *tensor.shape[1:]) if owner(name) in rows else tensor.shape
            for name, tensor in state.items()
        }
        return {name: torch.empty(shapes[name], dtype=tensor.dtype, device="meta") for name, tensor in state.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Load the weights of a whole model, which were found in `folder`."""
        own, rows = self.model.state_dict(), self._rows()
        check_fit(self.outline(own), outline_of(weights), folder)
        shards = {name for name, tensor in outline_of(weights).items() if is_shard(tensor)}  # of a model like this one
        for name, tensor in own.items():
            wanted = rows[name][0] if name in rows else None
            local(tensor).copy_(local(weights[name]) if name in shards else rows_from(weights, name, wanted))

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

    def _rows(self) -> dict[str, tuple[range, int]]:
        """The rows of this process of each weight that it does not hold whole, by name, and how many there are in all."""
        rows = {name: (row_range(tensor), len(tensor)) for name, tensor in self._shards().items()}
        if (group := expert_group(self.model)) is not None:
            for name, weight in expert_parameters(self.model):
                part, count = group.part(len(weight) * group.size), len(weight) * group.size
                own = row_range(weight) if is_shard(weight) else range(len(weight))
                rows[name] = range(part.start + own.start, part.start + own.stop), count
        return rows

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
            of_experts = self.processes.group.processes if self.expert_mesh is None else self.expert_mesh.get_group("expert")
            shard_experts(model, of_experts, one_batch=False)
        if self.mesh is None:
            return model.materialize(self.device)
        shard_matrices(model, self.mesh, unit=self.unit, dtype=dtype, reshards=self.reshards, experts=self.expert_mesh)
        materialize_shards(model, self.device)
        return model

    def _mesh_of_experts(self, experts: int) -> DeviceMesh:
        """The processes by the experts that they have, where not every process can have its own."""
        assert self.mesh is not None
        assert self.processes.group is not None
        if self.mesh.ndim > 1:
            raise OptionError(
                f"{counted(experts, 'expert')} cannot be shared evenly by {counted(self.processes.size, 'process')}",
                where="train.shard",
                fix='set it to "full", or start a number of processes that divides them',
            )
        return expert_mesh(self.processes.group, self.device.type, experts)
