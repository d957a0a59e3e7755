"""Augmentation against loops with Pillow and numpy, its draws, and its independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from kilolayer.data.augment import (
    ERASED,
    FLIP,
    LEFT,
    TOP,
    Augment,
    AugmentConfig,
    coordinates,
    gathered,
    sampled,
)
from kilolayer.data.image_draws import beta_quantiles, uniform
from kilolayer.data.images import normalized
from kilolayer.data.randaugment import OPERATIONS, apply, randaugment
from kilolayer.errors import OptionError

ROWS, SIDE = 28, 16


def images(rows: int = ROWS, side: int = SIDE, seed: int = 0) -> torch.Tensor:
    """Smooth random images with a range of levels that differs between them: uint8 [rows, 3, side, side]."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(0, 255, (rows, 4, 4, 3)) * rng.uniform(0.4, 1, (rows, 1, 1, 1))
    resized = [
        np.asarray(Image.fromarray(each.astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)) for each in coarse
    ]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).contiguous()


def keys(rows: int = ROWS, epoch: int = 0, first: int = 0) -> torch.Tensor:
    return torch.stack([torch.arange(first, first + rows), torch.full((rows,), epoch)], dim=1)


def as_image(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy().astype(np.uint8))


def as_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float()


def splitmix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def test_draws_are_hashes_of_seed_image_epoch_and_number() -> None:
    found = uniform(7, torch.tensor([[5, 2], [123456789, 0]]), 3, first=4)
    golden, spread = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
    for row, (image, epoch) in enumerate([(5, 2), (123456789, 0)]):
        for column, number in enumerate([4, 5, 6]):
            start = splitmix((image * golden + splitmix((7 * spread + golden) % 2**64)) % 2**64)
            hashed = splitmix((splitmix((start + epoch * spread) % 2**64) + number * golden) % 2**64)
            assert found[row, column].item() == (hashed >> 40) / 2**24


def test_draws_are_uniform_and_independent() -> None:
    found = uniform(0, keys(20_000), 4).double()
    assert (found.mean(dim=0) - 0.5).abs().max() < 4 * math.sqrt(1 / 12 / 20_000)
    assert (found.var(dim=0) - 1 / 12).abs().max() < 0.002
    others = [
        found[:, 1],
        found[1:, 0],
        uniform(1, keys(20_000), 1)[:, 0].double(),
        uniform(0, keys(20_000, 1), 1)[:, 0].double(),
    ]
    for other in others:
        assert torch.corrcoef(torch.stack([found[: len(other), 0], other]))[0, 1].abs() < 4 / math.sqrt(20_000)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_quantiles_of_the_beta_distribution(alpha: float) -> None:
    scipy = pytest.importorskip("scipy.stats")
    expected = scipy.beta(alpha, alpha).ppf((np.arange(4096) + 0.5) / 4096)
    np.testing.assert_allclose(beta_quantiles(alpha).numpy(), expected, atol=2e-4)


def test_pad_and_flip_against_a_loop() -> None:
    pixels, config = images(), AugmentConfig(pad=3)
    augment = Augment(config, 1)
    draws = augment.draws(keys())
    found = augment.moved(pixels, draws)
    for row, (image, draw) in enumerate(zip(pixels, draws, strict=True)):
        padded = np.pad(image.numpy(), ((0, 0), (3, 3), (3, 3)))
        top, left = (int(draw[each] * 7) for each in (TOP, LEFT))
        cut = padded[:, top : top + SIDE, left : left + SIDE]
        assert np.array_equal(found[row], cut[:, :, ::-1] if draw[FLIP] < 0.5 else cut)
    assert 0 < (draws[:, FLIP] < 0.5).sum() < ROWS


def test_resized_crops_against_pillow() -> None:
    """Pillow's affine transform reads an image at the same places; it fills beyond the border, so that is left out."""
    pixels, config = images(), AugmentConfig(crop="resized", scale=0.2, ratio=2.0, flip=False)
    draws = Augment(config, 1).draws(keys())
    rows, columns = coordinates(config, draws, SIDE, SIDE)
    found = sampled(pixels, rows, columns)
    for row in range(ROWS):
        tall, wide = ((rows, columns)[axis][row].diff()[0].item() for axis in (0, 1))
        top, left = rows[row, 0].item() + 0.5 - tall / 2, columns[row, 0].item() + 0.5 - wide / 2
        assert 0.2 - 1e-3 < tall * wide <= 1 + 1e-4 or max(tall, wide) > 0.999
        assert -1e-3 < top < SIDE * (1 - tall) + 1e-3
        there = as_image(pixels[row]).transform(
            (SIDE, SIDE), Image.Transform.AFFINE, (wide, 0, left, 0, tall, top), Image.Resampling.BILINEAR
        )
        assert (as_pixels(there) - found[row])[:, 1:-1, 1:-1].abs().max() <= 1


