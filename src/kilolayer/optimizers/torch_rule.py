"""The optimizers of torch.optim, and others that extend its class, by name: `train.optimizer = "torch.optim:SGD"`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError
from kilolayer.optimizers.base import UpdateRule
from kilolayer.optimizers.group import Group
from kilolayer.optimizers.optimizer import Optimizer

OURS = ("lr", "params", "betas", "weight_decay", "eps", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Arguments that [train] sets, or that say how and not what is computed."""
RUNNING = ("exp_avg", "momentum_buffer")
"""What torch calls a running mean or sum of the gradient."""


def is_torch_class(cls: Any) -> bool:
    """Whether this is an optimizer of torch, or a class that extends one."""
    return inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)


def rule_of(cls: type[torch.optim.Optimizer], path: str) -> type[TorchRule]:
    """The update rule of a torch optimizer; its options are the arguments that have a plain default."""
    arguments = inspect.signature(cls).parameters
    options: list[tuple[str, Any, Any]] = []
    for name, argument in arguments.items():
        if name not in OURS and isinstance(argument.default, bool | int | float | str | None):
            options.append((name, Any, dataclasses.field(default=argument.default)))
    kinds = {"weight_decay": (0.0, "weight_decay", float | int), "eps": (1e-8, "eps", float)}
    kinds |= {"beta1": (0.9, "betas", tuple), "beta2": (0.98, "betas", tuple)}
    options += [
        (name, float, default)
        for name, (default, theirs, kind) in kinds.items()
        if theirs in arguments and isinstance(arguments[theirs].default, kind)
    ]
    space = {"applied_by": TorchOptimizer, "name": path, "title": cls.__name__, "wrapped": cls, "__module__": cls.__module__}
    return dataclasses.make_dataclass(f"{cls.__name__}Rule", options, bases=(TorchRule,), frozen=True, namespace=space)


