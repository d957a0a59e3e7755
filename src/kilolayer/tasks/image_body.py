"""The body of a model that reads images, which a run of an image task takes over from a model of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kilolayer.config import Table
from kilolayer.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

OF_PREDICTIONS = ("vocab_size", "output_transform", "output_bias", "map_head", "head")
"""Options of what another model predicts."""
OF_MASKS = ("mask_token", "decoder", "size", "channels")
"""Options of the images of another model, and of its masks."""
NOT_OF_THE_BODY = ("head.", "map_head.", "vocabulary.", "transform.", "output_bias.")
NOT_OF_THE_BODY += ("decoder.", "decoder_input.", "patches.mask_token")
"""Weights of what another model predicts, and of its masks."""


def body_of(tables: Table) -> Table:
    """The tables of a model's body; the images have the size of those that it was trained on."""
    model = tables["model"]
    image = model.get("image")
    if not isinstance(image, Mapping):
        raise InputError("its model does not read images", fix="name a run of an image task")
    body = {name: value for name, value in model.items() if name not in OF_PREDICTIONS}
    body["image"] = {name: value for name, value in image.items() if name not in OF_MASKS}
    return {"model": body, "images": {name: image[name] for name in ("size", "channels") if name in image}}


def adopted(weights: Mapping[str, Tensor], own: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """The weights of another model's body; those below `head` are its too if they have the shapes of one's own."""
    mine, theirs = ({name: each for name, each in some.items() if name.startswith(head)} for some in (own, weights))
    alike = {name: each.shape for name, each in mine.items()} == {name: each.shape for name, each in theirs.items()}
    body = {name: each for name, each in weights.items() if not name.startswith(NOT_OF_THE_BODY)}
    return body | (theirs if alike else mine)


def part_of(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested table; an empty one if the value is not a table, which is refused later."""
    part = table.get(name, {})
    return part if isinstance(part, Mapping) else {}
