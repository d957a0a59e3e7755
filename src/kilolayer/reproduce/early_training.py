"""The first steps of a translator's training in one process, step by step, with a look at the model after each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kilolayer.config import Table, build
from kilolayer.layers.modules import in_mode
from kilolayer.layers.sublayer import Sublayer
from kilolayer.models.build import build_model
from kilolayer.models.calibrate import calibrate
from kilolayer.models.model import Model
from kilolayer.tasks.config import RunConfig
from kilolayer.training.run import cache_folder, choose_device, prepare
from kilolayer.training.schedule import learning_rate


@dataclass
class EarlyTraining:
    """A model at its start, its data, and Adam, in fp32. `step` takes one more step and returns its loss, nats a token."""

    config: RunConfig
    model: Model
    task: Any
    batches: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    watched: tuple[Tensor, ...]
    """The batch that the model is looked at with: the first one of the training."""
    taken: int = 0
    start: Tensor | None = field(default=None, repr=False)

    @classmethod
    def begin(cls, table: Table) -> EarlyTraining:
        """The training that a configuration describes, before its first step."""
        config = build(RunConfig, table)
        task = prepare(config, cache_folder())
        config = task.resolve(config)
        device = choose_device(config.train.device)
        torch.manual_seed(config.train.seed)
        model = build_model(config.model, device=device, seed=config.train.seed).train()
        batches = task.training_batches(config.train.seed)
        watched = tuple(part.to(device) for part in next(batches).parts)
        if config.model.recipe.calibration() is not None:
            calibrate(model, task.model_inputs(watched))
        train = config.train
        optimizer = torch.optim.Adam(model.parameters(), lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
        return cls(config, model, task, batches, optimizer, device, watched)

    def step(self) -> float:
        """One step on the next batch; the gradient stays in the model until the next."""
        self.taken += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.train, self.taken)
        self.optimizer.zero_grad(set_to_none=True)
        parts = tuple(part.to(self.device) for part in next(self.batches).parts)
        found = self.task.loss(self.model, parts, hidden_states=False)
        (found.total / found.count).backward()
        if self.config.train.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
        self.optimizer.step()
        return float(found.nll.detach() / found.count)

    @torch.no_grad()
    def output(self) -> Tensor:
        """F(x), [positions, dim]: the decoder's last states on the watched batch, without dropout, at real positions alone."""
        source, target = self.task.model_inputs(self.watched)
        with in_mode(self.model, training=False):
            states = self.model(source, target, hidden_states=True).hidden_states[-1]
        return states[target != self.config.model.pad_id].double()

    def model_update(self) -> float:
        """||F(x, now) - F(x, at the first call)|| / sqrt(positions): equation 1 of DeepNet, for a mean position."""
        now = self.output()
        if self.start is None:
            self.start = now
        return float((now - self.start).norm() / now.shape[0] ** 0.5)


def layer_gradients(model: Model, side: str) -> list[float]:
    """The norm of the whole gradient of each layer of a stack, as the last step left it."""
    (stack,) = (stack for stack in model.stacks() if stack.side == side)
    return [
        float(torch.stack([each.grad.norm() for each in block.parameters() if each.grad is not None]).norm())
        for block in stack.blocks
    ]


def norm_inputs(training: EarlyTraining, side: str) -> dict[str, float]:
    """The mean size ||x||_2 / sqrt(d) of what enters the norms on the residual of a stack, by kind of sublayer."""
    (stack,) = (stack for stack in training.model.stacks() if stack.side == side)
    found: dict[str, list[float]] = {}
    handles = []

    def watch(kind: str) -> Any:
        def note(module: Any, inputs: tuple[Tensor, ...]) -> None:
            found.setdefault(kind, []).append(float(inputs[0].double().square().mean().sqrt()))

        return note

    for kind, sublayer in _sublayers(stack):
        norm = sublayer.out_norm if sublayer.plan.out_norm else sublayer.pre_norm
        handles.append(norm.register_forward_pre_hook(watch(kind)))
    try:
        training.output()
    finally:
        for handle in handles:
            handle.remove()
    return {kind: sum(values) / len(values) for kind, values in found.items()}


def _sublayers(stack: Any) -> Iterator[tuple[str, Sublayer]]:
    for block in stack.blocks:
        for name, child in block.named_children():
            if isinstance(child, Sublayer):
                yield name, child