def test_labels_of_pixels_are_gathered_by_the_nearest() -> None:
    ids = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    found = gathered(ids, torch.tensor([[-1.0, 0.4, 0.6, 4.0]]), torch.tensor([[3.0, 2.0, 1.0, 0.0]]), 255)
    assert found[0, 0].tolist() == [[255] * 4, [3, 2, 1, 0], [7, 6, 5, 4], [255] * 4]


def expected_operation(name: str, image: Image.Image, strength: float) -> Image.Image:
    factor = 1 + 0.9 * strength
    size, (dx, dy) = image.size, ((image.size[0] - 1) / 2 + 0.5, (image.size[1] - 1) / 2 + 0.5)
    sine, cosine = math.sin(math.radians(30 * strength)), math.cos(math.radians(30 * strength))
    linear = {
        "rotate": (cosine, -sine, sine, cosine),
        "shear_x": (1, 0.3 * strength, 0, 1),
        "shear_y": (1, 0, 0.3 * strength, 1),
    }.get(name, (1, 0, 0, 1))
    shift = 0.45 * strength * size[0]
    x, y = shift if name == "translate_x" else 0, shift if name == "translate_y" else 0
    a, b, c, d = linear
    matrix = (a, b, dx - a * dx - b * dy + x, c, d, dy - c * dx - d * dy + y)
    plain = {
        "identity": lambda: image,
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "solarize": lambda: ImageOps.solarize(image, int(256 * (1 - abs(strength)))),
        "posterize": lambda: ImageOps.posterize(image, 8 - int(4 * abs(strength))),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
    }
    if name in plain:
        return plain[name]()
    return image.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=(128, 128, 128))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("strength", [0.5, -0.75])
def test_operations_against_pillow(name: str, strength: float) -> None:
    """Within a level, where the order of roundings differs; at borders Pillow does not mix with the filling."""
    pixels = images()
    found = apply(pixels.float(), torch.full((ROWS,), OPERATIONS.index(name)), torch.full((ROWS,), strength))
    expected = torch.stack([as_pixels(expected_operation(name, as_image(each), strength)) for each in pixels])
    apart = (found - expected).abs()
    if name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        assert (apart <= 1).float().mean() > 0.85
        assert apart[..., 5:-5, 5:-5].max() <= 1 or name.startswith("translate")
    else:
        assert apart.max() <= (1 if name in ("color", "contrast", "brightness", "sharpness", "autocontrast") else 0)


def test_each_image_gets_its_own_operations() -> None:
    pixels, draws = images().float(), uniform(3, keys(), 4).view(ROWS, 2, 2)
    found = randaugment(pixels, draws, 7.0)
    for row in range(ROWS):
        one = pixels[row : row + 1]
        for which, direction in draws[row]:
            number = torch.tensor([int(which * len(OPERATIONS))])
            one = apply(one, number, torch.tensor([0.7 if direction >= 0.5 else -0.7]))
        assert torch.equal(one[0], found[row])
    assert {int(each * len(OPERATIONS)) for each in uniform(3, keys(2000), 1)[:, 0]} == set(range(len(OPERATIONS)))


FULL = AugmentConfig(crop="resized", randaugment=2, erasing=0.5)


@pytest.mark.parametrize("config", [AugmentConfig(), FULL])
def test_the_same_image_in_any_batch(config: AugmentConfig) -> None:
    pixels, labels, augment = images(), torch.zeros(ROWS, dtype=torch.int64), Augment(config, 5)
    whole, _ = augment(pixels, labels, keys())
    parts = [augment(pixels[at : at + 5], labels[at : at + 5], keys()[at : at + 5])[0] for at in range(0, ROWS, 5)]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(pixels[order], labels, keys()[order])[0], whole[order])
    assert torch.equal(Augment(config, 5)(pixels, labels, keys())[0], whole)
    for other in (Augment(config, 6)(pixels, labels, keys())[0], augment(pixels, labels, keys(epoch=1))[0]):
        assert (other != whole).flatten(1).any(dim=1).float().mean() > 0.9


def test_nothing_is_changed_without_options() -> None:
    pixels, labels = images(), torch.arange(ROWS)
    found, same = Augment(AugmentConfig(crop="none", flip=False), 0)(pixels, labels, keys())
    assert torch.equal(found, normalized(pixels))
    assert torch.equal(same, labels)


