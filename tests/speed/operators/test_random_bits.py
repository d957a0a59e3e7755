"""Dropout by a counter-based generator: its words against another implementation, what it keeps against exact probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kilolayer.errors import OptionError
from kilolayer.speed.operators.fused_norm import residual_norm, residual_norm_backward
from kilolayer.speed.operators.random_bits import draw_of, dropout, keep_mask, random_words, threshold

SIGMAS = 5
SEED = torch.tensor(-6148914691236517205)


def philox2x32(counter: tuple[int, int], key: int) -> tuple[int, int]:
    """Seven rounds on Python's own integers, as in Salmon et al. (2011), section 3.3."""
    left, right = counter
    for _ in range(7):
        high, low = divmod(left * 0xD256D193, 1 << 32)
        left, right, key = high ^ key ^ right, low, (key + 0x9E3779B9) % (1 << 32)
    return left, right


def test_the_words_that_the_authors_publish() -> None:
    """From the file kat_vectors of their library, Random123."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E)
    assert philox2x32((0, 0), 0) == (0x257A3673, 0xCD26BE2A)
    assert philox2x32((ones, ones), ones) == (0xAB302C4D, 0x3DC9D239)
    assert philox2x32(pi[:2], pi[2]) == (0xBEDBBE6B, 0xE4C770B3)
    assert int(random_words(torch.tensor(0), torch.tensor(0))) == 0x257A3673
    assert int(random_words(torch.tensor(pi[2]), torch.tensor(pi[1] - (1 << 32) << 32 | pi[0]))) == 0xBEDBBE6B


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_words_are_those_of_another_implementation(device: str) -> None:
    draw = random.Random(0)
    positions = [*range(100), *(draw.getrandbits(bits) for bits in (31, 32, 33, 40, 63) for _ in range(50))]
    for bits in (1, 31, 32, 33, 63, 64):
        seed = draw.getrandbits(bits)
        words = random_words(
            torch.tensor([seed - (1 << 64) if seed >> 63 else seed], device=device), torch.tensor(positions, device=device)
        )
        mask = (1 << 32) - 1
        expected = [philox2x32((at & mask, seed >> 32 ^ at >> 32), seed & mask)[0] for at in positions]
        assert words.tolist() == expected


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(("count", "seen"), [(1 << 19, 4e-3), pytest.param(1 << 23, 1e-3, marks=pytest.mark.slow)])
def test_kept_share_mean_and_variance_are_exact(p: float, count: int, seen: float) -> None:
    x = torch.randn(64, count // 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = keep_mask(SEED, x.shape, p)
    bound = SIGMAS * math.sqrt(p * (1 - p) / count)
    assert bound < seen  # an error of p by so much is noticed
    assert abs(float(kept.double().mean()) - (1 - p)) < bound
    dropped = dropout(x, SEED, p)
    assert torch.equal(dropped, torch.where(kept, x * (1 / (1 - p)), 0.0))
    # Of each term: the mean is x, the variance p / (1 - p) x^2; that of its square p / (1 - p)^3 x^4.
    assert abs(float((dropped - x).sum())) < SIGMAS * math.sqrt(p / (1 - p) * float(x.square().sum()))
    of_square = SIGMAS * math.sqrt(p / (1 - p) ** 3 * float(x.pow(4).sum()))
    assert abs(float((dropped.square() - x.square() / (1 - p)).sum())) < of_square


def uncorrelated(first: Tensor, second: Tensor) -> bool:
    first, second = (each.double().flatten() - each.double().mean() for each in (first, second))
    correlation = float((first * second).sum() / (first.norm() * second.norm()))
    return abs(correlation) < SIGMAS / math.sqrt(first.numel())


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_different_seeds_are_independent(p: float) -> None:
    shape = (1024, 512)
    seeds = [0, 1, 2, 3, 1 << 31, 1 << 32, (1 << 32) + 1, 5 << 32, 0x9E3779B9, -1, int(SEED)]
    masks = [keep_mask(torch.tensor(seed), shape, p) for seed in seeds]
    for index, first in enumerate(masks):
        for second in masks[:index]:
            assert uncorrelated(first, second)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("seed", [0, int(SEED)])
def test_rows_columns_and_neighbours_are_independent(seed: int, p: float) -> None:
    mask = keep_mask(torch.tensor(seed), (1024, 512), p)
    flat = mask.flatten()
    for lag in (1, 2, 4, 64, 512, 1024, 65536):
        assert uncorrelated(flat[lag:], flat[:-lag])
    # The kept counts of rows and of columns scatter as those of independent draws do.
    for axis, others in ((1, 512), (0, 1024)):
        counts = mask.sum(dim=axis).double()
        scatter = float((counts - (1 - p) * others).square().sum() / (others * p * (1 - p)))
        assert abs(scatter - len(counts)) < SIGMAS * math.sqrt(2 * len(counts))


@pytest.mark.parametrize("seed", [0, int(SEED)])
def test_the_bits_of_words_and_of_pairs_are_uniform(seed: int) -> None:
    words = random_words(torch.tensor(seed), torch.arange(1 << 20))
    bytes_of_words = [words >> shift & 255 for shift in (0, 8, 16, 24)]
    pairs = (words[1:] >> 28 << 4) | words[:-1] >> 28
    for values in (*bytes_of_words, pairs):
        expected = len(values) / 256
        chi_square = float((torch.bincount(values, minlength=256) - expected).square().sum() / expected)
        assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)


def test_without_a_seed_or_a_probability_nothing_is_dropped() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, None, 0.5) is x
    assert dropout(x, SEED, 0.0) is x
    assert draw_of(None, 0.5) == draw_of(SEED, 0.0) == (None, 0, 1.0)
    assert bool(keep_mask(SEED, (1000,), 0.0).all())


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([torch.nan, torch.inf] * 500)
    assert not dropout(x, SEED, 0.5).isfinite().any()


def test_half_precision_is_scaled_before_it_is_rounded() -> None:
    x = torch.randn(1000).bfloat16()
    dropped = dropout(x, SEED, 0.1)
    assert torch.equal(dropped, dropout(x.double(), SEED, 0.1).bfloat16())


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_what_is_no_probability_below_one_is_refused(p: float) -> None:
    with pytest.raises(OptionError, match="give a probability of at least 0 and below 1"):
        threshold(p)


def test_the_gradient_is_dropped_as_the_values_are() -> None:
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, SEED, 0.3), x)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "aot_eager"),
        pytest.param("cpu", "inductor", marks=pytest.mark.slow),
        pytest.param("cuda", "inductor", marks=pytest.mark.gpu),
    ],
)
def test_compiled_code_draws_the_same(device: str, backend: str) -> None:
    compiled = torch.compile(lambda x, seed: dropout(x.sin(), seed, 0.3), backend=backend, fullgraph=True, dynamic=True)
    for rows, seed in ((33, 5), (70, -(1 << 40) + 77)):
        x = torch.randn(rows, 40, device=device, requires_grad=True)
        place = torch.tensor([seed], device=device)
        found, expected = compiled(x, place), dropout(x.sin(), place, 0.3)
        torch.testing.assert_close(found, expected)
        assert torch.equal(found == 0, expected == 0)
        torch.testing.assert_close(*(torch.autograd.grad(each.sum(), x)[0] for each in (found, expected)))


@pytest.mark.gpu
def test_a_recorded_step_draws_anew_at_each_replay_and_backward_draws_what_forward_drew() -> None:
    seed, y = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(8, 16, 512, device="cuda").bfloat16()
    x, gain = torch.zeros_like(y, dtype=torch.float32), torch.ones(512, device="cuda")

    def work() -> tuple[Tensor, Tensor]:
        seed.random_()
        added, _, statistics = residual_norm(x, y, None, None, 1.0, 1.0, gain, None, 1e-5, True, seed, 0.3)
        of_y = residual_norm_backward(
            x + 1, None, added, None, None, None, None, 1.0, 1.0, gain, statistics, y.dtype, False, seed, 0.3
        )[1]
        return added, of_y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        added, of_y = work()
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(added > 0)
        assert torch.equal(masks[-1], of_y > 0)
        assert torch.equal(masks[-1], keep_mask(seed, y.shape, 0.3))
        assert torch.equal(masks[-1].cpu(), keep_mask(seed.cpu(), y.shape, 0.3))
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])
