"""Image tokenizers: one code for each patch, and what a code depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.models.image_tokenizer import ImageTokenizer
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig, prime_factors


def tokenizer(**options: Any) -> Any:
    small = {"height": 16, "width": 16, "dim": 8, "codes": 16, "code_dim": 4, "blocks": 1}
    return kl.build_model(ImageTokenizerConfig(**{**small, **options}), seed=1).eval()


@pytest.mark.parametrize(
    ("patch", "height", "width", "grid"), [(4, 32, 32, (8, 8)), (8, 16, 32, (2, 4)), (6, 24, 12, (4, 2)), (1, 5, 3, (5, 3))]
)
def test_there_is_one_code_for_each_patch(patch: int, height: int, width: int, grid: tuple[int, int]) -> None:
    model = tokenizer(patch=patch, height=height, width=width, channels=1)
    images = torch.rand(2, 1, height, width) * 2 - 1
    codes = model.encode(images)
    assert model.grid == grid
    assert codes.shape == (2, grid[0] * grid[1])
    assert codes.dtype == torch.int64
    assert model.decode(codes).shape == images.shape


def test_decoding_the_codes_is_the_reconstruction() -> None:
    model, images = tokenizer(), torch.rand(3, 3, 16, 16) * 2 - 1
    output = model(images)
    assert torch.equal(output.quantized.codes.view(3, -1), model.encode(images))
    torch.testing.assert_close(model.decode(model.encode(images)), output.images.clamp(-1, 1))


def test_a_code_depends_on_the_pixels_around_its_patch() -> None:
    """Other pixels in one patch change the vectors of that patch and of the same number of patches on each side of it."""
    model = tokenizer(blocks=0, height=48, width=40)
    images, others = torch.rand(2, 4, 3, 48, 40, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.inference_mode():
        before = model.encoder(images)
        for row, column in ((0, 0), (5, 3), (11, 9), (6, 9)):
            changed = images.clone()
            here = (..., slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4))
            changed[here] = others[here]
            moved = (model.encoder(changed) != before).any(dim=0).any(dim=0)
            near = [[abs(row - y) <= 1 and abs(column - x) <= 1 for x in range(10)] for y in range(12)]
            assert moved.tolist() == near


def test_the_encoder_learns_through_the_codes() -> None:
    model, images = tokenizer().train(), torch.rand(2, 3, 16, 16) * 2 - 1
    (model(images).images - images).square().mean().backward()
    still = {
        f"{name}.{part}"
        for name, block in model.named_modules()
        if hasattr(block, "conv2")
        for part in ("conv1.weight", "conv1.bias")
    }
    moving = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.abs().sum() > 0}
    assert moving == {name for name, _ in model.named_parameters()} - still  # what follows these starts at 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"patch": 5}, "the height of 16 pixels is not a multiple of patch, 5"),
        ({"codes": 1}, "codes is 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        tokenizer(**options)


def test_input_that_does_not_fit_is_refused() -> None:
    model: ImageTokenizer = tokenizer()
    for images in (torch.zeros(1, 3, 16, 12), torch.zeros(1, 3, 16, 16, dtype=torch.uint8)):
        with pytest.raises(InputError, match="images are"):
            model.encode(images)
    with pytest.raises(InputError, match=r"codes are torch.int64 of shape \[1, 15\]"):
        model.decode(torch.zeros(1, 15, dtype=torch.int64))
    with pytest.raises(InputError, match="out of range"):
        model.decode(torch.full((1, 16), 16))


def test_factors() -> None:
    assert [prime_factors(number) for number in (1, 2, 12, 14, 49)] == [[], [2], [2, 2, 3], [2, 7], [7, 7]]
