"""Images with label images: pairing, checks, ids, and augmentation of both alike."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kilolayer.data.augment import IGNORED, AugmentConfig, PairAugment
from kilolayer.data.drawn_images import SHAPES, drawn_images
from kilolayer.data.image_decoding import decode_ids
from kilolayer.data.image_pairs import ImagePairsConfig, PairBatches, find_pairs, pairs_in_order
from kilolayer.data.images import normalized
from kilolayer.errors import InputError, OptionError

VOID = 4


def put(path: Path, array: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array, mode).save(path)


def pixels_of(number: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3)).astype(np.uint8)


def ids_of(number: int, height: int = 6, width: int = 8) -> np.ndarray:
    """Ids 0 to 2 and void."""
    return np.random.default_rng([1, number]).choice([0, 1, 2, VOID], (height, width)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(5):
        put(tmp_path / "train" / f"{number}.png", pixels_of(number))
        put(tmp_path / "labels" / f"{number}.png", ids_of(number))
    return tmp_path


def config_of(folder: Path, **options: object) -> ImagePairsConfig:
    given = {"train": str(folder / "train"), "train_labels": str(folder / "labels"), "size": "6x8", "void": VOID}
    return ImagePairsConfig(**(given | options))  # pyright: ignore[reportArgumentType]


def test_pairs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = find_pairs(config_of(folder), tmp_path / "cache")
    assert capsys.readouterr().err == ""
    assert found.classes == ("0", "1", "2")
    for number in range(5):
        pixels, ids = found.train[number]
        assert np.array_equal(pixels, pixels_of(number))
        assert np.array_equal(ids, np.where(ids_of(number) == VOID, IGNORED, ids_of(number)))
    every = np.stack([ids_of(number) for number in range(5)])
    assert found.train.pixel_counts.tolist() == [(every == each).sum() for each in range(3)]
    other = find_pairs(config_of(folder, void=3), tmp_path / "cache")
    assert other.classes == ("0", "1", "2", "3", "4")
    assert other.train.digest != found.train.digest


def test_what_does_not_fit_is_counted_and_named(folder: Path, tmp_path: Path) -> None:
    put(folder / "train" / "alone.png", pixels_of(9))
    put(folder / "labels" / "lost.png", ids_of(9))
    put(folder / "train" / "tall.png", pixels_of(9, 8, 8))
    put(folder / "labels" / "tall.png", ids_of(9))
    put(folder / "train" / "paint.png", pixels_of(9))
    put(folder / "labels" / "paint.png", pixels_of(10))
    put(folder / "train" / "torn.png", pixels_of(9))
    (folder / "labels" / "torn.png").write_bytes(b"no image")
    (folder / "train" / "bad.png").write_bytes(b"no image")
    found = find_pairs(config_of(folder, classes=["sky", "road", "car"]), tmp_path / "cache")
    assert found.train.names == [f"{number}.png" for number in range(5)]
    assert found.train.faults == {
        "broken": 1,
        "unlabelled": 1,
        "unpaired": 1,
        "sizes": 1,
        "labels_broken": 1,
        "labels_colored": 1,
    }
    said = " ".join(found.notes)
    for name in ("bad.png", "alone.png", "lost.png", "tall.png", "torn.png", "paint.png"):
        assert name in said
    assert found.classes == ("sky", "road", "car")


def test_an_id_that_is_no_class_is_an_error_that_names_image_count_and_id(folder: Path, tmp_path: Path) -> None:
    wrong = ids_of(7)
    wrong[0, :3] = 77
    put(folder / "train" / "odd.png", pixels_of(7))
    put(folder / "labels" / "odd.png", wrong)
    with pytest.raises(InputError, match="ids that are no class, 77: 3 pixels in the label images of 1 image") as caught:
        find_pairs(config_of(folder, classes=["sky", "road", "car"]), tmp_path / "cache")
    assert "odd.png" in caught.value.where
    assert "images.classes" in caught.value.fix


def test_ids_of_the_test_set_that_training_lacks(folder: Path, tmp_path: Path) -> None:
    put(folder / "test" / "t.png", pixels_of(0))
    put(folder / "test_labels" / "t.png", ids_of(0))
    options = {"test": str(folder / "test"), "test_labels": str(folder / "test_labels")}
    found = find_pairs(config_of(folder, **options), tmp_path / "cache")
    assert found.test is not None
    assert "images.test: 1 have exactly the pixels of a training image (t.png)" in found.notes
    ids = ids_of(0)
    ids[0, 0] = 3
    put(folder / "test_labels" / "t.png", ids)
    with pytest.raises(InputError, match="ids that are no class, 3: 1 pixel in the label images of 1 image"):
        find_pairs(config_of(folder, **options), tmp_path / "cache")


def test_kinds_of_label_images() -> None:
    ids = ids_of(3)

    def encoded(image: Image.Image) -> bytes:
        stream = io.BytesIO()
        image.save(stream, "PNG")
        return stream.getvalue()

    palette = Image.fromarray(ids)
    palette.putpalette(list(range(255, -1, -1)) * 3)
    for image in (Image.fromarray(ids), palette, Image.fromarray(np.dstack([ids] * 3)), Image.fromarray(ids.astype(np.uint16))):
        found, fault = decode_ids(encoded(image), 6, 8)
        assert fault is None
        assert found is not None
        assert np.array_equal(found, ids)
    for kind, level in ((np.uint16, 256), (np.int32, -1), (np.int32, 70_000)):
        others = ids.astype(kind)
        others[0, 0] = level
        stream = io.BytesIO()
        Image.fromarray(others).save(stream, "TIFF")
        assert decode_ids(stream.getvalue(), 6, 8) == (None, "labels_large")
    half, _ = decode_ids(encoded(Image.fromarray(ids.repeat(2, axis=0).repeat(2, axis=1))), 6, 8)
    assert half is not None
    assert np.array_equal(half, ids)  # by the nearest pixel: no new ids between two classes


def test_nothing_that_can_be_used(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(InputError, match=r"no image here: 5 without a label image"):
        find_pairs(config_of(folder, train_labels=str(_renamed(folder / "labels"))), cache)
    with pytest.raises(OptionError, match="train is given without train_labels"):
        ImagePairsConfig(train="x")
    with pytest.raises(OptionError, match=r"images\.train_labels"):
        find_pairs(ImagePairsConfig(), cache)
    empty = tmp_path / "void"
    put(empty / "train" / "a.png", pixels_of(0))
    put(empty / "labels" / "a.png", np.full((6, 8), VOID, np.uint8))
    with pytest.raises(InputError, match="all pixels of the label images"):
        find_pairs(config_of(empty), cache)


def _renamed(labels: Path) -> Path:
    other = labels.parent / "others"
    for path in labels.iterdir():
        put(other / f"x{path.name}", np.asarray(Image.open(path)))
    return other


def test_batches_of_pairs(folder: Path, tmp_path: Path) -> None:
    pairs = find_pairs(config_of(folder), tmp_path / "cache").train
    batches = PairBatches(pairs, 2, seed=1)
    taken = [next(batches) for _ in range(3)]
    members = torch.cat([batch.keys[:, 0] for batch in taken])[:5].tolist()
    assert sorted(members) == list(range(5))
    for row, member in enumerate(members):
        batch = taken[row // 2]
        assert np.array_equal(batch.pixels[row % 2].permute(1, 2, 0), pairs.pixels[member])
        assert np.array_equal(batch.ids[row % 2], pairs[member][1])
    assert taken[2].ids[1].eq(IGNORED).all()
    assert [batch.tokens for batch in taken] == [int((batch.ids != IGNORED).sum()) for batch in taken]
    again = PairBatches(pairs, 2, seed=1)
    again.load_state({**batches.state(), "index": 1})
    assert torch.equal(next(again).ids, taken[1].ids)
    assert [few.tolist() for few, _ in pairs_in_order(pairs, 2, most=3)] == [[0, 1], [3]]  # of five, all over them


@pytest.mark.parametrize(
    "config",
    [
        AugmentConfig(pad=3),
        AugmentConfig(crop="resized", scale=0.3),
        AugmentConfig(crop="resized", scale=0.5, largest=3.0, ratio=1.0),
    ],
)
def test_images_and_ids_move_alike(config: AugmentConfig) -> None:
    """Images of one color a class: after augmentation each pixel's color is still that of its id, but between two classes."""
    rng = np.random.default_rng(0)
    coarse = torch.from_numpy(rng.integers(0, 5, (20, 4, 4)).astype(np.uint8))
    ids = coarse.repeat_interleave(8, 1).repeat_interleave(8, 2)
    pixels = (ids * 50)[:, None].expand(-1, 3, -1, -1).contiguous()
    keys = torch.stack([torch.arange(20), torch.zeros(20, dtype=torch.int64)], dim=1)
    images, labels = PairAugment(config, 1)(pixels, ids, keys)
    known = labels >= 0
    levels = ((images + 1) * 127.5).round()[:, 0]
    assert (levels == labels * 50)[known].float().mean() > (0.999 if config.crop == "pad" else 0.75)
    assert ((levels - labels * 50)[known].abs() <= 105).float().mean() > 0.95
    if config.crop == "pad":
        assert (levels == 0)[~known].all()
    if config.largest > 1:
        assert 0.1 < (~known).float().mean() < 0.7
    elif config.crop == "resized":
        assert known.all()


