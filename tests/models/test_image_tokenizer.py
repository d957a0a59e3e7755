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


def test_a_code_is_at_the_place_of_its_patch() -> None:
    """Other pixels in one patch change the vector of that patch the most, row by row."""
    model = tokenizer(blocks=0, height=32, width=24)
    images, others = torch.rand(2, 32, 3, 32, 24, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.inference_mode():
        before = model.encoder(images)
        for row in range(8):
            for column in range(6):
                changed = images.clone()
                here = (..., slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4))
                changed[here] = others[here]
                difference = (model.encoder(changed) - before).square().sum(dim=(0, 1))
                assert int(difference.argmax()) == 6 * row + column


def test_the_encoder_learns_through_the_codes() -> None:
    model, images = tokenizer().train(), torch.rand(2, 3, 16, 16) * 2 - 1
    (model(images).images - images).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


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
