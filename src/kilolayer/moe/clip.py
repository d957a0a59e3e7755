"""Gradient clipping by global norm, in which the gradients of experts can be down-weighted (SparseClip)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from kilolayer.errors import InputError, OptionError, shown, unknown
from kilolayer.moe.layer import expert_parameters, sparse_layers
from kilolayer.moe.shard import expert_group
from kilolayer.parallel.collectives import sum_over

Clipping = Literal["auto", "plain", "sparse"]


@dataclass(frozen=True)
class GradientNorm:
    """Gradient norms before clipping, [] each.

    total: the norm that is compared with the limit. dense (routers included) and expert: of each part, unweighted.
    """

    total: Tensor
    dense: Tensor
    expert: Tensor


def clip_grad_norm_(model: nn.Module, max_norm: float, kind: Clipping = "auto") -> GradientNorm:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), like torch's function of the same name, and return the norms.

    kind: "plain" uses the norm of all gradients; "sparse" is SparseClip, which weights experts as in `clipping_norm`;
    "auto" is "sparse" for a model with experts. A norm that is not finite raises no error and makes the gradients non-finite
    or 0. If processes share the experts, call it on all of them after `reduce_gradients`: all compute the same norm. It also
    supports models sharded by `fully_shard`; call it on all processes.
    """
    if not isinstance(model, nn.Module):
        raise InputError("clip_grad_norm_ needs a model", fix="give the model, not its parameters: clip_grad_norm_(model, 1.0)")
    if kind not in get_args(Clipping):
        raise unknown(str(kind), get_args(Clipping), kind="kind of clipping")
    if not isinstance(max_norm, Real) or math.isnan(max_norm) or max_norm < 0:
        raise OptionError(
            f"max_norm is {shown(max_norm)}",
            fix="it must be at least 0; with infinity, the norm is measured but nothing is clipped",
        )
    experts = next((layer.moe.experts for layer in sparse_layers(model).values()), 0)
    if kind == "sparse" and not experts:
        warnings.warn("this model has no experts: its gradients are clipped by their plain norm", stacklevel=2)
    norm = _measure(model, experts if experts and kind != "plain" else 1)
    for sharded in (False, True):  # torch's function does not accept a mixture of both
        weights = [weight for weight in model.parameters() if weight.grad is not None and _is_sharded(weight.grad) is sharded]
        clip_grads_with_norm_(weights, max_norm, norm.total)
    return norm


def clipping_norm(dense: Tensor, expert: Tensor, experts: int) -> Tensor:
    """||(g_dense, g_expert / sqrt(experts))|| from the norms of both parts (SparseClip, TorchScale).

    Each expert sees few of the tokens, so its gradient is large and noisy compared with that of a dense weight.
    """
    return torch.hypot(dense, expert / math.sqrt(experts))


def _measure(model: nn.Module, experts: int) -> GradientNorm:
    group, of_experts = expert_group(model), {parameter for _, parameter in expert_parameters(model)}
    trained = [(parameter in of_experts, parameter.grad) for parameter in model.parameters()]
    present = [(is_expert, gradient) for is_expert, gradient in trained if gradient is not None]
    device = next(model.parameters()).device
    if any(_is_sharded(gradient) for _, gradient in present):
        dense = _norm_of_shards([gradient for is_expert, gradient in present if not is_expert]).to(device)
        expert = _norm_of_shards([gradient for is_expert, gradient in present if is_expert]).to(device)
        return GradientNorm(clipping_norm(dense, expert, experts), dense, expert)
    dense = get_total_norm([gradient for is_expert, gradient in present if not is_expert]).to(device)
    expert = exact_norm([gradient for is_expert, gradient in present if is_expert]).to(device)
    if group is not None:
        expert = sum_over(expert.double().square(), group).sqrt().to(expert.dtype)
    elif experts == 1:
        # Bitwise equal to what torch computes.
        return GradientNorm(get_total_norm([gradient for _, gradient in present]), dense, expert)
    return GradientNorm(clipping_norm(dense, expert, experts), dense, expert)


def _is_sharded(gradient: Tensor) -> bool:
    """Whether it is a DTensor; not tested by isinstance, because importing the class is slow."""
    return hasattr(gradient, "full_tensor")


def _norm_of_shards(gradients: Sequence[Any]) -> Tensor:
    """The joint norm of gradients, some sharded over processes (FSDP2), others whole on each process."""
    whole = get_total_norm([gradient for gradient in gradients if not _is_sharded(gradient)])
    shards: Any = get_total_norm([gradient for gradient in gradients if _is_sharded(gradient)])
    return torch.hypot(whole, shards.full_tensor() if _is_sharded(shards) else shards)


def exact_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm over all tensors, [], computed row by row first.

    On the CPU, torch's fp32 norm of 16 million numbers in one call has a relative error of 7e-4, and a smaller one for the
    parts held by several processes, so the results would differ.
    """
    if not tensors:
        return torch.zeros(())
    precise = torch.promote_types(tensors[0].dtype, torch.float32)
    rows = [torch.linalg.vector_norm(tensor, dim=-1, dtype=precise).flatten() for tensor in tensors]
    return torch.cat(rows).double().norm().to(precise)
