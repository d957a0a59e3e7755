"""The configuration of a map head: the option `map_head=`, and the table [model.map_head] of a configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.config import bounded, check, strict_class
from kilolayer.errors import UnusedOptionError


@strict_class
@dataclass(frozen=True, kw_only=True)
class MapHead:
    """A head on an image encoder that scores every pixel, for segmentation."""

    kind: Literal["upernet", "linear"] = "upernet"
    """How: "upernet" (Xiao et al. 2018) from the states after four depths, "linear" from the last states alone."""
    classes: int = bounded(2, least=1, most=2**20)
    """Number of scores for each pixel."""
    channels: int | None = bounded(None, least=4, most=2**16)
    """Width of the maps inside of UperNet. Default: the model's dim."""
    dropout: float = bounded(0.1, least=0, below=1)
    """Dropout before the last convolution."""

    def __post_init__(self) -> None:
        check(self)
        if self.kind == "linear" and self.channels is not None:
            raise UnusedOptionError(
                f"channels={self.channels} has no effect on a linear map head",
                fix='remove it, or choose kind="upernet"',
                unused="channels",
                beside=("kind",),
            )
