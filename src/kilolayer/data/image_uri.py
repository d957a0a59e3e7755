"""Images as text, for pages that hold everything that they show."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_SIDE = 128


def data_uri(pixels: np.ndarray) -> str:
    """An image, uint8 [height, width, channels], as a data URI of a PNG file; a large one is made smaller."""
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def rows_of_images(*rows: Tensor, gap: int = 0) -> str:
    """Rows of images, uint8 [images, channels, height, width] each, one above the other: a PNG file in base64.

    gap: white pixels between images.
    """
    from PIL import Image

    apart = [F.pad(row, (0, gap, 0, gap), value=255) for row in rows]
    whole = torch.cat([torch.cat(list(row), dim=2) for row in apart], dim=1)
    grid = whole[:, : whole.shape[1] - gap, : whole.shape[2] - gap].permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(grid[..., 0] if grid.shape[-1] == 1 else grid).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
