"""What a masked image model predicts of hidden patches, and how well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kilolayer.data.image_batches import in_order
from kilolayer.data.image_masks import ImageMasks
from kilolayer.data.image_set import ImageSet
from kilolayer.data.images import normalized
from kilolayer.evaluate.likelihood import TextScore
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import states_at
from kilolayer.models.image_encoder import ImageEncoder
from kilolayer.models.outputs import EncoderOutput
from kilolayer.runtime.recorder import Recorder, evaluating
from kilolayer.tasks.masked_image.targets import Target

HELD_OUT = 0
"""The seed of masks that never change, whatever the seed of the run."""


@dataclass(frozen=True)
class MaskedImageScores:
    """loss: the mean of `patches` hidden patches. score: the mean of the target's own score."""

    loss: float
    score: float
    patches: int
    target: Target

    @property
    def quality(self) -> float:
        """For choosing a checkpoint: larger is better."""
        return -self.loss

    def metrics(self) -> dict[str, Any]:
        """The values for metrics.jsonl."""
        return {"loss": self.loss, self.target.key: self.score}

    def scores(self, signature: str) -> dict[str, TextScore]:
        """The scores for scores.json."""
        target, signature = self.target, f"{signature}|masked:{self.patches}"
        return {
            "loss": TextScore(target.loss_title, self.loss, signature),
            target.key: TextScore(target.title, self.score, signature, digits=target.digits),
        }

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, {self.target.title} {self.score:.{self.target.digits}f}"


def inputs_of(images: Tensor, order: Tensor, count: int, *, has_decoder: bool) -> Mapping[str, Tensor]:
    """The model's inputs. order: int64 [rows, patches], the visible patches, then the `count` hidden ones.

    With a decoder, only the visible patches are read; without one, the mask token takes the place of the others.
    """
    visible, hidden = order[:, :-count], order[:, -count:]
    if has_decoder:
        return {"images": images, "visible": visible}
    masked = torch.zeros_like(order, dtype=torch.bool).scatter(1, hidden, value=True)
    return {"images": images, "masked": masked, "positions": hidden}


def predict(
    model: ImageEncoder, images: Tensor, order: Tensor, count: int, *, hidden_states: bool = False
) -> tuple[Tensor, EncoderOutput]:
    """The outputs at hidden patches [rows, count, outputs], and all that the model returns; the arguments of `inputs_of`."""
    has_decoder = model.decoder is not None
    out = model(**inputs_of(images, order, count, has_decoder=has_decoder), hidden_states=hidden_states)
    assert out.logits is not None
    return states_at(out.logits, order[:, -count:]) if has_decoder else out.logits, out


@torch.inference_mode()
def measure(
    model: ImageEncoder,
    target: Target,
    masks: ImageMasks,
    images: ImageSet,
    rows: int,
    most: int | None = None,
    recorder: Recorder | None = None,
) -> MaskedImageScores:
    """The scores of images, or of `most` from all over the set. rows: images per batch. recorder: runs the forward pass."""
    count = masks.count

    def work(pixels: Tensor, keys: Tensor) -> Tensor:
        originals, order = normalized(pixels), masks(keys)
        hidden = order[:, -count:]
        labels = target.labels(originals, hidden)
        outputs, _ = predict(model, originals, order, count)
        found = target.losses(outputs, labels), target.measure(outputs, labels, originals, hidden)
        return torch.stack([each.double().sum(dim=1) for each in found])

    sums, read = [0.0, 0.0], 0
    with evaluating(model, work, recorder) as run:
        for members, batch in in_order(images, rows, most):
            found = run(batch.pixels, batch.keys)
            sums = [total + float(each) for total, each in zip(sums, found[:, : len(members)].sum(dim=1), strict=True)]
            read += len(members)
    loss, score = (total / (read * count) for total in sums)
    return MaskedImageScores(loss, score, read * count, target)


@torch.inference_mode()
def reconstruct(model: ImageEncoder, target: Target, masks: ImageMasks, pixels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Images as the model reads them, with grey in the place of hidden patches, and as it fills them: uint8, as `pixels`.

    pixels: uint8 [rows, channels, height, width]. keys: int64 [rows, 2], from which the masks are drawn.
    """
    device = next(model.parameters()).device
    images, order = normalized(pixels.to(device)), masks(keys.to(device))
    hidden = order[:, -masks.count :]
    with in_mode(model, training=False):
        outputs, _ = predict(model, images, order, masks.count)
    filled = target.filled(outputs, images, hidden)
    return _levels(blanked(images, hidden, model.image.patch)), _levels(filled)


def blanked(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """Images [rows, channels, height, width] with 0, grey, in the place of hidden patches, int64 [rows, k]."""
    rows, columns = images.shape[2] // patch, images.shape[3] // patch
    seen = torch.ones(len(images), rows * columns, device=images.device).scatter(1, hidden, 0.0).view(-1, 1, rows, columns)
    return images * seen.repeat_interleave(patch, dim=2).repeat_interleave(patch, dim=3)


def _levels(images: Tensor) -> Tensor:
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