@dataclasses.dataclass(frozen=True)
class TorchRule(UpdateRule):
    """An update by a torch optimizer. wrapped: its class."""

    wrapped: ClassVar[type[torch.optim.Optimizer]]
    records: ClassVar[bool] = False

    def arguments(self) -> dict[str, Any]:
        """What the optimizer is made with, besides the weights, their learning rate, decay and eps."""
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        betas = {"betas": (given.pop("beta1"), given.pop("beta2"))} if "beta1" in given else {}
        return betas | {name: value for name, value in given.items() if value is not None}

    def wrap(self, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        """The optimizer for these groups."""
        try:
            return self.wrapped(groups, **{"lr": lr, **self.arguments()})  # pyright: ignore[reportCallIssue]
        except (TypeError, ValueError) as error:
            raise OptionError(f"{self.title} refuses its options: {error}", where="train.optimizer") from None

    def state_bytes(self, model: nn.Module) -> int:
        state = next(iter(self.tried().state.values()), {})
        kept = [each for each in state.values() if isinstance(each, Tensor) and each.numel() > 1]
        return sum(each.numel() * each.element_size() for each in kept) * sum(map(nn.Parameter.numel, model.parameters())) // 64

    def tried(self) -> torch.optim.Optimizer:
        """The optimizer after an update of a matrix [8, 8]; raises if it takes no dense gradient, or needs a closure."""
        weight = nn.Parameter(torch.ones(8, 8))
        weight.grad = torch.ones(8, 8)
        optimizer = self.wrap([{"params": [weight]}], 1e-3)
        given = dict(optimizer.param_groups[0])
        try:
            optimizer.step()
        except (TypeError, RuntimeError) as error:
            what = f"{self.title} cannot make one update from gradients alone: {error}"
            raise OptionError(what, where="train.optimizer", fix="choose one that can, such as torch.optim:SGD") from None
        state = {name: value for name, value in optimizer.state.get(weight, {}).items() if not isinstance(value, Tensor | None)}
        for name, value in (state | _changed(optimizer.param_groups[0], given)).items():
            if not isinstance(value, int | float):
                what = f"{self.title} keeps {name}, a {type(value).__name__}, which no checkpoint would hold"
                raise OptionError(what, where="train.optimizer", fix="choose one that keeps tensors of a weight, and numbers")
        return optimizer

    def update(self, part: Any, numbers: Any) -> None:
        raise AssertionError("TorchOptimizer updates by itself")


class TorchOptimizer(Optimizer):
    """Lets a torch optimizer update the weights, or their fp32 copies; guard, clipping, sums and norms stay ours."""

    def __init__(self, model: nn.Module, rule: TorchRule, **options: Any) -> None:
        rule.tried()
        # A recorded backward pass leaves its gradients in the sums, where the update finds them.
        super().__init__(model, rule, **{**options, "sums": True})
        self.waits = True
        self.trained = [[nn.Parameter(each) for each in group.precise] for group in self.groups]
        pairs = [(weight, rate, group) for group, few in self._zipped() for weight, rate in zip(few, group.rates, strict=True)]
        self.wrapped = rule.wrap([{"params": [weight], **_factors(group)} for weight, _, group in pairs], 1.0)
        self.rates = [rate for _, rate, _ in pairs]
        self.names = [name for group in self.groups for name in group.names]
        self.given = [dict(options) for options in self.wrapped.param_groups]

    def _zipped(self) -> list[tuple[Group, list[nn.Parameter]]]:
        return list(zip(self.groups, self.trained, strict=True))

    def update(self, scale: Tensor, finite: Tensor, measures: bool = False) -> list[Tensor] | None:
        before = [[weight.detach().clone() for weight in few] for few in self.trained] if measures else None
        if bool(finite):
            for group, few in self._zipped():
                for weight, total in zip(few, group.gradients, strict=True):
                    weight.grad = None if total is None else total.to(weight.dtype) * scale.to(weight.dtype)
            for options, rate in zip(self.wrapped.param_groups, self.rates, strict=True):
                options["lr"] = float(self.lr) * rate
            self.wrapped.step()
            self.wrapped.zero_grad()
            for group in self.groups:
                group.round_masters(range(len(group.weights)))
            self.taken.add_(1)
        if before is None:
            return None
        return [
            self.of_all(group, torch.stack([(now.detach() - old).norm() for now, old in zip(few, olds, strict=True)]))
            for (group, few), olds in zip(self._zipped(), before, strict=True)
        ]

    def health(self) -> list[tuple[Tensor, Tensor]] | None:
        by_group: list[tuple[Tensor, Tensor]] = []
        for group, few in self._zipped():
            states = [self.wrapped.state.get(weight, {}) for weight in few]
            running = [next((state[name] for name in RUNNING if state.get(name) is not None), None) for state in states]
            if any(each is None for each in running):
                return None
            norms = self.of_all(group, torch.stack([each.norm() for each in running if each is not None])).double()
            by_group.append((norms, torch.full_like(norms, torch.nan)))
        return by_group

    def settled_directions(self) -> dict[str, Tensor]:
        fix = "choose one of Kilolayer's own: adam, adamw"
        raise InputError(f"the next update of {self.rule.title} cannot be told from its state", fix=fix)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name: NAME/exp_avg, ...; NAME:step is a tensor [], NAME#step a number, NAME@step one of its group."""
        named: dict[str, Tensor] = {"updates": self.taken}
        for name, options, given in zip(self.names, self.wrapped.param_groups, self.given, strict=True):
            for slot, value in self.wrapped.state.get(options["params"][0], {}).items():
                if isinstance(value, Tensor):
                    named[f"{name}{'/' if value.dim() else ':'}{slot}"] = value
                elif value is not None:
                    named[f"{name}#{slot}"] = _as_tensor(value)
            for slot, value in _changed(options, given).items():
                named[f"{name}@{slot}"] = _as_tensor(value)
        return named

    def load(self, tensors: Mapping[str, Tensor], where: Path | str = "the optimizer's state") -> None:
        self.taken.copy_(tensors["updates"])
        groups = dict(zip(self.names, self.wrapped.param_groups, strict=True))
        for key, tensor in tensors.items():
            if key == "updates":
                continue
            mark = next((each for each in "/:#@" if each in key), ":")
            name, _, slot = key.rpartition(mark)
            if name not in groups:
                fix = "use checkpoints of one run, with its own configuration"
                raise InputError(f"the checkpoint does not fit: {key} belongs to no weight here", where=str(where), fix=fix)
            (weight,) = groups[name]["params"]
            if mark == "@":
                groups[name][slot] = tensor.item()
            elif mark == "#":
                self.wrapped.state[weight][slot] = tensor.item()
            else:
                self.wrapped.state[weight][slot] = tensor.clone().to(weight.device if tensor.dim() else "cpu")


def _changed(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What an optimizer has changed or added in the options of a group, of which training sets the learning rate."""
    same = {"params", "lr", *(name for name, value in given.items() if options.get(name) is value)}
    return {name: value for name, value in options.items() if name not in same}


def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _factors(group: Group) -> dict[str, float]:
    """The options of a group that the recipe changes."""
    return {name: getattr(group.rule, name) for name in ("weight_decay", "eps") if hasattr(group.rule, name)}
