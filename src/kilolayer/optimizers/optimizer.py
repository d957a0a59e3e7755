"""The state of an optimizer for all weights of a model, with fp32 master copies of weights held in lower precision."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.files.tensors import check_alike
from kilolayer.models.sharded import is_shard
from kilolayer.models.shards import local, shard_group
from kilolayer.moe.clip import exact_norm
from kilolayer.moe.shard import expert_group
from kilolayer.optimizers.base import AdamKernel, MatrixKernel, Number, Part, UpdateRule
from kilolayer.optimizers.group import ALIGNMENT, AT_ONCE, Group
from kilolayer.optimizers.weight_factors import trained_weights
from kilolayer.parallel.collectives import sum_over
from kilolayer.runtime.runtime import PLAIN, Runtime


class Settings(Protocol):
    """The options of training that an optimizer is made from."""

    @property
    def lr(self) -> float: ...
    @property
    def layer_decay(self) -> float: ...
    @property
    def rule(self) -> UpdateRule: ...


def make_optimizer(
    model: nn.Module,
    settings: Settings,
    precise: Mapping[nn.Parameter, Tensor] | None = None,
    sums: bool = False,
    runtime: Runtime = PLAIN,
) -> Optimizer:
    """The optimizer that `settings` choose; precise, sums, runtime: as in `Optimizer`."""
    rule = settings.rule
    made = rule.applied_by or Optimizer
    options = {"precise": precise, "sums": sums, "runtime": runtime}
    return made(model, rule, lr=settings.lr, layer_decay=settings.layer_decay, **options)


class Optimizer:
    """Applies an update rule to the trained weights of a model. Only matrices and tables are decayed.

    `lr` is a tensor, so that a captured step reads its current value. Each weight has its own factor on it, and each group its
    own rule, with the factors of the recipe on eps and decay.
    kernel: collects gradients, computes their norms and, for rules that it supports, updates; None if there are no kernels.
    waits: whether an update may wait for the device to say if the gradient is finite; if not, it reads nothing.
    shards: for each sharded weight, this process's rows of it, which share its memory and are what is updated, and the weight.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        *,
        lr: float = 1e-3,
        layer_decay: float = 1.0,
        precise: Mapping[nn.Parameter, Tensor] | None = None,
        sums: bool = False,
        runtime: Runtime = PLAIN,
    ) -> None:
        """precise: the weights of a reduced-precision model before rounding. runtime: may have a kernel for the update.

        sums: accumulate gradients in one buffer, which is needed for several batches per step and is faster on the CPU. A
        weight without a gradient then has the gradient 0.
        """
        self.rule = rule
        self.shards: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.groups = self._group(model, layer_decay)
        self.device = self.groups[0].weights[0].device
        for group in self.groups:
            if precise is not None and group.weights[0] in precise:
                group.keep_masters(precise)
            if sums:
                group.keep_sums()
            if sums and group.masters is None and self.device.type == "cpu" and not group.of_shards:
                group.join_weights()
        self.kernel = runtime.update_kernel(self.groups)
        self.waits = self.kernel is None
        self.lr = torch.tensor(lr, dtype=torch.float64, device=self.device)
        self.taken = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def records(self) -> bool:
        """Whether an update can be recorded as a CUDA graph."""
        return all(group.rule.records for group in self.groups)

    def recording(self) -> AbstractContextManager[None]:
        """A context in which a step is recorded."""
        return nullcontext() if self.kernel is None else self.kernel.recording()

    def collect(self) -> None:
        """Add the gradients of the last backward pass to the sums."""
        for own, shard in self.shards:
            if shard.grad is not None:
                own.grad, shard.grad = local(shard.grad), None
        summed = [group for group in self.groups if group.sums is not None]
        if self.kernel is not None and summed:
            self.kernel.collect()
        for group in summed:
            if self.kernel is None:
                group.collect()
            for weight in group.weights:
                weight.grad = None

    def shared_sums(self) -> list[Tensor]:
        """The gradient sums that all processes add to: all but those of weights that are divided among them."""
        return [group.buffers["sums"] for group in self.groups if not group.sharers and group.sums is not None]

    def clear(self) -> None:
        """Clear all gradients."""
        for group in self.groups:
            if group.sums is not None:
                group.buffers["sums"].zero_()
            for weight in group.weights:
                weight.grad = None

    def gradient_norms(self) -> list[Tensor]:
        """The norm of each weight's gradient, group by group, 0 if it has none: fp32 [weights of the group] each."""
        norms = []
        for group in self.groups:
            gradients = group.gradients
            zero = torch.zeros((), dtype=group.dtype, device=self.device)
            present = [gradient for gradient in gradients if gradient is not None]
            values = iter(torch._foreach_norm(present, 2, dtype=zero.dtype) if present else ())
            own = torch.stack([zero if gradient is None else next(values) for gradient in gradients])
            norms.append(self.of_all(group, own))
        return norms

    def norms(self) -> tuple[Tensor, Tensor]:
        """The norm of all gradients except those of experts, and the norm of those of experts: [] each."""
        if self.kernel is not None:
            norms = [self.of_all(*pair) for pair in zip(self.groups, self.kernel.norms(), strict=True)]
        elif all(group.sums is not None for group in self.groups):
            norms = [self.of_all(group, exact_norm([group.buffers["sums"].view(-1, ALIGNMENT)])) for group in self.groups]
        else:
            norms = [norms.norm() for norms in self.gradient_norms()]
        parts = [[torch.zeros_like(norms[0])], [torch.zeros_like(norms[0])]]
        for norm, group in zip(norms, self.groups, strict=True):
            parts[group.of_experts].append(norm)
        dense, expert = (torch.stack(part).norm() for part in parts)
        return dense, expert

    def of_all(self, group: Group, norms: Tensor) -> Tensor:
        """Norms over the weights on all processes, from those over the weights on this process."""
        if not group.sharers:
            return norms
        return self._sum_over(group, norms.double().square()).sqrt().to(norms.dtype)

    def size_of_all(self, group: Group) -> Tensor:
        """The number of elements of each weight of a group, over all processes that share it: fp64 [weights of the group]."""
        sizes = torch.tensor([weight.numel() for weight in group.weights], dtype=torch.float64, device=self.device)
        return self._sum_over(group, sizes)

    def _sum_over(self, group: Group, own: Tensor) -> Tensor:
        """The sum over the processes that divide a group's weights."""
        for sharers in group.sharers:
            own = sum_over(own, sharers)
        return own

    def update(self, scale: Tensor, finite: Tensor, measures: bool = False) -> list[Tensor] | None:
        """Update the weights with the gradients times `scale` if `finite`; otherwise change nothing. Both are tensors [].

        measures: also return the norm of each weight's change, group by group: fp32 [weights of the group] each.
        """
        if self.waits and not bool(finite):
            return [torch.zeros(len(group.weights), device=self.device) for group in self.groups] if measures else None
        numbers = self.numbers(self.taken + 1)
        factors = {id(each): torch.cat([each, scale.double().view(1)]).float() for each in numbers if self.kernel is not None}
        if self.kernel is not None:
            by_element = [isinstance(group.rule.kernel, AdamKernel) for group in self.groups]
            self.kernel.update(
                [factors[id(each)] if yes else None for each, yes in zip(numbers, by_element, strict=True)], finite
            )
        norms = [
            self._update_group(index, each, factors.get(id(each)), float(scale) if self.waits else scale, finite, measures)
            for index, each in enumerate(numbers)
        ]
        self.taken += 1 if self.waits else finite
        return [self.of_all(*pair) for pair in zip(self.groups, norms, strict=True)] if measures else None

    def numbers(self, count: Tensor) -> list[Tensor]:
        """The numbers of each group's rule for update `count`, fp64; rules that differ only in decay share one tensor."""
        by_rule: dict[UpdateRule, Tensor] = {}
        rules = [group.rule.with_factors(decay=0.0, eps=1.0) for group in self.groups]
        for rule in rules:
            if rule not in by_rule:
                by_rule[rule] = rule.numbers(self.lr, count)
        return [by_rule[rule] for rule in rules]

    def health(self) -> list[tuple[Tensor, Tensor]] | None:
        """For each group, the norms of each weight's running gradient and of its last change without decay: fp64 [weights].

        None if the rule keeps no running gradient.
        """
        count, by_group = int(self.taken), []
        for group, numbers in zip(self.groups, self.numbers(self.taken), strict=True):
            parts = [group.rule.health(part, numbers.tolist(), count) for part in group.parts()]
            if None in parts:
                return None
            known = [part for part in parts if part is not None]
            norms, changes = (self.of_all(group, torch.cat(each)).double() for each in zip(*known, strict=True))
            by_group.append((norms, changes))
        return by_group

    def settled_directions(self) -> dict[str, Tensor]:
        """What the learning rate would multiply in an update by the running means of the gradients, by the weight's name."""
        directions: dict[str, Tensor] = {}
        for group in self.groups:
            part, count = next(group.parts(len(group.weights))), int(self.taken)
            if "mean" not in part.state:
                fix = f"use an optimizer that has one; {group.rule.title} keeps {', '.join(part.state) or 'nothing'}"
                raise InputError("this optimizer keeps no running mean of the gradient", fix=fix)
            rows = replace(part, gradients=part.state["mean"]).rows()
            for name, (weight, mean, state, _) in zip(group.names, rows, strict=True):
                directions[name] = group.rule.settled_direction(mean, weight, state, count)
        return directions

    def _update_group(
        self, index: int, numbers: Tensor, factors: Tensor | None, scale: Number, finite: Tensor, measures: bool
    ) -> Tensor:
        """Update one group, unless the kernel has done so; returns the norms of the changes, if `measures`.

        factors: numbers and scale, for the kernel.
        """
        group = self.groups[index]
        norms = torch.zeros(len(group.weights) if measures else 0, dtype=group.dtype, device=self.device)
        tensors = numbers.to(group.dtype).unbind()
        compares = measures and not group.rule.changes_from_state
        with torch.no_grad():
            values = numbers.tolist() if self.waits else tensors
            for few, update in self._updates(index, values, factors, scale, finite, compares):
                before = [group.precise[each].clone() for each in few] if compares else []
                update()
                if compares:
                    after = [group.precise[each] for each in few]
                    torch._foreach_copy_(
                        [norms[each] for each in few], torch._foreach_norm(torch._foreach_sub(before, after), 2)
                    )
            if measures and group.rule.changes_from_state:
                changes = (group.rule.changes(part, tensors) for part in group.parts())
                norms = torch.cat([torch.stack(torch._foreach_norm(few, 2)) for few in changes])
        return norms

    def _updates(
        self, index: int, numbers: Sequence[Number], factors: Tensor | None, scale: Number, finite: Tensor, compares: bool
    ) -> Iterator[tuple[list[int], Callable[[], None]]]:
        """The indices of a few weights of a group, and what updates them, until all are updated that the kernel has not."""
        group, kernel = self.groups[index], self.groups[index].rule.kernel
        if self.kernel is None or kernel is None:
            for few, part in group.gradient_parts(scale, AT_ONCE if compares or not self.waits else None):
                yield few, partial(self._apply, group, few, part, numbers, finite)
        elif isinstance(kernel, MatrixKernel):
            count, at_once = len(group.weights), max(1, kernel.at_once // group.weights[0].numel())
            for start in range(0, count, at_once):
                few = range(start, min(start + at_once, count))
                yield list(few), partial(self.kernel.update_matrices, index, few, factors, finite)

    def _apply(self, group: Group, few: list[int], part: Part, numbers: Sequence[Number], finite: Tensor) -> None:
        """Update a few weights by their rule, if finite: without waiting for that, by a copy of what is to stay."""
        rule = group.rule
        if self.waits:
            rule.update(part, numbers)
        elif rule.guards:
            rule.update(replace(part, finite=finite), numbers)
        else:
            changed = [*part.weights, *(each for tensors in part.state.values() for each in tensors)]
            before = [each.clone() for each in changed]
            rule.update(part, numbers)
            for now, old in zip(changed, before, strict=True):
                now.copy_(torch.where(finite, now, old))
        group.round_masters(few)

    def _group(self, model: nn.Module, layer_decay: float) -> list[Group]:
        """Group the weights by rule, dtype, weight decay, eps, and whether several processes divide them."""
        members: dict[Hashable, list[tuple[str, nn.Parameter, float]]] = {}
        made: dict[Hashable, dict[str, Any]] = {}
        experts = expert_group(model)
        for name, weight, factors in trained_weights(model, layer_decay):
            own, kind = self.rule.rule_for(factors, weight.shape)
            of_shards = is_shard(weight)
            key = (weight.dtype, factors.is_matrix, factors.of_experts, of_shards, factors.decay, factors.eps, own, kind)
            if key not in made:
                sharers = (
                    *([shard_group(weight)] if of_shards else []),
                    *([experts] if experts and factors.of_experts else []),
                )
                made[key] = {
                    "rule": own.with_factors(factors.decay, factors.eps),
                    "of_experts": factors.of_experts,
                    "of_shards": of_shards,
                    "sharers": sharers,
                }
            if of_shards:
                shard, weight = weight, nn.Parameter(local(weight).detach())
                self.shards.append((weight, shard))
            members.setdefault(key, []).append((name, weight, factors.lr))
        return [
            Group(
                [name for name, _, _ in few],
                [weight for _, weight, _ in few],
                rates=[rate for _, _, rate in few],
                **made[key],
            )
            for key, few in members.items()
        ]

    def precise(self) -> dict[str, Tensor]:
        """Every trained weight by name, in the highest precision that is held."""
        return {name: each for group in self.groups for name, each in zip(group.names, group.precise, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """The state without the masters: `embedding.weight/mean`, `embedding.weight/square`, ..., and `updates`."""
        named = {
            f"{name}/{slot}": tensor
            for group in self.groups
            for slot, tensors in group.state.items()
            for name, tensor in zip(group.names, tensors, strict=True)
        }
        return named | {"updates": self.taken}

    def load(self, tensors: Mapping[str, Tensor], where: Path | str = "the optimizer's state") -> None:
        """Restore what `tensors` returned; where: the file it was read from, for errors."""
        ours = self.tensors()
        check_alike(tensors, ours, where)
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])
