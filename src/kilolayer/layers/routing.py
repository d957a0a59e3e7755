"""The routing statistics that a layer with experts returns from a forward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """How one layer routed its tokens to its experts. Padding is not counted. Only router_loss has a gradient.

    router_loss: [], the term that this layer adds to the training loss, already weighted.
    load: int64 [experts], the number of assignments to each expert, before the capacity limit.
    tokens: [], the number of tokens routed; each was assigned to at least one expert.
    first: [experts], the share of tokens whose first choice was this expert.
    entropy: [], the entropy of the gate distribution in nats, averaged over tokens.
    dropped: [], the share of assignments that exceeded an expert's capacity.
    temperature: [], that of the gate; 1 if it has none.
    If several processes share the experts, each with its own tokens, router_loss is the contribution of this process, to be
    summed over processes, and the other values are over the tokens of all processes.
    """

    router_loss: Tensor
    load: Tensor
    tokens: Tensor
    first: Tensor
    entropy: Tensor
    dropped: Tensor
    temperature: Tensor