def test_colors_change_and_pixels_stay() -> None:
    ids = torch.from_numpy(ids_of(0, 16, 16))[None]
    pixels = torch.from_numpy(pixels_of(0, 16, 16)).permute(2, 0, 1)[None]
    augment = PairAugment(AugmentConfig(crop="none", flip=False, randaugment=2), 0)
    changed = 0
    for index in range(30):
        images, labels = augment(pixels, ids, torch.tensor([[index, 0]]))
        assert torch.equal(labels, ids.long())
        changed += not torch.equal(images, normalized(pixels))
        apart = torch.corrcoef(torch.stack([images[0, 0].flatten(), normalized(pixels)[0, 0].flatten()]))[0, 1].abs()
        assert not apart < 0.2
    assert changed > 20
    with pytest.raises(OptionError, match="no effect on label images"):
        PairAugment(AugmentConfig(cutmix=1.0), 0)


def test_drawn_images_as_pairs(tmp_path: Path) -> None:
    drawn_images(tmp_path, 16, {"train": 12})
    options = {"train": str(tmp_path / "train"), "train_labels": str(tmp_path / "train_labels")}
    found = find_pairs(ImagePairsConfig(size=16, valid_share=0.5, **options), tmp_path / "cache")
    assert found.valid is not None
    assert (len(found.train), len(found.valid), len(found.classes)) == (6, 6, 1 + len(SHAPES))


