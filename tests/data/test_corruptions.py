"""Corruptions of images: their definitions, their strengths, and their independence of the batch."""

from __future__ import annotations

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from kilolayer.data.corruptions import CORRUPTIONS, NAMES, STRENGTHS, Draws, blurred, corrupt, sketch
from kilolayer.errors import InputError, OptionError

ROWS = 24


def images(rows: int = ROWS, side: int = 32, seed: int = 0) -> torch.Tensor:
    """Smooth random images with detail: uint8 [rows, 3, side, side]."""
    rng = np.random.default_rng(seed)
    coarse = (rng.uniform(40, 215, (rows, side // 4 + 3, side // 4 + 3, 3))).astype(np.uint8)
    large = np.stack([np.asarray(Image.fromarray(each).resize((side, side), Image.Resampling.BICUBIC)) for each in coarse])
    detailed = (large + rng.normal(0, 5, large.shape)).clip(0, 255).astype(np.uint8)
    return torch.from_numpy(detailed).permute(0, 3, 1, 2).contiguous()


def test_fifteen_in_four_groups() -> None:
    assert len(NAMES) == len(set(NAMES)) == 15
    assert list(CORRUPTIONS) == ["noise", "blur", "weather", "digital"]


@pytest.mark.parametrize("name", NAMES)
def test_every_corruption(name: str) -> None:
    clean = images()
    found = {strength: corrupt(clean, name, strength, seed=3) for strength in STRENGTHS}
    apart = [(each.float() - clean.float()).square().mean().sqrt().item() for each in found.values()]
    assert apart == sorted(set(apart)), "a higher strength is further from the image"
    assert apart[0] > 0.5
    assert found[3].dtype == torch.uint8
    assert found[3].shape == clean.shape
    assert torch.equal(corrupt(clean, name, 3, seed=3), found[3])
    assert torch.equal(corrupt(clean[5:], name, 3, seed=3, first=5), found[3][5:])
    drawn = name not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg")
    assert torch.equal(corrupt(clean, name, 3, seed=4), found[3]) != drawn
    for odd in (clean[:2, :1], images(2, 48)[..., :40]):
        assert corrupt(odd, name, 2).shape == odd.shape


def test_draws_never_reach_0_or_1() -> None:
    """A draw that is rounded to 1 gives no Poisson number; image 6,079 of any set has one."""
    found = corrupt(torch.full((1, 3, 32, 32), 200, dtype=torch.uint8), "shot_noise", 1, first=6079)
    assert found.float().mean() == pytest.approx(200, abs=5)
    some = torch.cat([Draws(0, torch.tensor([[image, 1]])).uniform(10**6) for image in range(60)])
    assert some.min() > 0
    assert some.max() < 1


def test_noise() -> None:
    clean = torch.full((40, 3, 32, 32), 128, dtype=torch.uint8)
    for strength, deviation in zip(STRENGTHS, (0.04, 0.06, 0.08, 0.09, 0.1), strict=True):
        found = corrupt(clean, "gaussian_noise", strength).double() / 255
        assert found.mean().item() == pytest.approx(128 / 255, abs=1e-3)
        assert found.std().item() == pytest.approx(deviation, rel=0.02)
    for strength, photons in zip(STRENGTHS, (500, 250, 100, 75, 50), strict=True):
        found = corrupt(clean, "shot_noise", strength).double() / 255
        assert found.mean().item() == pytest.approx(128 / 255, abs=2e-3)
        assert found.var().item() == pytest.approx(128 / 255 / photons, rel=0.03)
    for strength, share in zip(STRENGTHS, (0.01, 0.02, 0.03, 0.05, 0.07), strict=True):
        found = corrupt(clean, "impulse_noise", strength)
        for level in (0, 255):
            assert (found == level).double().mean().item() == pytest.approx(share / 2, rel=0.1)
    assert corrupt(torch.zeros_like(clean), "shot_noise", 5).max() == 0


def test_contrast_brightness_and_jpeg_against_loops() -> None:
    clean = images(3)
    for strength in STRENGTHS:
        factor, more = (0.75, 0.5, 0.4, 0.3, 0.15)[strength - 1], (0.05, 0.1, 0.15, 0.2, 0.3)[strength - 1]
        paler, brighter, coded = (corrupt(clean, name, strength) for name in ("contrast", "brightness", "jpeg"))
        for row in range(3):
            levels = clean[row].numpy() / 255
            mean = levels.mean(axis=(1, 2), keepdims=True)
            assert abs((levels - mean) * factor + mean - paler[row].numpy() / 255).max() < 0.0021
            for y, x in ((0, 0), (5, 9), (31, 30)):
                hue, saturation, value = colorsys.rgb_to_hsv(*levels[:, y, x])
                expected = colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1.0))
                assert abs(np.array(expected) - brighter[row, :, y, x].numpy() / 255).max() < 0.004
            stream = io.BytesIO()
            Image.fromarray(clean[row].permute(1, 2, 0).numpy()).save(
                stream, "JPEG", quality=(80, 65, 58, 50, 40)[strength - 1]
            )
            assert np.array_equal(np.asarray(Image.open(stream)), coded[row].permute(1, 2, 0))


def test_pixelate_against_pillow() -> None:
    clean = images(3)
    for strength, cells in zip(STRENGTHS, (30, 28, 27, 24, 20), strict=True):
        found = corrupt(clean, "pixelate", strength)
        for row in range(3):
            small = Image.fromarray(clean[row].permute(1, 2, 0).numpy()).resize((cells, cells), Image.Resampling.BOX)
            expected = np.asarray(small.resize((32, 32), Image.Resampling.NEAREST)).astype(int)
            assert abs(expected - found[row].permute(1, 2, 0).numpy()).max() <= 1


def test_blurs_keep_the_mean_and_lose_detail() -> None:
    clean = images()
    for name in CORRUPTIONS["blur"]:
        for strength in STRENGTHS:
            found = corrupt(clean, name, strength).float()
            assert (found.mean(dim=(1, 2, 3)) - clean.float().mean(dim=(1, 2, 3))).abs().max() < 6
            if name != "glass_blur":
                assert found.diff(dim=3).abs().mean() < clean.float().diff(dim=3).abs().mean()
    smooth = blurred(clean.float(), 1.5)
    for row in range(3):
        expected = Image.fromarray(clean[row].permute(1, 2, 0).numpy()).filter(ImageFilter.GaussianBlur(1.5))
        apart = smooth[row].permute(1, 2, 0).numpy() - np.asarray(expected).astype(float)
        assert abs(apart[4:-4, 4:-4]).max() < 4  # Pillow approximates the Gaussian by boxes


def test_a_horizontal_motion_leaves_columns_apart() -> None:
    """One bright column spreads along the direction of motion, and not against it."""
    clean = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    clean[..., 16] = 255
    found = corrupt(clean, "motion_blur", 3).float()[:, 0, 8:-8].mean(dim=(0, 1))
    assert found[17:].sum() < 5
    assert (found[12:16] > 5).all()


def test_sketch_is_dark_at_edges_and_white_elsewhere() -> None:
    pixels = torch.full((2, 3, 32, 32), 60, dtype=torch.uint8)
    pixels[1, :, 8:24, 8:24] = 200
    found = sketch(pixels)
    assert found.dtype == torch.uint8
    assert found[0].min() > 200
    assert found[1, :, 0:5].min() > 240
    assert found[1, :, 12:20, 12:20].min() > 240
    assert found[1, :, 16, 7:9].max() < 60
    assert torch.equal(found[:, 0], found[:, 2])
    assert sketch(pixels[:, :1]).shape == (2, 1, 32, 32)


def test_wrong_names_and_strengths() -> None:
    with pytest.raises(OptionError, match="did you mean 'snow'"):
        corrupt(images(1), "sno", 1)
    with pytest.raises(InputError, match="must be 1, 2, 3, 4 or 5"):
        corrupt(images(1), "snow", 0)
