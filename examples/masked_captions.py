"""Images and words in one sequence: an encoder with weights for each modality fills in the masked words of a caption.

    python examples/masked_captions.py [--steps 500]

Images show two drawn objects and have captions such as "a red circle above a blue square". In the test, one content word of a
caption is masked. The text alone leaves three or four words to choose from; the image tells which one it is. With the images of
other captions, the accuracy falls to that of guessing.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kilolayer as kl

COLOURS = {"red": (1.0, 0.1, 0.1), "green": (0.1, 0.8, 0.1), "blue": (0.2, 0.2, 1.0), "yellow": (0.9, 0.9, 0.1)}
SHAPES = ("circle", "square", "cross")
RELATIONS = ("left of", "right of", "above", "below")
WORDS = ("<pad>", "<mask>", "a", *COLOURS, *SHAPES, *RELATIONS)
MASK = WORDS.index("<mask>")
CONTENT = torch.tensor([1, 2, 3, 5, 6])  # "a COLOUR SHAPE RELATION a COLOUR SHAPE"
SIDE, PATCH, OBJECT = 16, 4, 7


class Examples(NamedTuple):
    """images: [batch, 3, SIDE, SIDE]. captions: int64 [batch, 7], indices in WORDS."""

    images: Tensor
    captions: Tensor


def draw(count: int, generator: torch.Generator) -> Examples:
    """Images of two different objects, one beside or above the other, and their captions."""

    def choose(below: int) -> Tensor:
        return torch.randint(below, (count,), generator=generator)

    colours, shapes, relations = (choose(4), choose(4)), (choose(3), choose(3)), choose(4)
    same = (colours[0] == colours[1]) & (shapes[0] == shapes[1])
    colours = (colours[0], torch.where(same, (colours[1] + 1) % 4, colours[1]))
    near, far, across = choose(2), SIDE // 2 + choose(2), choose(SIDE - OBJECT)
    first_is_near = (relations == 0) | (relations == 2)  # left of, above
    along = (torch.where(first_is_near, near, far), torch.where(first_is_near, far, near))
    vertical = relations >= 2
    images = torch.ones(count, 3, SIDE, SIDE)
    for colour, shape, position in zip(colours, shapes, along, strict=True):
        top, left = torch.where(vertical, position, across), torch.where(vertical, across, position)
        outline = shifted(outlines()[shape], top, left)
        images = torch.where(outline[:, None], torch.tensor([*COLOURS.values()])[colour][:, :, None, None], images)
    words = (
        torch.full((count,), 2),
        3 + colours[0],
        7 + shapes[0],
        10 + relations,
        torch.full((count,), 2),
        3 + colours[1],
        7 + shapes[1],
    )
    return Examples(images, torch.stack(words, dim=1))


def outlines() -> Tensor:
    """The filled shapes: bool [SHAPES, OBJECT, OBJECT]."""
    y, x = torch.meshgrid(torch.arange(OBJECT) - OBJECT // 2, torch.arange(OBJECT) - OBJECT // 2, indexing="ij")
    return torch.stack([x**2 + y**2 <= 10, (x.abs() <= 3) & (y.abs() <= 3), (x.abs() <= 1) | (y.abs() <= 1)])


def shifted(outline: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Shapes at their positions in an image: bool [batch, OBJECT, OBJECT] to [batch, SIDE, SIDE]."""
    index = torch.arange(SIDE)
    rows, columns = index - top[:, None], index - left[:, None]
    inside = (rows >= 0) & (rows < OBJECT), (columns >= 0) & (columns < OBJECT)
    batch = torch.arange(len(outline))[:, None, None]
    found = outline[batch, rows.clamp(0, OBJECT - 1)[:, :, None], columns.clamp(0, OBJECT - 1)[:, None, :]]
    return found & inside[0][:, :, None] & inside[1][:, None, :]


class CaptionModel(nn.Module):
    """Patches, then words, in one sequence; `multiway` gives each of the two its own norms and projections."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * PATCH * PATCH, 64)
        self.encoder = kl.Encoder(
            len(WORDS), 64, 4, 128, 2, "pre_ln", multiway=2, positions="learned", max_length=(SIDE // PATCH) ** 2
        )

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Logits of the words: [batch, 7, WORDS]."""
        patches = self.patches(F.unfold(images, PATCH, stride=PATCH).transpose(1, 2))
        logits = self.encoder(words, embeddings=patches).logits
        assert logits is not None
        return logits[:, patches.shape[1] :]


def masked(captions: Tensor, generator: torch.Generator, p: float = 0.4) -> Tensor:
    """Which words are masked: one content word of each caption, and each other one with probability p."""
    chosen = CONTENT[torch.randint(len(CONTENT), (len(captions), 1), generator=generator)]
    drawn = torch.rand(captions.shape, generator=generator) < p
    return (drawn & torch.isin(torch.arange(captions.shape[1]), CONTENT)).scatter(1, chosen, True)


@torch.no_grad()
def accuracy(model: CaptionModel, test: Examples, hidden: Tensor, images: Tensor) -> float:
    """The share of masked words that the model fills in correctly with these images."""
    guesses = model(images, test.captions.masked_fill(hidden, MASK)).argmax(-1)
    return float((guesses == test.captions)[hidden].double().mean())


def train(steps: int, rows: int = 64, seed: int = 0) -> tuple[float, float]:
    """Train and test: the accuracy on masked words with their images, and with those of other captions."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = CaptionModel()
    optimizer = torch.optim.AdamW(kl.parameter_groups(model, lr=3e-3, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for _ in range(steps):
        images, captions = draw(rows, generator)
        hidden = masked(captions, generator)
        loss = F.cross_entropy(model(images, captions.masked_fill(hidden, MASK))[hidden], captions[hidden])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    test = draw(1000, torch.Generator().manual_seed(seed + 1))
    hidden = masked(test.captions, torch.Generator().manual_seed(seed + 2), p=0)
    return accuracy(model, test, hidden, test.images), accuracy(model, test, hidden, test.images.roll(1, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill in the masked words of captions from drawn images.")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    with_image, with_another = train(options.steps)
    print(f"masked words right: {with_image:.1%} with the image, {with_another:.1%} with the image of another caption")
    print(f"({options.steps} steps, {time.perf_counter() - start:.0f} s; guessing from the text alone: about 28%)")


if __name__ == "__main__":
    main()
