"""examples/masked_captions.py: what it draws, and that it learns to read it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples/masked_captions.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("masked_captions", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def centre(image: Tensor, colour: tuple[float, ...]) -> tuple[float, float] | None:
    """The mean row and column of a colour in an image [3, height, width]; None if it is not there."""
    found = (image == torch.tensor(colour)[:, None, None]).all(dim=0).nonzero().double()
    return tuple(found.mean(dim=0).tolist()) if len(found) else None


def test_captions_say_what_is_drawn(example: Any) -> None:
    images, captions = example.draw(200, torch.Generator().manual_seed(0))
    sizes: dict[str, set[int]] = {}
    for image, caption in zip(images, captions, strict=True):
        first_a, colour, shape, relation, second_a, other, other_shape = (example.WORDS[word] for word in caption)
        assert first_a == second_a == "a"
        assert (colour, shape) != (other, other_shape)
        drawn = {name for name, value in example.COLOURS.items() if centre(image, value) is not None}
        assert drawn == {colour, other}
        if colour == other:
            continue
        first, second = centre(image, example.COLOURS[colour]), centre(image, example.COLOURS[other])
        assert first is not None
        assert second is not None
        axis = 0 if relation in ("above", "below") else 1
        assert (first[axis] < second[axis]) == (relation in ("above", "left of"))
        count = int((image == torch.tensor(example.COLOURS[colour])[:, None, None]).all(dim=0).sum())
        sizes.setdefault(shape, set()).add(count)
    assert {shape: max(counts) for shape, counts in sizes.items()} == {"circle": 37, "square": 49, "cross": 33}


def test_content_words_alone_are_masked(example: Any) -> None:
    captions = example.draw(100, torch.Generator().manual_seed(0)).captions
    one = example.masked(captions, torch.Generator().manual_seed(1), p=0)
    assert (one.sum(dim=1) == 1).all()
    assert not one[:, [0, 4]].any()
    assert one.any(dim=0).tolist() == [False, True, True, True, False, True, True]


def test_some_steps(example: Any) -> None:
    assert all(0 <= share <= 1 for share in example.train(2, rows=4))


@pytest.mark.slow
def test_words_are_read_from_the_image(example: Any) -> None:
    with_image, with_another = example.train(500)
    assert with_image > 0.75
    assert 0.2 < with_another < 0.36
