"""Segmentation of images of other sizes than the run's: maps at each image's own size."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kilolayer as kl
from kilolayer.data.image_decoding import decode
from kilolayer.data.images import normalized
from kilolayer.tasks.segment import tiles
from kilolayer.tasks.segment.tiles import resampled_classes, segment_tiled, spans

SIDES = (16, 24)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(3)


def model_of(channels: int) -> Any:
    torch.manual_seed(0)
    head: Any = {"kind": "linear", "classes": 5, "dropout": 0.0}
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
    built = kl.ImageEncoder(kl.ImageInput(size="16x24", patch=4, channels=channels), **sizes, map_head=head)
    with torch.no_grad():
        for weight in built.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return built.eval()


def picture(height: int, width: int, channels: int = 3) -> np.ndarray:
    """A smooth image, which scaling changes little."""
    rows, columns = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(7 * (rows * (1 + each) + columns * (2 - each)) + each) for each in range(channels)]
    return ((np.stack(waves, axis=-1) + 1) * 127).astype(np.uint8)


def scores_of(model: Any, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(normalized(torch.tensor(pixels).permute(2, 0, 1)[None])).logits[0].double().numpy()


def bilinear(scores: np.ndarray, y: float, x: float) -> np.ndarray:
    """Scores [classes, height, width] at a point, where a pixel's center is at its index and a half; borders go on."""
    found = np.zeros(len(scores))
    for row, down in ((int(np.floor(y - 0.5)), 1 - (y - 0.5) % 1), (int(np.floor(y - 0.5)) + 1, (y - 0.5) % 1)):
        for column, across in ((int(np.floor(x - 0.5)), 1 - (x - 0.5) % 1), (int(np.floor(x - 0.5)) + 1, (x - 0.5) % 1)):
            inside = min(max(row, 0), scores.shape[1] - 1), min(max(column, 0), scores.shape[2] - 1)
            found += down * across * scores[:, *inside]
    return found


def agreement(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float((found == expected).mean())


@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_of_the_runs_size_has_the_classes_of_its_scores(channels: int) -> None:
    model, image = model_of(channels), picture(*SIDES, channels)
    (found,) = segment_tiled(model, [image], SIDES, 4)
    assert agreement(found, scores_of(model, image).argmax(axis=0)) > 0.995  # but for ties
    assert len(np.unique(found)) > 1


@pytest.mark.parametrize("size", [(40, 60), (8, 12), (33, 49)])
def test_an_image_of_the_same_ratio_has_the_scores_of_what_the_data_pipeline_makes_of_it(
    model: Any, size: tuple[int, int]
) -> None:
    image, file = picture(*size), io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    prepared, _ = decode(file.getvalue(), 3, SIDES)
    assert prepared is not None
    scores = scores_of(model, prepared)
    expected = [
        [bilinear(scores, (row + 0.5) * 16 / size[0], (column + 0.5) * 24 / size[1]).argmax() for column in range(size[1])]
        for row in range(size[0])
    ]
    (found,) = segment_tiled(model, [image], SIDES, 4)
    assert agreement(found, np.array(expected)) > 0.99


@pytest.mark.parametrize("turned", [False, True])
def test_an_image_of_another_ratio_is_read_in_tiles_without_distortion(model: Any, turned: bool) -> None:
    height, width = (80, 24) if turned else (16, 72)
    image = picture(height, width)
    (found,) = segment_tiled(model, [image], SIDES, 2)
    expected = np.zeros((height, width), np.int64)
    # As high or as wide as the image, 16 x 24 pixels, from one border to the other, at most half a tile apart.
    starts = np.linspace(0, height - 16, 9) if turned else np.linspace(0, width - 24, 5)
    tile = 16 if turned else 24
    centers = starts + tile / 2
    assert np.array_equal(starts, starts.round())
    for index in range(height if turned else width):
        start = int(starts[np.abs(centers - index - 0.5).argmin()])
        scores = scores_of(model, image[start : start + tile] if turned else image[:, start : start + tile])
        line = scores[:, index - start] if turned else scores[:, :, index - start]
        expected[index if turned else slice(None), slice(None) if turned else index] = line.argmax(axis=0)
    assert agreement(found, expected) > 0.995


@pytest.mark.parametrize("length", range(1, 60, 3))
@pytest.mark.parametrize("tile", [0.4, 1.0, 7.3, 24.0])
def test_spans_cover_everything_once_and_have_their_middle(length: int, tile: float) -> None:
    tile = min(tile, length)
    found = spans(length, tile, tile / 24)
    assert [each for span in found for each in span.own] == list(range(length))
    assert all(0 <= each.start < each.end <= length for each in found)
    for each in found:
        assert each.start <= each.own.start + 0.5 <= each.end
        assert each.start <= each.own.stop - 0.5 <= each.end
        margin = tile / 4 - 1
        assert each.own.start == 0 or each.own.start - each.start >= margin
        assert each.own.stop == length or each.end - each.own.stop >= margin


def test_images_of_many_sizes_are_what_they_are_alone(model: Any) -> None:
    images = [picture(*size) for size in ((16, 24), (1, 90), (90, 1), (3, 2), (50, 50), (17, 24))]
    for image, found in zip(images, segment_tiled(model, images, SIDES, 3), strict=True):
        (alone,) = segment_tiled(model, [image], SIDES, 64)
        assert found.shape == image.shape[:2]
        assert agreement(found, alone) > 0.99


def test_a_large_image_is_resampled_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, (down,), (across,) = torch.randn(5, 16, 24), spans(64, 64, 4), spans(96, 96, 4)
    ((_, whole),) = resampled_classes(scores, down, across)
    monkeypatch.setattr(tiles, "AT_ONCE", 5 * 96 * 7)
    parts = list(resampled_classes(scores, down, across))
    assert [first for first, _ in parts] == list(range(0, 64, 7))
    assert np.array_equal(np.concatenate([part for _, part in parts]), whole)
