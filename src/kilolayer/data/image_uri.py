"""Images as text, for pages that hold everything that they show."""

from __future__ import annotations

import base64
import io

import numpy as np

LARGEST_SIDE = 128


def data_uri(pixels: np.ndarray) -> str:
    """An image, uint8 [height, width, channels], as a data URI of a PNG file; a large one is made smaller."""
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
