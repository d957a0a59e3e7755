"""Images from folders and archives: what is read, what is refused, what is counted, and the cache."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kilolayer.config import build
from kilolayer.data import image_set
from kilolayer.data.drawn_images import SHAPES, drawn_images
from kilolayer.data.image_batches import FILLED, ImageBatches, in_order
from kilolayer.data.image_decoding import decode
from kilolayer.data.images import ImagesConfig, find_images, normalized, read_images
from kilolayer.errors import InputError, OptionError


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, three images each, 8 x 8, whose names sort by class."""
    for number in range(6):
        pixels = random_pixels(8, 8, 3, seed=number)
        put(tmp_path / "all" / "ab"[number // 3] / f"{number}.png", encoded(Image.fromarray(pixels)))
    return tmp_path / "all"


def archive_of(folder: Path, path: Path, mode: str, above: str = "", backwards: bool = False) -> Path:
    with tarfile.open(path, mode) as archive:
        for each in sorted(folder.rglob("*"), reverse=backwards):
            archive.add(each, f"{above}{each.relative_to(folder)}", recursive=False)
    return path


def test_a_folder_by_class(folder: Path, tmp_path: Path) -> None:
    found = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache")
    assert found.classes == ("a", "b")
    assert found.train.names == ["a/0.png", "a/1.png", "a/2.png", "b/3.png", "b/4.png", "b/5.png"]
    assert found.train.labels is not None
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.train.faults == {}
    for number in range(6):
        assert np.array_equal(found.train.pixels[number], random_pixels(8, 8, 3, seed=number))


@pytest.mark.parametrize(("ending", "mode", "above"), [("tar", "w", ""), ("tar.gz", "w:gz", "./"), ("tar.xz", "w:xz", "x/y/")])
def test_an_archive_is_like_its_folder(folder: Path, tmp_path: Path, ending: str, mode: str, above: str) -> None:
    path = archive_of(folder, tmp_path / f"images.{ending}", mode, above, backwards=True)
    text = f"{path}:x/y" if above == "x/y/" else str(path)
    ours, theirs = (find_images(ImagesConfig(train=each, size=8), tmp_path / "cache").train for each in (str(folder), text))
    assert theirs.names == ours.names
    assert theirs.digest == ours.digest
    assert np.array_equal(theirs.pixels, ours.pixels)


@pytest.mark.parametrize("above", ["train/", "train/of/"])
def test_another_folder_in_an_archive(folder: Path, tmp_path: Path, above: str) -> None:
    path = archive_of(folder, tmp_path / "images.tar", "w", above)
    config = ImagesConfig(train=f"{path}:trian", size=8)
    with pytest.raises(InputError, match=r"no folder 'trian'; did you mean 'train'\?"):
        find_images(config, tmp_path / "cache")
    with pytest.raises(InputError, match=rf"parts of a data set(.|\n)*{path}:train"):
        find_images(ImagesConfig(train=str(path), size=8), tmp_path / "cache")
    assert ImagesConfig(train=f"{path}:train").absolute() == {"train": f"{path}:train"}


def test_a_damaged_archive(folder: Path, tmp_path: Path) -> None:
    path = archive_of(folder, tmp_path / "images.tar.gz", "w:gz")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InputError, match="archive is damaged"):
        find_images(ImagesConfig(train=str(path), size=8), tmp_path / "cache")


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


GREY = random_pixels(8, 8)
COLOR = random_pixels(8, 8, 3)
DEEP = np.random.default_rng(1).integers(0, 65536, (8, 8)).astype(np.uint16)
ALPHA = np.dstack([COLOR, np.where(GREY > 127, 255, 0).astype(np.uint8)])
INDEX = Image.fromarray(COLOR).quantize(16)


@pytest.mark.parametrize(
    ("data", "expected", "reasons"),
    [
        (encoded(Image.fromarray(COLOR)), COLOR, []),
        (encoded(Image.fromarray(GREY)), np.dstack([GREY] * 3), ["grey"]),
        (encoded(INDEX), np.array(INDEX.getpalette(), np.uint8).reshape(-1, 3)[np.asarray(INDEX)], ["palette"]),
        (encoded(Image.fromarray(ALPHA)), np.where(GREY[..., None] > 127, COLOR, 255), ["alpha"]),
        (encoded(Image.fromarray(DEEP)), np.dstack([np.round(DEEP / 257).astype(np.uint8)] * 3), ["deep", "grey"]),
        (encoded(Image.fromarray(COLOR), exif=exif(3)), COLOR[::-1, ::-1], ["rotated"]),
        (encoded(Image.fromarray(COLOR), exif=exif(6)), np.rot90(COLOR, -1), ["rotated"]),
        (encoded(Image.fromarray(COLOR), "BMP"), COLOR, []),
        (encoded(Image.fromarray(COLOR), "TIFF", save_all=True, append_images=[Image.fromarray(COLOR)]), COLOR, ["frames"]),
        (encoded(Image.fromarray(GREY.astype(np.float32)), "TIFF"), None, ["float"]),
        (encoded(Image.fromarray(COLOR))[:90], None, ["broken"]),
        (b"GIF89a", None, ["broken"]),
        (b"", None, ["broken"]),
    ],
)
def test_every_kind_of_image(data: bytes, expected: np.ndarray | None, reasons: list[str]) -> None:
    found, why = decode(data, 3, (8, 8))
    assert why == reasons
    assert (found is None) == (expected is None)
    if found is not None:
        assert np.array_equal(found, expected)


def test_cmyk_and_grey_output() -> None:
    found, why = decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), 3, (8, 8))
    assert why == ["cmyk"]
    assert found is not None
    assert found[0, 0].tolist() == [255, 0, 0]
    grey, why = decode(encoded(Image.fromarray(GREY)), 1, (8, 8))
    assert (grey is not None and np.array_equal(grey[..., 0], GREY), why) == (True, [])


