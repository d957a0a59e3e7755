"""What a layer with experts tells about a forward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """How one layer sent its real tokens to its experts; padding counts nowhere. All but the loss are without gradient.

    router_loss: what this layer adds to the training loss, already weighted.
    load: int64 [experts], the choices that fell on each expert, before capacity.
    tokens: how many were routed; each made at least one choice.
    first: [experts], the share of tokens whose first choice it is.
    entropy: of a token's gate distribution, in nats, the mean over tokens.
    dropped: the share of choices that were over an expert's capacity.
    temperature: of the gate; 1 where it has none.
    Where several processes share the experts, each reading tokens of its own: router_loss is the share of this process, to be
    summed over them, and the others are of all processes' tokens.
    """

    router_loss: Tensor
    load: Tensor
    tokens: Tensor
    first: Tensor
    entropy: Tensor
    dropped: Tensor
    temperature: Tensor
