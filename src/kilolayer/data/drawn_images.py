"""An embedded set of drawn images: simple light shapes on a dark ground, with a class and a label image for each."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.image_decoding import require_vision
from kilolayer.data.images import ImagesConfig
from kilolayer.files.writing import make_folder

SHAPES = ("circle", "cross", "ring", "square", "stripes", "triangle")
"""The classes, sorted. In a label image 0 is the background and n the n-th shape."""
COUNTS = {"train": 1200, "valid": 120, "test": 120}
FORM = 1
"""Raised when other images are drawn."""
ARCHIVE = "drawn.tar"
SMOOTHING = 4
"""Samples along each axis of a pixel, against jagged edges."""


def drawn_images(folder: Path, size: int = 32, counts: dict[str, int] | None = None, seed: int = 0) -> None:
    """Write train, valid and test, folders by class, and the label images of the same names: train_labels, ..."""
    require_vision()
    from PIL import Image

    for number, (part, count) in enumerate((COUNTS if counts is None else counts).items()):
        rng = np.random.default_rng([seed, number])
        for index in range(count):
            kind = index % len(SHAPES)
            pixels, inside = draw(SHAPES[kind], size, rng)
            name = f"{SHAPES[kind]}/{index:04d}.png"
            for below, array in ((part, pixels), (f"{part}_labels", inside * np.uint8(kind + 1))):
                path = folder / below / name
                make_folder(path.parent)
                Image.fromarray(array).save(path)


def given_or_drawn(config: ImagesConfig, cache: Path) -> ImagesConfig:
    """The configuration itself; or, if it names no training images, one of drawn images, which are kept below `cache`."""
    if config.train is not None:
        return config
    size = min(config.sides)

    def build(draft: Path) -> None:
        with TemporaryDirectory() as drawn, tarfile.open(draft / ARCHIVE, "w") as archive:
            drawn_images(Path(drawn), size)
            archive.add(drawn, "", filter=_without_time)

    folder = built(cache / f"drawn-{content_key([FORM, size, COUNTS])}", build)
    return replace(config, **{part: f"{folder / ARCHIVE}:{part}" for part in config.sources()})


def data_notes(config: ImagesConfig, notes: tuple[str, ...]) -> tuple[str, ...]:
    """What a log says of the images of a run: `notes` of them, and whether they are drawn."""
    return notes if config.train is not None else ("images.train is not given: the run is on drawn shapes, for a first try",)


def _without_time(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = 0
    return member


def draw(shape: str, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A shape at a random place, turned and scaled, on a gradient with noise: uint8 [size, size, 3]; where it is, bool."""
    fine = size * SMOOTHING
    y, x = (np.mgrid[:fine, :fine] + 0.5) / SMOOTHING
    radius = size * rng.uniform(0.22, 0.4)
    center = rng.uniform(radius, size - radius, 2)
    angle = rng.uniform(-np.pi / 8, np.pi / 8)
    u, v = (x - center[0]) / radius, (y - center[1]) / radius
    u, v = u * np.cos(angle) - v * np.sin(angle), u * np.sin(angle) + v * np.cos(angle)
    cover = _inside(shape, u, v).reshape(size, SMOOTHING, size, SMOOTHING).mean(axis=(1, 3))
    background, color = _colors(rng)
    slope = np.add.outer(*(np.linspace(-1, 1, size) * rng.uniform(-25, 25) for _ in range(2)))
    ground = background + slope[..., None]
    mixed = ground + cover[..., None] * (color - ground) + rng.normal(0, 6, (size, size, 3))
    return mixed.clip(0, 255).astype(np.uint8), cover > 0.5


def _inside(shape: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Whether points are in a shape of radius 1 around the origin."""
    far, square = u**2 + v**2, np.maximum(abs(u), abs(v))
    return {
        "circle": far < 0.8,
        "cross": (np.minimum(abs(u), abs(v)) < 0.27) & (square < 0.95),
        "ring": (far < 1) & (far > 0.36),
        "square": square < 0.75,
        "stripes": (square < 0.85) & (np.floor((v + 0.85) / 0.34) % 2 == 0),
        "triangle": (v < 0.7) & (abs(u) < (v + 0.95) * 0.58),
    }[shape]


def _colors(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A dark ground and a light shape: where either may be the lighter, a small model needs many times the images."""
    return rng.uniform(20, 100, 3), rng.uniform(155, 235, 3)