def test_other_sizes_are_scaled_by_the_shorter_side_and_cropped() -> None:
    """A wide image with one color in its middle half: the center crop shows that color alone."""
    pixels = np.zeros((20, 80, 3), np.uint8)
    pixels[:, 25:55] = (10, 200, 30)
    found, why = decode(encoded(Image.fromarray(pixels)), 3, (10, 10))
    assert why == ["resized"]
    assert found is not None
    assert (found == (10, 200, 30)).all()


def test_what_is_left_out_is_counted_and_named(folder: Path, tmp_path: Path) -> None:
    put(folder / "a" / "bad.png", b"no image")
    put(folder / "a" / "wide.png", encoded(Image.new("RGB", (9, 8))))
    put(folder / "b" / "notes.txt", b"text")
    put(folder / "README", b"text")
    found = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache")
    assert found.train.faults == {"other": 2, "broken": 1, "resized": 1}
    assert len(found.train) == 7
    said = " ".join(found.notes)
    assert "1 cannot be decoded: left out (a/bad.png)" in said
    assert "2 not image files by their names: left out (README, b/notes.txt)" in said


def test_an_empty_class(folder: Path, tmp_path: Path) -> None:
    (folder / "c").mkdir()
    for path in (folder, archive_of(folder, tmp_path / "images.tar", "w")):
        with pytest.raises(InputError, match="class 'c' has no training image"):
            find_images(ImagesConfig(train=str(path), size=8), tmp_path / "cache")
    put(folder / "c" / "bad.png", b"no image")
    with pytest.raises(InputError, match="class 'c' has no training image"):
        find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache")


