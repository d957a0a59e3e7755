"""The experts that several processes share by fused operators: each computes the rows that arrive from all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from kilolayer.layers.block import Block
from kilolayer.models.sharded import call_as, units_of
from kilolayer.moe.exchange import run_in_order
from kilolayer.moe.experts import Experts
from kilolayer.moe.layer import Answered, Routed, SparseFeedForward
from kilolayer.speed.fast_feedforward import run_experts

RunArrived = Callable[[Experts, Tensor | None, Tensor, Tensor], Tensor]
"""A function with the signature of `run_arrived`."""


def shares_experts(block: Block) -> bool:
    """Whether other processes hold some of the layer's experts."""
    f = getattr(block.feedforward, "f", None)
    return isinstance(f, SparseFeedForward) and f.group is not None


def run_arrived(experts: Experts, seed: Tensor | None, rows: Tensor, held: Tensor) -> Tensor:
    """Compute rows [rows, dim] in any order; held: int64 [rows], the expert of each, of those held here."""
    here = len(experts.input.weight)
    return run_in_order(rows, held, here, lambda ordered, groups: run_experts(experts, ordered, groups, seed))


def ask_processes(f: SparseFeedForward, routed: Routed, seed: Tensor | None, run: RunArrived = run_arrived) -> Answered:
    """Have the rows computed by the processes that share the experts of f; seed: of the dropout inside the experts."""
    compute: Callable[[Tensor, Tensor], Tensor] = partial(run, f.experts, seed)
    for part in reversed(list(units_of(f.experts))):
        compute = partial(call_as, part, compute)
    return f.ask_others(routed, compute)
