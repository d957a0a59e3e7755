"""Adam, AdamW and RAdam that update all weights at once, with fp32 master copies of weights held in lower precision."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from kilolayer.moe.clip import exact_norm
from kilolayer.moe.shard import expert_group
from kilolayer.parallel.collectives import sum_over
from kilolayer.runtime.runtime import PLAIN, Runtime
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.checkpoint import check_alike
from kilolayer.training.parameter_groups import trained_weights

AT_ONCE = 64
ALIGNMENT = 64  # elements; each tensor's part of a flat buffer starts where wide loads are possible


@dataclass
class Group:
    """Weights of one dtype with the same weight decay; their moments and masters are in one flat buffer each, in order.

    rates: the factor on the learning rate of each weight. of_experts: whether each expert of a sparse model has its own copy of
    these weights. eps: the factor on Adam's eps.
    """

    names: list[str]
    weights: list[nn.Parameter]
    decay: float
    rates: list[float]
    of_experts: bool = False
    eps: float = 1.0
    starts: list[int] = field(init=False)
    means: list[Tensor] = field(init=False)
    squares: list[Tensor] = field(init=False)
    masters: list[Tensor] | None = field(init=False, default=None)
    sums: list[Tensor] | None = field(init=False, default=None)
    buffers: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ends = torch.tensor([-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in self.weights]).cumsum(0).tolist()
        self.starts, self.size = [0, *ends[:-1]], ends[-1]
        self.means, self.squares = self._buffer("means"), self._buffer("squares")

    def keep_masters(self, precise: Mapping[nn.Parameter, Tensor]) -> None:
        """Keep an fp32 master copy of each weight, from its value before rounding."""
        self.masters = self._buffer("masters")
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.copy_(precise[weight])

    def keep_sums(self) -> None:
        """Allocate buffers that gradients are accumulated in over batches."""
        self.sums = self._buffer("sums")

    def join_weights(self) -> None:
        """Move the weights into one flat buffer too, so that an update takes a few operations in all, not a few per weight."""
        for place, weight in zip(self._buffer("weights"), self.weights, strict=True):
            weight.data = place.copy_(weight.data)

    @property
    def has_equal_rates(self) -> bool:
        """Whether all weights have the same learning rate."""
        return all(rate == self.rates[0] for rate in self.rates)

    @property
    def gradients(self) -> list[Tensor | None]:
        """What the next update reads: the sums over batches if they are kept, else the gradients of the last backward pass."""
        return list(self.sums) if self.sums is not None else [weight.grad for weight in self.weights]

    def _buffer(self, name: str) -> list[Tensor]:
        """A tensor for each weight, in fp32 or higher precision: views of one zeroed buffer."""
        dtype = torch.promote_types(self.weights[0].dtype, torch.float32)
        flat = self.buffers[name] = torch.zeros(self.size, dtype=dtype, device=self.weights[0].device)
        return [
            flat[start : start + weight.numel()].view(weight.shape)
            for start, weight in zip(self.starts, self.weights, strict=True)
        ]


class Optimizer:
    """w <- (1 - lr decay) w - step * mean / (root * sqrt(square) + offset); only matrices and tables are decayed.

    mean and square are the running means of the gradient and of its square. After t updates, Adam has step = lr / (1 -
    beta1^t), root = 1 / sqrt(1 - beta2^t), offset = eps. RAdam multiplies by its rectification term and omits the denominator
    until that is defined. AdamW and RAdam (as in its authors' code) decay as written above; Adam adds decay * w to the
    gradient.
    `lr` is a tensor, so that a captured step reads its current value. Each weight has its own factor on lr and step, and each
    group its own factor on eps.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        precise: Mapping[nn.Parameter, Tensor] | None = None,
        sums: bool = False,
        runtime: Runtime = PLAIN,
    ) -> None:
        """precise: the weights of a reduced-precision model before rounding. runtime: may have a kernel for the update.

        sums: accumulate gradients in one buffer, which is needed for several batches per step and is faster on the CPU. A
        weight without a gradient then has the gradient 0.
        """
        self.config = config
        self.groups = _group(model, config)
        self.sharing = expert_group(model)
        self.device = self.groups[0].weights[0].device
        for group in self.groups:
            if precise is not None and group.weights[0] in precise:
                group.keep_masters(precise)
            if sums:
                group.keep_sums()
            if sums and group.masters is None and self.device.type == "cpu":
                group.join_weights()
        beta1, beta2, decoupled = config.beta1, config.beta2, config.decoupled
        self.kernel = runtime.update_kernel(self.groups, beta1=beta1, beta2=beta2, decoupled=decoupled)
        self.lr = torch.tensor(config.lr, dtype=torch.float64, device=self.device)
        self.taken = torch.zeros((), dtype=torch.float64, device=self.device)

    def collect(self) -> None:
        """Add the gradients of the last backward pass to the sums."""
        summed = [group for group in self.groups if group.sums is not None]
        if self.kernel is not None and summed:
            self.kernel.collect()
        for group in summed:
            if self.kernel is None:
                add_lists(group)
            for weight in group.weights:
                weight.grad = None

    def shared_sums(self) -> list[Tensor]:
        """The gradient sums that all processes add to: all but those of experts that are distributed over the processes."""
        joint = [group for group in self.groups if self.sharing is None or not group.of_experts]
        return [group.buffers["sums"] for group in joint if group.sums is not None]

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
            zero = torch.zeros((), dtype=group.means[0].dtype, device=self.device)
            present = [gradient for gradient in group.gradients if gradient is not None]
            found = iter(torch._foreach_norm(present, 2, dtype=zero.dtype) if present else ())
            own = torch.stack([zero if gradient is None else next(found) for gradient in group.gradients])
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

    def update_norms(self, factors: Tensor) -> list[Tensor]:
        """The norm of each weight's change in the update with these coefficients, computed from the moments after it."""
        return [
            self.of_all(
                group, torch.cat([self._changes(group, start, factors) for start in range(0, len(group.weights), AT_ONCE)])
            )
            for group in self.groups
        ]

    def of_all(self, group: Group, norms: Tensor) -> Tensor:
        """Norms over the weights on all processes, from those over the weights on this process."""
        if self.sharing is None or not group.of_experts:
            return norms
        return sum_over(norms.double().square(), self.sharing).sqrt().to(norms.dtype)

    def _changes(self, group: Group, start: int, factors: Tensor) -> Tensor:
        """The norms of the changes of a few weights at a time; all at once would need a second copy of the model."""
        few = slice(start, start + AT_ONCE)
        weights, means, squares = (group.masters or list(group.weights))[few], group.means[few], group.squares[few]
        lr, step, root, offset, _ = factors.to(means[0].dtype)
        if group.eps != 1:
            offset = torch.where(root == 0, offset, offset * group.eps)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_mul_(roots, root)
        torch.ops.aten._foreach_add_.Tensor(roots, offset)  # the short name would read the number back
        changes = torch._foreach_div(means, roots)
        torch._foreach_mul_(changes, step)
        rates = group.rates[few]
        if any(rate != 1 for rate in rates):
            torch._foreach_mul_(changes, rates)
        if group.decay and self.config.decoupled:
            # w' = (1 - lr decay) w - change, so that w - w' = (change + lr decay w') / (1 - lr decay).
            for change, weight, rate in zip(changes, weights, rates, strict=True):
                change.add_(weight.detach() * (lr * rate * group.decay)).div_(1 - lr * rate * group.decay)
        return torch.stack(torch._foreach_norm(changes, 2))

    def coefficients(self, scale: Tensor, count: Tensor | None = None) -> Tensor:
        """lr, step, root, offset and the factor on the gradient for update `count`, by default the next one: fp64 [5]."""
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        count = self.taken + 1 if count is None else count
        left1, left2 = 1 - beta1**count, 1 - beta2**count
        if self.config.optimizer != "radam":
            return torch.stack([self.lr, self.lr / left1, left2.rsqrt(), torch.full_like(count, eps), scale.double()])
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * count * beta2**count / left2
        rectified = length > 5
        ratio = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        step = self.lr / left1 * torch.where(rectified, (ratio.clamp(min=0) * left2).sqrt(), 1.0)
        return torch.stack([self.lr, step, rectified.double(), torch.where(rectified, eps, 1.0), scale.double()])

    def update(self, scale: Tensor, finite: Tensor) -> Tensor:
        """Update the weights with the gradients times `scale` if `finite`; otherwise change nothing. Both are tensors [].

        Returns the coefficients, for `update_norms`.
        """
        factors = self.coefficients(scale)
        if self.kernel is not None:
            self.kernel.update(factors.float(), finite)
            self.taken += finite
        elif bool(finite):
            for group in self.groups:
                update_lists(group, factors.tolist(), self.config)
            self.taken += 1
        return factors

    def precise(self) -> dict[str, Tensor]:
        """Every trained weight by name, in the highest precision that is held."""
        return {
            name: weight.detach()
            for group in self.groups
            for name, weight in zip(group.names, group.masters or group.weights, strict=True)
        }

    def tensors(self) -> dict[str, Tensor]:
        """The state without the masters: `embedding.weight/mean`, `embedding.weight/square`, ..., and `updates`."""
        slots = {"mean": lambda group: group.means, "square": lambda group: group.squares}
        named = {
            f"{name}/{slot}": tensor
            for group in self.groups
            for slot, of in slots.items()
            for name, tensor in zip(group.names, of(group), strict=True)
        }
        return named | {"updates": self.taken}

    def load(self, tensors: Mapping[str, Tensor], where: Path | str = "the optimizer's state") -> None:
        """Restore what `tensors` returned; where: the place it was read from, for errors."""
        ours = self.tensors()
        check_alike(tensors, ours, where)
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])


