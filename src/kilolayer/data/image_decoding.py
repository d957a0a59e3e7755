"""Decode an image file into an array of one size, and say what had to be changed for it."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

import numpy as np

from kilolayer.errors import OptionError

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".jp2")
"""Endings of the names of image files; other files are counted."""
ORIENTATION = 0x0112
"""The EXIF tag."""
LEFT_OUT = {
    "other": "not image files by their names: left out",
    "broken": "cannot be decoded: left out",
    "float": "pixels are not whole numbers: left out",
    "unlabelled": "without a label image of the same name: left out",
    "unpaired": "label images without an image of the same name: left out",
    "sizes": "with a label image of another size: left out",
    "labels_broken": "with a label image that cannot be decoded: left out",
    "labels_other": "among the label images, not image files by their names: left out",
    "labels_colored": "with a label image of colors in place of ids: left out",
    "labels_large": "with a label image of ids below 0 or above 255: left out",
}
CHANGED = {
    "grey": "grey: read as equal channels",
    "palette": "with a palette: read in its colors",
    "alpha": "with transparency: laid on white",
    "deep": "with 16 bits a channel: scaled to 8",
    "cmyk": "in CMYK or another color space: converted",
    "rotated": "turned as their EXIF orientation says",
    "frames": "of several frames: the first is read",
    "resized": "of another size: scaled by the shorter side and cropped around the center",
}
REASONS = LEFT_OUT | CHANGED


def is_image_name(name: str) -> bool:
    """Whether a file is an image by its name; hidden files, such as those that macOS adds to archives, are none."""
    return name.lower().endswith(SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def require_vision() -> None:
    """Raise unless the packages of image tasks are installed."""
    missing = [name for module, name in (("PIL", "Pillow"), ("kornia", "kornia")) if importlib.util.find_spec(module) is None]
    if missing:
        raise OptionError(
            f"images need {' and '.join(missing)}", where="not installed here", fix="pip install 'kilolayer[vision]'"
        )


def decode(data: bytes, channels: int, sides: tuple[int, int] | None = None) -> tuple[np.ndarray | None, list[str]]:
    """The pixels, uint8 [height, width, channels], and the `REASONS` why they are not those of the file; None: left out.

    sides: height and width, to which others are scaled and cropped; None: those of the image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.mode == "F":
                return None, ["float"]
            reasons = ["frames"] if getattr(image, "n_frames", 1) > 1 else []
            reasons += ["deep"] if ";16" in f"{image.mode} {image.tile}" else []
            image.load()
            # A JPEG without EXIF is not searched for it in other places, which takes as long as to decode a small one.
            if (image.format != "JPEG" or "exif" in image.info) and image.getexif().get(ORIENTATION, 1) in range(2, 9):
                ImageOps.exif_transpose(image, in_place=True)
                reasons.append("rotated")
            plain, changes = _plain(image, channels)
            reasons += [each for each in changes if each not in reasons]
            size = plain.size if sides is None else (sides[1], sides[0])
            if plain.size != size:
                plain, reasons = ImageOps.fit(plain, size, Image.Resampling.BICUBIC), [*reasons, "resized"]
            return np.asarray(plain, np.uint8).reshape(plain.height, plain.width, channels), reasons
    except MemoryError:
        raise
    except Exception:  # Pillow's decoders raise many kinds of errors
        return None, ["broken"]


def _plain(image: Image.Image, channels: int) -> tuple[Image.Image, list[str]]:
    """The image with 8 bits in one or three channels, and what was changed."""
    from PIL import Image

    mode, reasons = image.mode, []
    if mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if ";16" in mode or values.max() > 255:  # 32 bits may hold 8
            values, reasons = (values + 128) // 257, ["deep"]
        image, mode = Image.fromarray(values.clip(0, 255).astype(np.uint8)), "L"
    if mode in ("1", "L", "LA", "La") and channels == 3:
        reasons.append("grey")
    if mode in ("P", "PA"):
        reasons.append("palette")
    if mode in ("LA", "La", "RGBA", "RGBa", "PA") or "transparency" in image.info:
        # What is transparent has arbitrary colors, which a plain conversion would show.
        above = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), above)
        reasons.append("alpha")
    elif mode not in ("1", "L", "P", "RGB"):
        reasons.append("cmyk")
    if channels == 1 and "cmyk" in reasons:  # Pillow converts not every space of colors to grey
        image = image.convert("RGB")
    target = "L" if channels == 1 else "RGB"
    return image if image.mode == target else image.convert(target), reasons


def decode_ids(data: bytes, height: int, width: int) -> tuple[np.ndarray | None, str | None]:
    """The ids of a label image, uint8 [height, width], by the nearest pixel; or None, and the reason why it is left out.

    Ids are the levels of a grey image, or the numbers of a palette's colors.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as image:
            values = np.asarray(image)
        if values.ndim == 3 and (values == values[..., :1]).all():
            values = values[..., 0]
        if values.ndim != 2 or values.dtype.kind == "f":
            return None, "labels_colored"
        if values.min() < 0 or values.max() > 255:
            return None, "labels_large"
        ids = Image.fromarray(values.astype(np.uint8))
        return np.asarray(ImageOps.fit(ids, (width, height), Image.Resampling.NEAREST)), None
    except MemoryError:
        raise
    except Exception:
        return None, "labels_broken"


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height of an image as it is shown; None if it cannot be read."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            turned = image.getexif().get(ORIENTATION, 1) in range(5, 9)
            width, height = image.size
            return (height, width) if turned else (width, height)
    except MemoryError:
        raise
    except Exception:
        return None