def test_classes_of_the_test_set(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "test"
    put(other / "a" / "0.png", encoded(Image.fromarray(random_pixels(8, 8, 3, seed=0))))
    found = find_images(ImagesConfig(train=str(folder), test=str(other), size=8), tmp_path / "cache")
    assert found.test is not None
    assert found.test.labels is not None
    assert found.test.labels.tolist() == [0]
    said = " ".join(found.notes)
    assert "images.test: no image of 1 class (b)" in said
    assert "images.test: 1 have exactly the pixels of a training image (a/0.png)" in said
    put(other / "new" / "0.png", encoded(Image.new("RGB", (8, 8))))
    with pytest.raises(InputError, match=r"there is no class 'new'(.|\n)*new/0.png(.|\n)*a, b"):
        find_images(ImagesConfig(train=str(folder), test=str(other), size=8), tmp_path / "cache")
    with pytest.raises(InputError, match="no class 'new'"):
        read_images(str(other), ImagesConfig(train=str(folder), size=8, classes=["a", "b"]), tmp_path / "cache")


def test_folders_without_images(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="there is no image here"):
        find_images(ImagesConfig(train=str(tmp_path / "empty")), cache)
    with pytest.raises(InputError, match=r"no such folder(.|\n)*did you mean"):
        find_images(ImagesConfig(train=f"{folder}l"), cache)
    with pytest.raises(OptionError, match=r"set images\.train"):
        find_images(ImagesConfig(), cache)
    put(folder / "loose.png", encoded(Image.new("RGB", (8, 8))))
    with pytest.raises(InputError, match=r"1 of 7 images are in no folder of a class: loose\.png"):
        find_images(ImagesConfig(train=str(folder), size=8), cache)
    with pytest.raises(InputError, match="all training images are of the class 'x'"):
        find_images(ImagesConfig(train=str(_moved(folder / "a", tmp_path / "one" / "x").parent), size=8), cache)
    put(tmp_path / "file.txt", b"text")
    with pytest.raises(InputError, match="neither a folder nor an archive"):
        find_images(ImagesConfig(train=str(tmp_path / "file.txt")), cache)


def _moved(path: Path, to: Path) -> Path:
    to.parent.mkdir(parents=True)
    return path.rename(to)


def test_without_labels_folders_have_no_meaning(folder: Path, tmp_path: Path) -> None:
    put(folder / "loose.png", encoded(Image.new("RGB", (8, 8))))
    found = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache", labelled=False)
    assert (found.train.labels, found.classes, len(found.train)) == (None, (), 7)


def test_without_labels_a_share_is_held_out_of_all_images(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "all" / f"album{number}" / "a.png", encoded(Image.fromarray(random_pixels(4, 4, 3, seed=number))))
    config = ImagesConfig(train=str(tmp_path / "all"), size=4, valid_share=0.3)
    found = find_images(config, tmp_path / "cache", labelled=False)
    assert found.valid is not None
    assert (len(found.train), len(found.valid)) == (7, 3)


def test_hidden_files_are_no_images(folder: Path, tmp_path: Path) -> None:
    put(folder / "a" / "._0.png", b"what macOS adds")
    found = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache").train
    assert (len(found), found.faults) == (6, {"other": 1})


def test_a_share_is_held_out_of_each_class(tmp_path: Path) -> None:
    for number in range(40):
        put(
            tmp_path / "all" / "ab"[number % 2] / f"{number}.png", encoded(Image.fromarray(random_pixels(4, 4, 3, seed=number)))
        )
    config = ImagesConfig(train=str(tmp_path / "all"), size=4, valid_share=0.25)
    found = find_images(config, tmp_path / "cache")
    assert found.valid is not None
    assert found.valid.labels is not None
    assert np.bincount(found.valid.labels).tolist() == [5, 5]
    assert len(found.train) == 30
    assert not set(found.train.names) & set(found.valid.names)
    for part in (found.train, found.valid):
        for name, pixels in zip(part.names, part.pixels, strict=True):
            number = int(Path(name).stem)
            assert np.array_equal(pixels, random_pixels(4, 4, 3, seed=number))
    with pytest.raises(InputError, match="leaves none"):
        find_images(ImagesConfig(train=str(tmp_path / "all"), size=4, valid_share=0.01), tmp_path / "cache")


def test_the_cache_is_used_and_repaired(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = ImagesConfig(train=str(folder), size=8), tmp_path / "cache"
    for path in folder.rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    first = find_images(config, cache).train
    pixels = first.pixels.copy()
    with monkeypatch.context() as patched:
        patched.setattr(image_set, "write_images", None)  # fails if it is called
        assert find_images(config, cache).train.digest == first.digest
    (written,) = cache.glob("images-*/kept.pixels")
    data = bytearray(written.read_bytes())
    data[5] ^= 1
    written.write_bytes(data)
    assert np.array_equal(find_images(config, cache).train.pixels, pixels)
    put(folder / "a" / "0.png", encoded(Image.new("RGB", (8, 8))))
    assert find_images(config, cache).train.digest != first.digest


def test_a_preparation_that_fails_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(image_set, "write_part", fail)
        with pytest.raises(KeyboardInterrupt):
            find_images(ImagesConfig(train=str(folder), size=8), cache)
    assert not [path.name for path in cache.iterdir() if "images-" in path.name]
    find_images(ImagesConfig(train=str(folder), size=8), cache)


def test_batches(folder: Path, tmp_path: Path) -> None:
    images = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache").train
    assert images.labels is not None
    batches = ImageBatches(images, 4, seed=3)
    taken = [next(batches) for _ in range(4)]
    for epoch, pair in enumerate((taken[:2], taken[2:])):
        assert [batch.tokens for batch in pair] == [4, 2]
        assert pair[1].labels[2:].tolist() == [FILLED, FILLED]
        members = torch.cat([batch.keys[: batch.tokens, 0] for batch in pair])
        assert sorted(members.tolist()) == list(range(6))
        for batch in pair:
            assert batch.keys[:, 1].eq(epoch).all()
            for pixels, label, (index, _) in zip(*(part[: batch.tokens] for part in batch.parts), strict=True):
                assert np.array_equal(pixels.permute(1, 2, 0), images.pixels[index])
                assert label == images.labels[index]
    assert not torch.equal(taken[0].keys[:, 0], taken[2].keys[:, 0])
    again = ImageBatches(images, 4, seed=3)
    next(again)
    state = again.state()
    resumed = ImageBatches(images, 4, seed=3)
    resumed.load_state(state)
    for batch in taken[1:]:
        assert all(torch.equal(a, b) for a, b in zip(next(resumed).parts, batch.parts, strict=True))
    with pytest.raises(InputError, match="different data"):
        ImageBatches(images, 3, seed=3).load_state(state)


def test_in_order(folder: Path, tmp_path: Path) -> None:
    images = find_images(ImagesConfig(train=str(folder), size=8), tmp_path / "cache").train
    every = [members for members, _ in in_order(images, 4)]
    assert np.concatenate(every).tolist() == list(range(len(images)))
    assert max(map(len, every)) == 4
    few = list(in_order(images, 4, most=5))
    members = np.concatenate([own for own, _ in few]).tolist()
    assert len(set(members)) == 5
    assert few[1][1].labels.tolist() == [images.labels[members[4]], FILLED, FILLED, FILLED]
    # Images are sorted by class; a part of them has all classes.
    assert {int(images.labels[index]) for index in members} == set(images.labels.tolist())


@pytest.mark.parametrize("size", ["360", "0x8", "8x", "axb", "2x2", "8x8x8", "9999x8"])
def test_wrong_sizes(size: str) -> None:
    with pytest.raises(OptionError, match="360x480"):
        ImagesConfig(size=size)


def test_the_configuration() -> None:
    assert build(ImagesConfig, {"size": "36x48"}).sides == (36, 48)
    assert ImagesConfig(size=28).sides == (28, 28)
    with pytest.raises(OptionError, match="valid_share has no effect"):
        ImagesConfig(valid="x", valid_share=0.1)
    with pytest.raises(OptionError, match="channels"):
        ImagesConfig(channels=2)
    with pytest.raises(OptionError, match="at least two"):
        ImagesConfig(classes=["a"])


def test_normalized() -> None:
    found = normalized(torch.tensor([0, 255, 51], dtype=torch.uint8))
    torch.testing.assert_close(found, (torch.tensor([0.0, 255.0, 51.0]) / 255 - 0.5) / 0.5)


def test_drawn_images(tmp_path: Path) -> None:
    drawn_images(tmp_path, 24, {"train": 12, "test": 6})
    found = find_images(ImagesConfig(train=str(tmp_path / "train"), test=str(tmp_path / "test"), size=24), tmp_path / "cache")
    assert found.classes == SHAPES
    assert found.notes == ()
    for name in found.train.names:
        ids = np.asarray(Image.open(tmp_path / "train_labels" / name))
        assert set(np.unique(ids)) == {0, 1 + SHAPES.index(name.partition("/")[0])}
        assert 0.05 < (ids > 0).mean() < 0.6
    again = tmp_path / "again"
    drawn_images(again, 24, {"train": 12})
    assert (again / "train/circle/0000.png").read_bytes() == (tmp_path / "train/circle/0000.png").read_bytes()
    shutil.rmtree(again)


def test_the_part_for_training_is_advised_and_shares_are_of_classes(tmp_path: Path) -> None:
    for part in ("test", "train"):
        for name in ("a", "b"):
            for number in range(4):
                put(tmp_path / "all" / part / name / f"{number}.png", encoded(Image.fromarray(COLOR)))
    with pytest.raises(InputError, match=r"above the classes: .*all/train"):
        find_images(ImagesConfig(train=str(tmp_path / "all"), size=8), tmp_path / "cache")
    with pytest.raises(InputError, match=r"a share of 0.05 of each class, with 4 images, leaves none"):
        find_images(ImagesConfig(train=str(tmp_path / "all" / "train"), size=8, valid_share=0.05), tmp_path / "cache")
