"""Positions in two axes against loops, and their resampling against torch's interpolation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kilolayer.errors import InputError
from kilolayer.layers.grid_positions import LearnedGrid, RotaryGrid, SinusoidalGrid, coordinates_of, resampled


def test_coordinates_go_row_by_row() -> None:
    assert coordinates_of((2, 3), torch.device("cpu")).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("first", [0, 1])
def test_sinusoids_of_rows_and_columns(first: int) -> None:
    dim, grid = 16, (2, 5)
    found = SinusoidalGrid(first)(torch.zeros(1, first + 10, dim, dtype=torch.float64), grid)[0]
    assert not found[:first].any()
    for patch in range(10):
        axes = (patch // 5, patch % 5)
        for axis, position in enumerate(axes):
            for index in range(dim // 4):
                angle = position * 10_000 ** (-2 * index / (dim // 2))
                sine, cosine = found[first + patch, axis * 8 + index], found[first + patch, axis * 8 + 4 + index]
                assert sine.item() == pytest.approx(math.sin(angle), abs=1e-12)
                assert cosine.item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_rotation_by_rows_and_columns() -> None:
    width, places = 8, torch.tensor([[[0, 0], [2, 0], [0, 3], [4, 5]]])
    query = torch.randn(1, 1, 4, width, dtype=torch.float64)
    found = RotaryGrid(width, decays=False)(places, torch.float64).rotate_query(query)
    for patch in range(4):
        for pair in range(width // 2):
            axis, index = divmod(pair, width // 4)
            angle = places[0, patch, axis].item() * 10_000 ** (-2 * index / (width // 2))
            left, right = query[0, 0, patch, pair].item(), query[0, 0, patch, pair + width // 2].item()
            assert found[0, 0, patch, pair].item() == pytest.approx(left * math.cos(angle) - right * math.sin(angle), abs=1e-12)
            turned = right * math.cos(angle) + left * math.sin(angle)
            assert found[0, 0, patch, pair + width // 2].item() == pytest.approx(turned, abs=1e-12)
    assert torch.equal(found[0, 0, 0], query[0, 0, 0])  # of the class token


def test_rotated_products_depend_on_the_distances_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(at: tuple[int, int], of: tuple[int, int]) -> float:
        turn = [RotaryGrid(8, decays=False)(torch.tensor([[each]]), torch.float64) for each in (at, of)]
        return float((turn[0].rotate_query(query) * turn[1].rotate_key(key)).sum())

    assert score((1, 2), (4, 7)) == pytest.approx(score((3, 0), (6, 5)), abs=1e-12)
    assert score((1, 2), (4, 7)) != pytest.approx(score((2, 1), (7, 4)), abs=1e-3)


@pytest.mark.parametrize("first", [0, 1])
def test_resampling_is_bicubic_and_leaves_the_class_token(first: int) -> None:
    weights = torch.randn(first + 12, 5, dtype=torch.float64)
    found = resampled(weights, (3, 4), (6, 2))
    assert torch.equal(found[:first], weights[:first])
    for channel in range(5):
        image = weights[first:, channel].reshape(1, 1, 3, 4)
        expected = F.interpolate(image, size=(6, 2), mode="bicubic", align_corners=False)
        torch.testing.assert_close(found[first:, channel], expected.flatten(), rtol=1e-12, atol=1e-12)
    assert resampled(weights, (3, 4), (3, 4)) is weights
    with pytest.raises(InputError, match="do not fit a grid of 5 x 4"):
        resampled(weights, (5, 4), (6, 2))


def test_bicubic_weights_by_hand() -> None:
    """One axis doubled: new points lie a quarter of a cell from old ones, weights from the cubic kernel with a = -0.75."""

    def cubic(t: float) -> float:
        a, t = -0.75, abs(t)
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    weights = torch.randn(8, 1, dtype=torch.float64)
    found = resampled(weights, (1, 8), (1, 16))[:, 0]
    for index in range(16):
        source = (index + 0.5) / 2 - 0.5
        near = [math.floor(source) + offset for offset in (-1, 0, 1, 2)]
        expected = sum(cubic(source - at) * weights[min(max(at, 0), 7), 0].item() for at in near)
        assert found[index].item() == pytest.approx(expected, abs=1e-12)


def test_learned_positions_are_added_by_patch() -> None:
    table = LearnedGrid((2, 2), 4, 1, 0.5)
    with torch.no_grad():
        table.reset_parameters()
    x = torch.randn(3, 5, 4)
    torch.testing.assert_close(table(x, (2, 2)), x + table.weight)
    assert table(torch.zeros(1, 10, 4), (3, 3)).shape == (1, 10, 4)
