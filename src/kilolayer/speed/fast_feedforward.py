"""The feed-forward network and the experts by fused operators: the same functions as the plain modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.feedforward import FeedForward
from kilolayer.moe.experts import ExpertNorm, ExpertProjection, Experts
from kilolayer.moe.groups import Groups
from kilolayer.speed.operators.grouped import grouped_product, multiply_groups, spread
from kilolayer.speed.operators.grouped_norm import can_fuse_grouped_norm, grouped_relu_norm
from kilolayer.speed.operators.relu_network import relu_network
from kilolayer.speed.operators.relu_product import can_fuse_relu_product, normed_relu_product, rectified_product
from kilolayer.speed.product import KERNEL_NORMS, dropout_of, has_inner_norm_kernel, normalize, project


def feedforward(f: FeedForward, x: Tensor, seed: Tensor | None, *, biased: bool) -> Tensor:
    """W_2 N(drop(phi(W_1 x))): [batch, length, dim] to the same shape; `biased=False` omits the bias of W_2."""
    weight, bias, norm, dropout = f.input.weight, f.input.bias, f.inner_norm, dropout_of(f.dropout)
    x = f.input_shift(x).to(weight.dtype)
    if bias is None or not _rectifies_in_product(f, x):
        hidden = normalize(norm, f.dropout(f.activation(f.activation_shift(project(f.input, x)))))
    elif isinstance(norm, nn.Identity) and isinstance(f.output_shift, nn.Identity) and torch.is_grad_enabled():
        # With only ReLU and dropout between the products, one operator computes the backward of both.
        return relu_network(x, weight, bias, f.output.weight, f.output.bias if biased else None, seed, dropout)
    elif has_inner_norm_kernel(norm, x.device, x.dtype):
        hidden = normed_relu_product(x, weight, bias, norm.weight, norm.bias, norm.eps, seed, dropout)[0]
    else:
        hidden = normalize(norm, rectified_product(x, weight, bias, seed, dropout))
    return project(f.output, f.output_shift(hidden), biased=biased)


def _rectifies_in_product(f: FeedForward, x: Tensor) -> bool:
    """Whether the first product can be fused with its bias, a ReLU and dropout."""
    plain = isinstance(f.activation, nn.ReLU) and isinstance(f.activation_shift, nn.Identity)
    return plain and can_fuse_relu_product(x.device, f.input.weight.dtype)


def run_experts(f: Experts, rows: Tensor, groups: Groups, seed: Tensor | None) -> Tensor:
    """W_2e N_e(drop(phi(W_1e x))) for the rows x of expert e: [rows, dim] to the same shape."""
    norm, weight = f.inner_norm, f.input.weight
    rows = f.input_shift(rows)
    if _fuses_expert_norm(f, rows.device):
        assert isinstance(norm, ExpertNorm)
        product = grouped_product(rows.to(weight.dtype), weight, groups.ends, True)
        dropout = dropout_of(f.dropout)
        hidden = grouped_relu_norm(product, *groups, f.input.bias, norm.weight, norm.bias, norm.eps, seed, dropout)[0]
    else:
        hidden = f.dropout(f.activation(f.activation_shift(_project_groups(f.input, rows, groups))))
        if isinstance(norm, ExpertNorm):
            bias = None if norm.bias is None else spread(norm.bias, groups)
            hidden = norm.scaled(hidden, spread(norm.weight, groups), bias)
    return _project_groups(f.output, f.output_shift(hidden), groups)


def _fuses_expert_norm(f: Experts, device: torch.device) -> bool:
    norm, dtype = f.inner_norm, f.input.weight.dtype
    bare = isinstance(f.activation, nn.ReLU) and isinstance(f.activation_shift, nn.Identity)
    if not bare or not isinstance(norm, ExpertNorm) or norm.kind not in KERNEL_NORMS:
        return False
    return can_fuse_grouped_norm(device, norm.weight.dtype, dtype, norm.weight.shape[1])


def _project_groups(projection: ExpertProjection, rows: Tensor, groups: Groups) -> Tensor:
    product = multiply_groups(rows.to(projection.weight.dtype), projection.weight, groups)
    return product if projection.bias is None else product + spread(projection.bias, groups)
