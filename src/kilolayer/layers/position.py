"""Position encodings: added at the input, rotated into queries and keys, or as a bias on the attention scores.

    sinusoidal, learned:  x + table[position]
    rotary, xPos:         q and k rotated by angles proportional to position; xPos also scales q by a decay and k by its inverse
    T5:                   softmax(q k^T / sqrt(head_dim) + bias[bucket(distance)])

Tables are computed once per forward pass and never stored as buffers, so a model built on the meta device loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.layers.options import LayerOptions
from kilolayer.recipes.base import Side

ROTARY_BASE = 10_000.0
XPOS_SCALE_BASE = 512  # Sun et al. 2023, A Length-Extrapolatable Transformer: B and gamma of its decay
XPOS_GAMMA = 0.4
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128  # Raffel et al. 2020


def position_ids(length: int, *, device: torch.device, real: Tensor | None, segments: Tensor | None) -> Tensor:
    """The position of each token in its own sequence: int [1 or batch, length].

    Padding (where real [batch, length] is False) is not counted; each document of a packed sequence starts at 0.
    """
    index = torch.arange(length, device=device)
    if segments is not None:
        first = torch.ones_like(segments, dtype=torch.bool)
        first[:, 1:] = segments[:, 1:] != segments[:, :-1]
        start = torch.where(first, index, 0).cummax(dim=1).values
        if real is None:
            return index - start
        counted = real.cumsum(dim=1)
        before = (counted - real.long()).gather(1, start)
        return (counted - before - 1).clamp(min=0)
    if real is not None:
        return (real.cumsum(dim=1) - 1).clamp(min=0)
    return index[None]


def sinusoids(positions_BL: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[..., length, dim]: sines in the first half and cosines in the second, with the frequencies of Vaswani et al. 2017."""
    angles = rotation_angles(positions_BL, dim, dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype)


def rotation_angles(positions_BL: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """position * base^(-2i/dim), in fp32 or higher precision: [..., length] to [..., length, dim / 2]."""
    precise = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, dim, 2, device=positions_BL.device, dtype=precise) / dim
    return positions_BL[..., None].to(precise) * ROTARY_BASE**-steps


class Sinusoidal(nn.Module):
    """x + sinusoids(position): [batch, length, dim] to the same shape; positions int [1 or batch, length]."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoids(positions, x.shape[-1], x.dtype)


class LearnedPositions(nn.Module):
    """x + table[position], with a learned table [max_length, dim] initialized from N(0, 1/dim)."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, dim))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.weight[positions]


class NoPositions(nn.Module):
    """Returns x unchanged, for models that encode positions in attention or not at all."""

    def forward(self, x: Tensor, positions: object) -> Tensor:
        return x


@dataclass(frozen=True)
class Rotation:
    """Rotary tables of one forward pass, [1 or batch, 1, length, head_dim] each.

        rotated(x) = x cos + (-x_right, x_left) sin

    x_left and x_right are the halves of head_dim. With xPos, queries are also multiplied by `decay` and keys divided by it.
    """

    cos: Tensor
    sin: Tensor
    decay: Tensor | None = None

    def rotate_query(self, query_BHLD: Tensor) -> Tensor:
        turned = self._rotate(query_BHLD)
        return turned if self.decay is None else turned * self.decay

    def rotate_key(self, key_BHLD: Tensor) -> Tensor:
        turned = self._rotate(key_BHLD)
        return turned if self.decay is None else turned / self.decay

    def _rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-right, left], dim=-1) * self.sin


class Rotary(nn.Module):
    """Rotary positions (Su et al. 2021): q^T k depends only on the distance. With `decays`, xPos (Sun et al. 2023)."""

    def __init__(self, head_dim: int, decays: bool) -> None:
        super().__init__()
        self.head_dim, self.decays = head_dim, decays

    def forward(self, positions_BL: Tensor, dtype: torch.dtype) -> Rotation:
        angles = rotation_angles(positions_BL, self.head_dim, dtype).repeat(1, 1, 2)[:, None]
        if self.decays and _rotated_dtype(positions_BL.device.type, dtype) == torch.float16:
            raise OptionError("xPos scales keys beyond the range of fp16", fix="use bf16 or fp32, or rotary positions")
        decay = self._decay(positions_BL, angles.dtype)[:, None].to(dtype) if self.decays else None
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), decay)

    def _decay(self, positions_BL: Tensor, dtype: torch.dtype) -> Tensor:
        share = torch.arange(0, self.head_dim, 2, device=positions_BL.device, dtype=dtype) / self.head_dim
        zeta = (share + XPOS_GAMMA) / (1 + XPOS_GAMMA)
        return (zeta ** (positions_BL[..., None].to(dtype) / XPOS_SCALE_BASE)).repeat(1, 1, 2)


def _rotated_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of queries and keys."""
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocasts else dtype


class RelativeBias(nn.Module):
    """T5's relative position bias: one learned number per head and bucket of distances, shared by all layers of a stack."""

    def __init__(self, heads: int, causal: bool, dim: int) -> None:
        super().__init__()
        self.causal, self.std = causal, dim**-0.5
        self.weight = nn.Parameter(torch.empty(T5_BUCKETS, heads))

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.weight, self.std)

    def forward(self, queries_BL: Tensor, keys_BL: Tensor) -> Tensor:
        """Positions of queries and keys, int [1 or batch, length] each, to the bias [1 or batch, heads, queries, keys]."""
        distance = keys_BL[:, None, :] - queries_BL[:, :, None]
        return self.weight[self._bucket(distance)].permute(0, 3, 1, 2)

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets, offset = T5_BUCKETS, torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp(min=0)
        else:
            buckets //= 2
            offset = (distance > 0) * buckets
            distance = distance.abs()
        exact = buckets // 2
        growth = (distance.clamp(min=1) / exact).log() / math.log(T5_MAX_DISTANCE / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, far)


class Positions(nn.Module):
    """The position encoding of one stack: `at_input` is added to its input; `rotary` or `bias` goes to its attention."""

    def __init__(
        self,
        options: LayerOptions,
        side: Side,
    ) -> None:
        super().__init__()
        kind, causal = options.positions, side == "decoder"
        self.max_length = options.max_length
        self.at_input = NoPositions()
        self.rotary: Rotary | None = None
        self.bias: RelativeBias | None = None
        if kind == "sinusoidal":
            self.at_input = Sinusoidal()
        elif kind == "learned" and options.max_length is not None:
            self.at_input = LearnedPositions(options.max_length, options.dim)
        elif kind in ("rotary", "xpos"):
            # xPos decays with the distance into the past; bidirectional attention uses the rotation alone.
            self.rotary = Rotary(options.head_dim, decays=kind == "xpos" and causal)
        elif kind == "t5":
            self.bias = RelativeBias(options.heads, causal, options.dim)

    def check_length(self, length: int | Tensor) -> None:
        """Raise if the learned table is too short for `length` positions, or for the largest position in a tensor."""
        if self.max_length is None:
            return
        if isinstance(length, Tensor):
            # Reading values back from an accelerator would stall it; there the look-up itself asserts the range.
            length = int(length.max()) + 1 if length.device.type == "cpu" else 0
        if length > self.max_length:
            raise InputError(
                f"a sequence of {length} positions is longer than the {self.max_length} learned positions of the model",
                fix=f"cut it to {self.max_length}, or build the model with a larger max_length",
            )