def test_label_images_of_one_class_and_void_are_refused(tmp_path: Path) -> None:
    for number in range(3):
        put(tmp_path / "train" / f"{number}.png", pixels_of(number))
        put(tmp_path / "labels" / f"{number}.png", np.where(ids_of(number) > 1, 255, 0).astype(np.uint8))
    said = r"have the id of void, 255.*set images.void"
    with pytest.raises(InputError, match=f"(?s)no other id than 0.*{said}"):
        find_pairs(config_of(tmp_path, void=255), tmp_path / "cache")
    with pytest.raises(InputError, match=f"(?s)no class but 'ground' has a pixel.*{said}"):
        find_pairs(config_of(tmp_path, void=255, classes=["ground", "object"]), tmp_path / "cache")


def test_classes_without_pixels_and_other_files_among_the_labels_are_told(folder: Path, tmp_path: Path) -> None:
    (folder / "labels" / "readme.txt").write_text("no image")
    notes = find_pairs(config_of(folder, classes=["a", "b", "c", "d"]), tmp_path / "cache").notes
    assert "images.train: no pixel of 1 class (d)" in notes
    assert "images.train: 1 among the label images, not image files by their names: left out (readme.txt)" in notes


def test_two_images_for_one_label_image_are_both_named(folder: Path, tmp_path: Path) -> None:
    put(folder / "train" / "0.bmp", pixels_of(0))
    with pytest.raises(InputError, match=r"(?s)two images have the same name.*0\.bmp and 0\.png"):
        find_pairs(config_of(folder), tmp_path / "cache")


def test_the_classes_are_those_of_the_images_held_out_too(folder: Path, tmp_path: Path) -> None:
    """Whichever half is held out, one image alone has the last class."""
    ids = ids_of(7)
    ids[0, 0] = 9
    put(folder / "train" / "rare.png", pixels_of(7))
    put(folder / "labels" / "rare.png", ids)
    for share in (0.2, 0.5, 0.8):
        found = find_pairs(config_of(folder, valid_share=share), tmp_path / "cache")
        assert found.classes == tuple(map(str, range(10)))


def test_the_share_held_out_is_of_all_images_whatever_folders_they_are_in(tmp_path: Path) -> None:
    for number in range(10):
        put(tmp_path / "train" / f"place{number}" / "view.png", pixels_of(number))
        put(tmp_path / "labels" / f"place{number}" / "view.png", ids_of(number))
    found = find_pairs(config_of(tmp_path, valid_share=0.3), tmp_path / "cache")
    assert found.valid is not None
    assert (len(found.train), len(found.valid)) == (7, 3)


@pytest.mark.slow
@pytest.mark.skipif("KILOLAYER_DATA" not in os.environ, reason="KILOLAYER_DATA is not set")
def test_camvid(tmp_path: Path) -> None:
    archive = Path(os.environ["KILOLAYER_DATA"]) / "camvid" / "camvid_480x360.tar.xz"
    config = ImagePairsConfig(
        train=f"{archive}:train", train_labels=f"{archive}:trainannot", valid=f"{archive}:val",
        valid_labels=f"{archive}:valannot", test=f"{archive}:test", test_labels=f"{archive}:testannot",
        size="360x480", void=11,
    )  # fmt: skip
    found = find_pairs(config, tmp_path)
    assert found.valid is not None
    assert found.test is not None
    assert (len(found.train), len(found.valid), len(found.test)) == (367, 101, 233)
    assert found.notes == ()
    assert len(found.classes) == 11
