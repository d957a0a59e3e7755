"""A layer of two modalities by fused operators: layers/multiway.py, with the two parts of a sequence side by side.

The layer of each modality is run by fast_layer.py on its part. The parts meet in attention only: their queries, keys and values
are put one after the other, and what each position has read goes back to its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from kilolayer.layers.attention import SelfAttention
from kilolayer.layers.block import Block, MultiwayBlock
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.modules import shallow_copy
from kilolayer.layers.multiway import Multiway
from kilolayer.layers.routing import Routing
from kilolayer.layers.sublayer import Sublayer
from kilolayer.speed.fast_attention import attend, join_heads, query_key_value
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.fast_layer import drop_path_factors, first_state, opening_norm, read_state, run_sublayer
from kilolayer.speed.state import State

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Norms(NamedTuple):
    """The norms of the two modalities."""

    A: nn.Module | None
    B: nn.Module | None


Following = nn.Module | Norms | None
"""What a layer applies to its output for the next one: `opening_norm`, or that of each modality."""


class Ways(NamedTuple):
    """The layers of the two modalities: a multiway block without pairs, on the same parameters."""

    A: Block
    B: Block


def ways_of(block: MultiwayBlock) -> Ways:
    """The two layers that a block consists of, in its current mode."""
    return Ways(_layer_of(block, "A"), _layer_of(block, "B"))


def _layer_of(block: MultiwayBlock, way: str) -> Block:
    layer = Block.__new__(Block)
    layer.__dict__.update(_way_of(block, way).__dict__)
    return layer


def _way_of(module: AnyModule, way: str) -> AnyModule:
    """A copy of the module with one module of each pair in it; the module itself if it contains no pairs."""
    if isinstance(module, Multiway):
        return getattr(module, way)
    parts = {name: None if part is None else _way_of(part, way) for name, part in module._modules.items()}
    if all(part is module._modules[name] for name, part in parts.items()):
        return module
    return shallow_copy(module, _modules=parts)


def part_at(ways: Ways, split: int, length: int) -> Block | Ways:
    """The layer of one modality if sequences of this length have no positions of the other, else both."""
    return ways if 0 < split < length else ways.A if split else ways.B


def mode_of(block: MultiwayBlock) -> tuple[bool, ...]:
    """Which of the modules that `ways_of` copies are in training mode."""
    return (block.training, *(part.training for sublayer in block.sublayers() for part in (sublayer, sublayer.f)))


def opening_norms(layer: Block | Ways) -> Following:
    """What the layer below may apply."""
    if isinstance(layer, Block):
        return opening_norm(layer.sublayers()[0])
    norms = Norms(*(opening_norm(way.sublayers()[0]) for way in layer))
    return None if norms.A is None else norms


def first_state_of(layer: Block | Ways, x: Tensor, dtype: torch.dtype, following: Following, split: int) -> State:
    """As `first_state`, also for a layer of two modalities."""
    if isinstance(layer, Block):
        assert not isinstance(following, Norms)
        return first_state(layer, x, dtype, following)
    assert not isinstance(following, nn.Module)
    parts = zip(layer, (x[:, :split], x[:, split:]), following or (None, None), strict=True)
    return _joined([first_state(way, part, dtype, norm) for way, part, norm in parts])


def run_ways(
    ways: Ways, x: State, context: FastContext, cache: KeyCache | None, following: Norms | None, seeds: Tensor | None
) -> tuple[State, Routing | None]:
    """As `run_layer`, for a layer of two modalities. following: the first norms of the next layer, one for each."""
    attention, networks = zip(*(way.sublayers() for way in ways), strict=True)
    parts, own = _split(x, context.split), (None, None) if seeds is None else (seeds[0], seeds[1])
    heads = _attend(attention, parts, context, None if own[0] is None else own[0][0])
    parts = _run(attention, parts, context, [opening_norm(network) for network in networks], own[0], heads)
    return _joined(_run(networks, parts, context, following or (None, None), own[1], (None, None))), None


def _attend(
    sublayers: Sequence[Sublayer], parts: Sequence[State], context: FastContext, seed: Tensor | None
) -> Sequence[Tensor]:
    """The input of each modality's output projection, after attention over the whole sequence."""
    functions = [cast("SelfAttention", sublayer.f) for sublayer in sublayers]
    reads = [read_state(sublayer, part) for sublayer, part in zip(sublayers, parts, strict=True)]
    packed = [query_key_value(f, read) for f, read in zip(functions, reads, strict=True)]
    heads_BHLD = attend(functions[0], torch.cat(packed, dim=1), context, None, seed)
    of_parts = heads_BHLD.split([part.precise.shape[1] for part in parts], dim=2)
    return [join_heads(f, part) for f, part in zip(functions, of_parts, strict=True)]


def _run(
    sublayers: Sequence[Sublayer],
    parts: Sequence[State],
    context: FastContext,
    following: Sequence[nn.Module | None],
    seeds: Tensor | None,
    heads: Sequence[Tensor | None],
) -> list[State]:
    """Run the sublayer of each modality on its part. Both skip the branch of the same samples (drop path)."""
    samples = drop_path_factors(sublayers[0], len(parts[0].precise))
    # With one seed, dropout would choose the same elements in both parts.
    own = (None, None) if seeds is None else (seeds, seeds + 1)
    return [
        run_sublayer(sublayer, part, context, None, norm, seed, heads=read, samples=samples)[0]
        for sublayer, part, norm, seed, read in zip(sublayers, parts, following, own, heads, strict=True)
    ]


def _split(x: State, split: int) -> tuple[State, State]:
    return _part(x, slice(None, split)), _part(x, slice(split, None))


def _part(x: State, part: slice) -> State:
    normed, second = (None if each is None else each[:, part] for each in (x.normed, x.second))
    return State(x.precise[:, part], x.rounded[:, part], normed, second)


def _joined(parts: Sequence[State]) -> State:
    precise = torch.cat([part.precise for part in parts], dim=1)
    same = all(part.rounded is part.precise for part in parts)
    rounded = precise if same else torch.cat([part.rounded for part in parts], dim=1)
    return State(
        precise, rounded, _put_together([part.normed for part in parts]), _put_together([part.second for part in parts])
    )


def _put_together(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim=1) if present else None
