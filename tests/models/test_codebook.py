"""Vector quantization against a version written out in numpy: nearest codes, gradients, running means, restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kilolayer.models.codebook import APART, Codebook, CodebookSums

CODES, DIM, DECAY = 6, 3, 0.9


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


class NaiveCodebook:
    """The same, one vector after another, in fp64."""

    def __init__(self, vectors: np.ndarray, distance: str, restart: float) -> None:
        self.vectors, self.cosine, self.restart = vectors.astype(np.float64), distance == "cosine", restart
        self.uses, self.sums = np.zeros(len(vectors)), np.zeros(vectors.shape)

    def nearest(self, vector: np.ndarray) -> int:
        z = unit(vector) if self.cosine else vector
        return int(np.argmin([((z - code) ** 2).sum() for code in self.vectors]))

    def step(self, vectors: np.ndarray) -> None:
        count, total = np.zeros(len(self.vectors)), np.zeros(self.vectors.shape)
        for vector in vectors.astype(np.float64):
            code = self.nearest(vector)
            count[code] += 1
            total[code] += unit(vector) if self.cosine else vector
        self.uses = DECAY * self.uses + (1 - DECAY) * count
        self.sums = DECAY * self.sums + (1 - DECAY) * total
        for code, uses in enumerate(self.uses):
            if uses > 0:
                mean = self.sums[code] / uses
                self.vectors[code] = unit(mean) if self.cosine else mean
        if self.restart:
            self.divide()

    def divide(self) -> None:
        limit = self.restart * self.uses.mean()
        most_used_first = sorted(range(len(self.uses)), key=lambda code: -self.uses[code])
        least_used_first = most_used_first[::-1]
        for full, idle in zip(most_used_first[: len(self.uses) // 2], least_used_first, strict=False):
            if self.uses[idle] < limit and self.uses[full] > 2 * limit:
                close = self.vectors[full] + APART * (self.vectors[idle] - self.vectors[full])
                self.vectors[idle] = unit(close) if self.cosine else close
                self.uses[full] /= 2
                self.sums[full] /= 2
                self.uses[idle], self.sums[idle] = self.uses[full], self.uses[full] * self.vectors[idle]


def pair(distance: Any, restart: float = 0.0) -> tuple[Codebook, NaiveCodebook]:
    torch.manual_seed(0)
    codebook = Codebook(CODES, DIM, distance, DECAY, restart).double()
    return codebook, NaiveCodebook(codebook.vectors.numpy().copy(), distance, restart)


def batch(seed: int, count: int = 40) -> torch.Tensor:
    """Vectors around two points, so that most codes are not used."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.tensor([[2.0, 0.5, 0.1], [-1.0, 1.0, 0.3]], dtype=torch.float64)
    chosen = torch.randint(2, (count,), generator=generator)
    return centers[chosen] + 0.3 * torch.randn(count, DIM, generator=generator, dtype=torch.float64)


def everything(vectors: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(vectors), dtype=torch.bool)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
@pytest.mark.parametrize("restart", [0.0, 0.2])
def test_codes_follow_the_running_means_of_their_vectors(distance: str, restart: float) -> None:
    codebook, naive = pair(distance, restart)
    sums = CodebookSums(codebook)
    moved = 0
    for seed in range(12):
        vectors = batch(seed)
        before = naive.vectors.copy()
        assert codebook.nearest(vectors).tolist() == [naive.nearest(each) for each in vectors.numpy()]
        sums.record(codebook(vectors, everything(vectors)))
        sums.end_step(torch.tensor(True))
        naive.step(vectors.numpy())
        for own, expected in ((codebook.vectors, naive.vectors), (codebook.uses, naive.uses), (codebook.sums, naive.sums)):
            np.testing.assert_allclose(own.numpy(), expected, rtol=1e-10, atol=1e-12)
        moved += int((np.abs(before - naive.vectors).sum(axis=1) > 0).sum())
    used = len(set(codebook.nearest(batch(99, 400)).tolist()))
    assert moved > 12
    assert used == CODES if restart else used < CODES


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_gradients_pass_straight_through(distance: str) -> None:
    codebook, _ = pair(distance)
    vectors = batch(1).requires_grad_()
    found = codebook(vectors, everything(vectors))
    assert torch.allclose(found.vectors.detach(), codebook.lookup(found.codes))
    weight = torch.randn(found.vectors.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad((found.vectors * weight).sum(), vectors)

    z = vectors.detach().numpy()
    expected = weight.numpy()
    if distance == "cosine":  # of z / |z|: (I - u u^T) / |z|
        length, u = np.linalg.norm(z, axis=1, keepdims=True), unit(z)
        expected = (expected - u * (u * expected).sum(axis=1, keepdims=True)) / length
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-10, atol=1e-12)
    assert not list(codebook.parameters())  # codes have no gradient


def test_the_commitment_pulls_vectors_to_their_codes() -> None:
    codebook, naive = pair("euclidean")
    vectors = batch(1).requires_grad_()
    found = codebook(vectors, everything(vectors))
    (gradient,) = torch.autograd.grad(found.commitment.sum(), vectors)
    z = vectors.detach().numpy()
    apart = z - np.stack([naive.vectors[naive.nearest(each)] for each in z])
    np.testing.assert_allclose(found.commitment.detach().numpy(), (apart**2).sum(axis=1), rtol=1e-10)
    np.testing.assert_allclose(gradient.numpy(), 2 * apart, rtol=1e-10)


def test_batches_of_a_step_are_summed_and_what_only_fills_up_does_not_count() -> None:
    one, _ = pair("cosine", 0.2)
    two, _ = pair("cosine", 0.2)
    vectors, filling = batch(5, 30), 100 * torch.ones(7, DIM, dtype=torch.float64)
    sums = CodebookSums(one)
    sums.record(one(vectors, everything(vectors)))
    sums.end_step(torch.tensor(True))
    sums = CodebookSums(two)
    sums.record(two(vectors[:13], everything(vectors[:13])))
    rest = torch.cat([vectors[13:], filling])
    sums.record(two(rest, torch.arange(len(rest)) < 17))
    sums.end_step(torch.tensor(True))
    for name, buffer in one.named_buffers():
        torch.testing.assert_close(two.get_buffer(name), buffer)


def test_a_step_that_is_not_finite_or_is_abandoned_changes_nothing() -> None:
    codebook, _ = pair("cosine", 0.2)
    before = {name: buffer.clone() for name, buffer in codebook.named_buffers()}
    sums, vectors = CodebookSums(codebook), torch.full((4, DIM), torch.nan, dtype=torch.float64)
    sums.record(codebook(vectors, everything(vectors)))
    sums.end_step(torch.tensor(False))
    assert all(torch.equal(buffer, before[name]) for name, buffer in codebook.named_buffers())
    sums.record(codebook(batch(1), everything(batch(1))))
    sums.discard_step()
    assert not any(each.any() for each in sums.of_step)