def test_half_of_the_images_are_flipped() -> None:
    pixels = torch.zeros(4000, 1, 1, 2, dtype=torch.uint8)
    pixels[..., 1] = 255
    found, _ = Augment(AugmentConfig(crop="none"), 0)(pixels, torch.zeros(4000), keys(4000))
    assert abs((found[:, 0, 0, 0] > 0).float().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(4000)


def test_erasing() -> None:
    rows = 1000
    pixels = torch.full((rows, 3, SIDE, SIDE), 100, dtype=torch.uint8)
    config = AugmentConfig(crop="none", flip=False, erasing=0.3)
    augment = Augment(config, 2)
    found, _ = augment(pixels, torch.zeros(rows), keys(rows))
    changed = (found != normalized(pixels)).any(dim=1)
    erased = changed.flatten(1).any(dim=1)
    assert torch.equal(erased, augment.draws(keys(rows))[:, ERASED] < 0.3)
    assert abs(erased.float().mean().item() - 0.3) < 4 * math.sqrt(0.21 / rows)
    for each in changed[erased][:200]:
        tall, wide = each.any(dim=1).nonzero().flatten(), each.any(dim=0).nonzero().flatten()
        box = each[tall[0] : tall[-1] + 1, wide[0] : wide[-1] + 1]
        assert box.all()  # a rectangle
        assert 0.005 < box.numel() / SIDE**2 < 0.4
    noise = found[erased][changed[erased][:, None].expand(-1, 3, -1, -1)]
    assert noise.min() >= -1
    assert noise.max() < 1
    assert abs(noise.mean()) < 0.02
    assert abs(noise.var() - 1 / 3) < 0.02


def mixing(**options: float) -> Augment:
    return Augment(AugmentConfig(crop="none", flip=False, **options), 4, classes=5)


def filled(rows: int = ROWS, empty: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, the last ones only filling up, and labels that are -1 there."""
    pixels, labels = images(rows), torch.arange(rows) % 5
    pixels[rows - empty :], labels[rows - empty :] = 0, -1
    return pixels, labels


def test_mixup_is_a_mean_of_images_and_of_labels() -> None:
    pixels, labels = filled()
    found, shares = mixing(mixup=0.8)(pixels, labels, keys())
    clean, real = normalized(pixels), ROWS - 3
    assert torch.equal(shares[real:], torch.zeros(3, 5))
    torch.testing.assert_close(shares[:real].sum(dim=1), torch.ones(real))
    fits = []
    for distance in range(1, real):  # all images are mixed with the one at the same distance
        theirs = clean[[(row + distance) % real for row in range(real)]]
        apart = (clean[:real] - theirs).flatten(1)
        kept = ((found[:real] - theirs).flatten(1) * apart).sum(1) / apart.square().sum(1)
        if (theirs + kept.view(-1, 1, 1, 1) * (clean[:real] - theirs) - found[:real]).abs().max() < 1e-5:
            other = labels[[(row + distance) % real for row in range(real)]]
            own = torch.nn.functional.one_hot(labels[:real], 5) * kept[:, None]
            expected = own + torch.nn.functional.one_hot(other, 5) * (1 - kept)[:, None]
            torch.testing.assert_close(shares[:real], expected, atol=1e-4, rtol=0)
            fits.append(distance)
    assert len(fits) == 1


def test_cutmix_replaces_a_rectangle_and_its_share_of_the_label() -> None:
    rows = 400
    pixels, labels = filled(rows)
    labels[: rows - 3] = torch.arange(rows - 3) % 5
    found, shares = mixing(cutmix=1.0)(pixels, labels, keys(rows))
    clean = normalized(pixels)
    areas = []
    for row in range(rows - 3):
        changed = (found[row] != clean[row]).any(dim=0)
        areas.append(changed.float().mean().item())
        if not changed.any():
            continue
        tall, wide = changed.any(dim=1).nonzero().flatten(), changed.any(dim=0).nonzero().flatten()
        box = changed[tall[0] : tall[-1] + 1, wide[0] : wide[-1] + 1]
        share = 1 - shares[row, labels[row]].item()
        if share > 0:  # the other label differs
            assert box.numel() / SIDE**2 == pytest.approx(share, abs=0.07)
            assert shares[row].sum().item() == pytest.approx(1)
    assert 0.15 < np.mean(areas) < 0.45  # a mean of 1/2, cut off at the border
    assert torch.equal(found[rows - 3 :], clean[rows - 3 :])


def test_mixup_and_cutmix_share_the_images() -> None:
    pixels, labels = filled(400, 0)
    _, soft = mixing(mixup=1.0, cutmix=1.0, mixed=0.5)(pixels, labels, keys(400))
    untouched = (soft.max(dim=1).values == 1).float().mean().item()
    assert 0.4 < untouched < 0.75  # half, those whose partner has the same label, and empty cuts
    one, shares = mixing(mixup=1.0)(pixels[:1], labels[:1], keys(1))
    assert torch.equal(one, normalized(pixels[:1]))  # there is no other image
    assert shares.sum() == 1


def test_options_without_effect() -> None:
    for wrong in ({"crop": "none", "pad": 2}, {"scale": 0.5}, {"ratio": 2.0}, {"magnitude": 5.0}, {"mixed": 0.5}):
        with pytest.raises(OptionError, match="has no effect without"):
            AugmentConfig(**wrong)
    with pytest.raises(OptionError, match="need labels"):
        Augment(AugmentConfig(mixup=1.0), 0)
    assert not AugmentConfig().mixes
