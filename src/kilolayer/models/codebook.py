"""Vector quantization: each vector is replaced by the nearest of a few learned codes (van den Oord et al. 2017).

The codes follow running means of the vectors that choose them, and are not changed by gradients. What a step needs for that is
summed over its batches and processes (`CodebookSums`), and applied at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Distance = Literal["cosine", "euclidean"]
LEAST_USES = 1e-30
"""A code with fewer, long unused, stays where it is: its running sum is rounded to nothing."""
APART = 0.01
"""Where a restarted code is on the way from the code that it divides to its former position."""


@dataclass(frozen=True)
class Quantized:
    """vectors: codes in the place of the given vectors [n, dim], through which gradients pass unchanged. codes: int64 [n].

    given: the vectors that were compared with the codes, without gradient, [n, dim]; of length 1 for the cosine.
    commitment: their squared distances to the codes, with a gradient that pulls them to their codes, [n].
    real: bool [n], False at vectors that do not count.
    """

    vectors: Tensor
    codes: Tensor
    given: Tensor
    commitment: Tensor
    real: Tensor


class Codebook(nn.Module):
    """The codes [codes, dim], and the running means that they follow: how many vectors chose each [codes], and their sum."""

    vectors: Tensor
    uses: Tensor
    sums: Tensor

    def __init__(self, codes: int, dim: int, distance: Distance = "cosine", decay: float = 0.99, restart: float = 0.0) -> None:
        """decay: of the running means. restart: the share of even use below which a code is moved to where it is used."""
        super().__init__()
        self.cosine, self.decay, self.restart = distance == "cosine", decay, restart
        self.register_buffer("vectors", self._placed(torch.randn(codes, dim) / dim**0.5))
        self.register_buffer("uses", torch.zeros(codes))
        self.register_buffer("sums", torch.zeros(codes, dim))

    def forward(self, vectors: Tensor, real: Tensor) -> Quantized:
        """Replace each of the vectors [n, dim] by its nearest code; real: bool [n], False at those that do not count."""
        z = self._placed(vectors)
        codes = self.nearest(z.detach())
        e = self.lookup(codes)
        straight_through = z + (e - z).detach()
        return Quantized(straight_through, codes, z.detach(), (z - e).square().sum(dim=-1), real)

    def nearest(self, vectors: Tensor) -> Tensor:
        """The index of the code that is nearest to each of the vectors [n, dim]: int64 [n]."""
        e = self._placed(self.vectors)
        # |z - e|^2 = |z|^2 - 2 z e + |e|^2, in which |z|^2 is the same for all codes.
        return (e.square().sum(dim=-1) - 2 * self._placed(vectors) @ e.t()).argmin(dim=-1)

    def lookup(self, codes: Tensor) -> Tensor:
        """The vectors of codes, int64 [...]: [..., dim]."""
        return F.embedding(codes, self._placed(self.vectors))

    @torch.no_grad()
    def follow(self, count: Tensor, total: Tensor, finite: Tensor) -> None:
        """Move each code to the running mean of its vectors, if `finite`, bool []; then restart the codes that are hardly used.

        count: the vectors of a step that chose each code, [codes]. total: their sum, [codes, dim].
        """
        uses = self.decay * self.uses + (1 - self.decay) * count
        sums = self.decay * self.sums + (1 - self.decay) * total
        means = self._placed(sums / uses[:, None].clamp(min=LEAST_USES))
        vectors = torch.where((uses > LEAST_USES)[:, None], means, self.vectors)
        if self.restart:
            vectors, uses, sums = self._restarted(vectors, uses, sums)
        for own, new in ((self.vectors, vectors), (self.uses, uses), (self.sums, sums)):
            own.copy_(torch.where(finite, new, own))

    def _restarted(self, vectors: Tensor, uses: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes below the limit move close to the most used ones, of which they take over half of the uses.

        Which half is decided by the next batches. Nothing is drawn, so that several processes restart the same codes alike.
        """
        limit, half = self.restart * uses.mean(), len(uses) // 2
        order = uses.argsort(descending=True, stable=True)
        divided, moved = order[:half], order.flip(0)[:half]
        moves = ((uses[moved] < limit) & (uses[divided] > 2 * limit))[:, None]
        close = self._placed(vectors[divided] + APART * (vectors[moved] - vectors[divided]))
        halved = torch.where(moves[:, 0], uses[divided] / 2, uses[divided])
        vectors = vectors.index_copy(0, moved, torch.where(moves, close, vectors[moved]))
        sums_moved = torch.where(moves, close * halved[:, None], sums[moved])
        sums_divided = torch.where(moves, sums[divided] / 2, sums[divided])
        uses_moved = torch.where(moves[:, 0], halved, uses[moved])
        uses = uses.index_copy(0, moved, uses_moved).index_copy(0, divided, halved)
        sums = sums.index_copy(0, moved, sums_moved).index_copy(0, divided, sums_divided)
        return vectors, uses, sums

    def _placed(self, vectors: Tensor) -> Tensor:
        """The vectors as they are compared: for the cosine, of length 1."""
        return F.normalize(vectors, dim=-1) if self.cosine else vectors


class CodebookSums:
    """What a step sums for a codebook (`StepSums`): how many vectors chose each code, and the sum of these vectors."""

    def __init__(self, codebook: Codebook) -> None:
        self.codebook = codebook
        self.of_step = [torch.zeros_like(codebook.uses), torch.zeros_like(codebook.sums)]

    def record(self, output: Quantized) -> None:
        """Add the vectors of a batch that count."""
        count, total = self.of_step
        weight = output.real.to(count.dtype)
        count.index_add_(0, output.codes, weight)
        total.index_add_(0, output.codes, output.given * weight[:, None])

    def end_step(self, finite: Tensor) -> None:
        """Let the codes follow the sums if the step is `finite`."""
        count, total = self.of_step
        self.codebook.follow(count, total, finite)
        self.discard_step()

    def discard_step(self) -> None:
        """Clear the sums."""
        for each in self.of_step:
            each.zero_()