def add_lists(group: Group) -> None:
    """Add the last gradients of one group to its sums: the CPU version, and the reference for the kernel's tests."""
    assert group.sums is not None
    found = [(total, weight.grad) for total, weight in zip(group.sums, group.weights, strict=True)]
    present = [(total, gradient) for total, gradient in found if gradient is not None]
    torch._foreach_add_([total for total, _ in present], [gradient for _, gradient in present])


def update_lists(group: Group, factors: list[float], config: TrainConfig) -> None:
    """Update one group, as flat buffers or tensor by tensor: the CPU version, and the reference for the kernel's tests."""
    lr, step, root, offset, scale = factors
    if root:  # otherwise there is no denominator, and no eps in it
        offset *= group.eps
    present = [index for index, gradient in enumerate(group.gradients) if gradient is not None]
    if not present:
        return
    joined = group.buffers.get("masters", group.buffers.get("weights"))
    if group.sums is not None and joined is not None and group.has_equal_rates:
        weights, means, squares, gradients = ([joined], *([group.buffers[name]] for name in ("means", "squares", "sums")))
        rates = group.rates[:1]
    else:
        weights, means, squares = (
            [tensors[index] for index in present] for tensors in (group.masters or group.weights, group.means, group.squares)
        )
        gradients = [gradient.to(group.means[0].dtype) for gradient in group.gradients if gradient is not None]
        rates = [group.rates[index] for index in present]
    with torch.no_grad():
        if scale != 1.0:
            gradients = torch._foreach_mul(gradients, scale)
        if group.decay and config.decoupled:
            torch._foreach_mul_(weights, [1 - lr * rate * group.decay for rate in rates])
        elif group.decay:
            gradients = torch._foreach_add(gradients, weights, alpha=group.decay)
        torch._foreach_lerp_(means, gradients, 1 - config.beta1)
        torch._foreach_mul_(squares, config.beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - config.beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_mul_(roots, root)
        torch._foreach_add_(roots, offset)
        torch._foreach_addcdiv_(weights, means, roots, [-step * rate for rate in rates])
        if group.masters is not None:
            rounded: list[Tensor] = [group.weights[index] for index in present]
            torch._foreach_copy_(rounded, [group.masters[index] for index in present])


def _group(model: nn.Module, config: TrainConfig) -> list[Group]:
    """Group the weights by dtype, weight decay, eps and whether each expert has its own copy."""
    members: dict[tuple[torch.dtype, bool, bool, float, float], list[tuple[str, nn.Parameter, float]]] = {}
    for name, weight, factors in trained_weights(model, config.layer_decay):
        key = (weight.dtype, factors.is_matrix, factors.of_experts, factors.decay, factors.eps)
        members.setdefault(key, []).append((name, weight, factors.lr))
    return [
        Group(
            [name for name, _, _ in few],
            [weight for _, weight, _ in few],
            config.weight_decay * decay,
            [rate for _, _, rate in few],
            of_experts,
            eps,
        )
        for (_, _, of_experts, decay, eps), few in members.items()
    ]
