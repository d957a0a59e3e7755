from __future__ import annotations

import json
import math
import os
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build, merge
from kilolayer.data.drawn_images import SHAPES
from kilolayer.data.overlays import class_colors, overlay
from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.segmentation import CALLED, LABELS, RIGHT, Segmentation, count_pixels, measure_pixels
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.regrid import repatched
from kilolayer.runs.budget import Precision, Work, budget
from kilolayer.runs.run import cache_folder, prepare
from kilolayer.tasks.config import RunConfig
from tests.fixtures.live_tensors import LiveTensors
from tests.fixtures.small_runs import prepared

PARTS = ("train", "valid", "test")
NAMES = ["background", *SHAPES]


def table(images: Path, /, **sections: Any) -> dict[str, Any]:
    sources = {name: str(images / name) for part in PARTS for name in (part, f"{part}_labels")}
    small = {
        "task": "segment",
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "image": {"patch": 8}, "map_head": {"channels": 8}},
        "images": {**sources, "size": 16, "rows": 8, "classes": NAMES},
        "train": {"steps": 3, "device": "cpu", "log_every": 1, "layers_every": 0},
    }
    return merge(small, sections)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kl.train(table(images), run=tmp_path_factory.mktemp("runs") / "run")


def task_for(images: Path, /, **sections: Any) -> Any:
    return prepared(table(images, **sections))


def counts_by_hand(found: np.ndarray, labels: np.ndarray, classes: int) -> tuple[list[float | None], float]:
    """The IoU of each class, None if it does not occur, and the pixel accuracy, from a confusion matrix made by a loop."""
    confusion = [[0] * classes for _ in range(classes)]
    for label, answer in zip(labels.ravel().tolist(), found.ravel().tolist(), strict=True):
        if label >= 0:
            confusion[label][answer] += 1
    ious: list[float | None] = []
    for each in range(classes):
        row, column = sum(confusion[each]), sum(line[each] for line in confusion)
        either = row + column - confusion[each][each]
        ious.append(100 * confusion[each][each] / either if either else None)
    right, every = sum(confusion[each][each] for each in range(classes)), sum(map(sum, confusion))
    return ious, 100 * right / every


def test_scores_are_those_of_a_confusion_matrix_by_hand_without_void() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice([-1, 0, 1, 3], (6, 5, 4))  # 2 is called, and in no label; 4 is neither
    found = np.where(rng.random(labels.shape) < 0.6, np.maximum(labels, 0), rng.integers(4, size=labels.shape))
    ious, accuracy = counts_by_hand(found, labels, 5)
    assert ious[2] == 0
    assert ious[4] is None
    counts = count_pixels(torch.from_numpy(found), torch.from_numpy(labels), 5).numpy()
    measured = Segmentation(0.0, counts)
    known = [each for each in ious if each is not None]
    assert measured.quality == pytest.approx(sum(known) / len(known))
    assert measured.pixel_accuracy == pytest.approx(accuracy)
    for each, expected in zip(measured.by_class(), ious, strict=True):
        assert each.iou is None if expected is None else each.iou == pytest.approx(expected)
    score = measured.scores()["mean_iou"]
    assert "classes:4|absent:1" in score.signature
    assert score.low <= score.value <= score.high
    for index in range(6):
        assert counts[index, LABELS].sum() == counts[index, CALLED].sum() == (labels[index] >= 0).sum()
        assert counts[index, RIGHT].sum() == ((labels[index] >= 0) & (labels[index] == found[index])).sum()


@pytest.mark.slow
def test_intervals_hold_the_scores_of_most_other_sets_of_images() -> None:
    rng = np.random.default_rng(1)

    def drawn() -> Segmentation:
        labels = rng.integers(3, size=(30, 64))
        skill = rng.uniform(0.3, 1, (30, 1))  # images differ, which an interval over pixels would miss
        found = np.where(rng.random(labels.shape) < skill, labels, (labels + 1) % 3)
        return Segmentation(0.0, count_pixels(torch.from_numpy(found), torch.from_numpy(labels), 3).numpy())

    truth = np.mean([drawn().quality for _ in range(300)])
    inside = [score.low <= truth <= score.high for score in (drawn().scores()["mean_iou"] for _ in range(60))]
    assert 0.85 < np.mean(inside) <= 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_a_naive_computation_in_fp64_over_pixels_that_have_a_class(images: Path, smoothing: float) -> None:
    task = task_for(images, train={"label_smoothing": smoothing})
    model = build_model(task.resolve(task.config).model, seed=1).eval()
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(-1, 7, (3, 16, 16), generator=torch.Generator().manual_seed(1))
    labels[2] = -1
    weight = torch.tensor(1000)
    found = task.loss(model, (pixels, labels, weight), hidden_states=False)
    logits = model(pixels).logits.double().tolist()
    total, count = 0.0, 0
    for row, y, x in product(range(3), range(16), range(16)):
        if (label := int(labels[row, y, x])) >= 0:
            scores = [logits[row][each][y][x] for each in range(7)]
            normalizer = math.log(sum(map(math.exp, scores)))
            losses = [normalizer - score for score in scores]
            total += (1 - smoothing) * losses[label] + smoothing * sum(losses) / 7
            count += 1
    assert found.total.item() == pytest.approx(1000 * total / count, rel=1e-5)
    assert int(found.count) == 1000


def test_the_weight_of_a_batch_is_its_pixels_before_augmentation(images: Path) -> None:
    task = task_for(images, augment={"pad": 8})
    batch = next(task.training_batches(1))
    pixels, labels, weight = task.on_device(batch.parts)
    assert (pixels.shape, labels.shape, int(weight)) == ((8, 3, 16, 16), (8, 16, 16), batch.tokens)
    assert 0 < int((labels >= 0).sum()) < batch.tokens


def test_an_image_alone_has_the_map_and_the_loss_that_it_has_in_a_batch(images: Path, run: Any) -> None:
    some = sorted((images / "test").rglob("*.png"))
    together = run.segment(some)
    for path, each in zip(some, together, strict=True):
        alone = run.segment(path)
        assert np.array_equal(alone.ids, each.ids)
    task = task_for(images)
    one, eight = (measure_pixels(run.model, task.test, rows) for rows in (1, 8))
    assert np.array_equal(one.counts, eight.counts)
    assert one.loss == pytest.approx(eight.loss, rel=1e-5)
    assert one.quality == pytest.approx(run.scores()["test"]["mean_iou"]["value"])
    labels = np.stack([task.test[index][1] for index in range(12)]).astype(np.int64)
    found = {path.stem: each.ids for path, each in zip(some, together, strict=True)}
    ours = np.stack([found[Path(name).stem] for name in task.test.names])
    ious, accuracy = counts_by_hand(ours, labels, 7)
    known = [each for each in ious if each is not None]
    assert one.quality == pytest.approx(sum(known) / len(known))
    assert one.pixel_accuracy == pytest.approx(accuracy)


def test_a_run_is_scored_shown_and_writes_overlays(
    run: Any, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = (run.folder / "report.html").read_text()
    assert "IoU by class" in page
    assert page.count("data:image/jpeg;base64,") == 1
    assert main(["evaluate", str(run.folder)]) == 0
    out = capfd.readouterr().out
    assert all(name in out for name in (*NAMES, "mean IoU", "pixel accuracy", "95% interval"))
    tested = ["--test", str(images / "test"), str(images / "test_labels")]
    assert main(["evaluate", str(run.folder), "--json", *tested]) == 0
    assert json.loads(capfd.readouterr().out)["scores"] == {"test": run.scores()["test"]}
    assert main(["evaluate", str(run.folder), *tested[:2]]) == 2
    assert "two folders" in capfd.readouterr().err

    some = sorted((images / "test").rglob("*.png"))[:2]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / some[0].name).write_bytes(some[0].read_bytes())  # the same name again
    (tmp_path / "in" / "z.png").write_bytes(b"\x89PNG")
    words = ["classify", str(run.folder), *map(str, some), str(tmp_path / "in"), "--overlays", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 1
    out, err = capfd.readouterr()
    assert f"3 overlays written to {tmp_path / 'out'}" in err
    assert "z.png: cannot be decoded" in err
    first, second, again, broken = json.loads(out)
    stem = some[0].stem
    assert [Path(each["overlay"]).name for each in (first, second, again)] == [
        f"{stem}-overlay.png",
        f"{some[1].stem}-overlay.png",
        f"{stem}-overlay-2.png",
    ]
    assert broken["fault"] == "cannot be decoded"
    found = run.segment(some[0])
    assert sum(found.shares.values()) == pytest.approx(1)
    assert first["shares"] == dict(list(found.shares.items())[:5])
    with Image.open(first["overlay"]) as written:
        assert np.array_equal(np.asarray(written), found.overlay())
    with pytest.raises(InputError, match="cannot be decoded"):
        run.segment(tmp_path / "in" / "z.png")


def test_maps_and_overlays_have_the_size_of_each_image(run: Any, tmp_path: Path) -> None:
    photograph = Image.fromarray(np.random.default_rng(0).integers(256, size=(20, 50, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photograph.save(tmp_path / "turned.png", exif=exif)
    images = [photograph, tmp_path / "turned.png", Image.open(tmp_path / "turned.png"), np.zeros((8, 9), np.uint8)]
    for found, size in zip(run.segment(images), ((20, 50), (50, 20), (50, 20), (8, 9)), strict=True):
        assert found.ids.shape == found.pixels.shape[:2] == found.overlay().shape[:2] == size
        assert sum(found.shares.values()) == pytest.approx(1)
    words = ["classify", str(run.folder), str(tmp_path / "turned.png"), "--overlays", str(tmp_path / "out")]
    assert main(words) == 0
    with Image.open(tmp_path / "out" / "turned-overlay.png") as written:
        assert written.size == (20, 50)


def test_an_overlay_mixes_the_colors_and_leaves_void() -> None:
    pixels = np.full((1, 3, 1), 100, np.uint8)
    ids = np.array([[0, 2, 255]], np.uint8)
    colors = class_colors(3).astype(float)
    found = overlay(pixels, ids, 3, share=0.5)
    for column, number in ((0, 0), (1, 2)):
        assert np.abs(found[0, column] - (50 + colors[number] / 2)).max() <= 0.5
    assert found[0, 2].tolist() == [100] * 3
    many = class_colors(60).astype(int)
    assert min(np.abs(a - b).sum() for i, a in enumerate(many) for b in many[:i]) > 12


def test_flags_of_one_task_are_refused_for_a_run_of_the_other(
    run: Any, images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run.folder), "--corruptions"]) == 2
    assert "--corruptions has no effect on a segmentation model" in capfd.readouterr().err


SHAPE = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32}


def classifier_of(images: Path, folder: Path) -> Any:
    """A run of an image classifier of larger images."""
    sources = {"train": str(images / "train"), "size": 32, "rows": 8}
    given = {"task": "classify_image", "model": {**SHAPE, "image": {"patch": 8}}, "images": sources}
    return kl.train({**given, "train": {"steps": 1, "device": "cpu"}}, run=folder)


def masked_model(folder: Path) -> Any:
    """A model of masked images that predicts them by a decoder, without a run."""
    image = {"size": 32, "patch": 8, "decoder": {"layers": 1, "dim": 8, "heads": 2}}
    model = build_model(ModelConfig(shape="encoder", **SHAPE, positions="learned", vocab_size=192, image=image), seed=5)
    kl.save(model, folder)
    return model


@pytest.mark.parametrize("kind", ["masked", pytest.param("classifier", marks=pytest.mark.slow)])
def test_it_starts_from_the_body_of_another_image_model_of_another_size(images: Path, tmp_path: Path, kind: str) -> None:
    start = masked_model(tmp_path / "start") if kind == "masked" else classifier_of(images, tmp_path / "start").model
    whole = table(images, train={"start_from": str(tmp_path / "start"), "lr": 1e-20})
    del whole["model"]
    tuned = kl.train(whole, run=tmp_path / "tuned", model={"map_head": {"channels": 8}})
    ours, theirs = tuned.model.state_dict(), start.state_dict()
    assert tuned.config.train.layer_decay < 1
    assert ours["positions.weight"].shape == (5, 16)
    for name, weight in ours.items():
        if not name.startswith(("map_head.", "positions.")):
            torch.testing.assert_close(weight, theirs[name], msg=name)
    if kind == "classifier":
        again = kl.train(merge(whole, {"train": {"start_from": str(tuned.folder)}}), run=tmp_path / "again")
        assert again.config.model.map_head == tuned.config.model.map_head
        torch.testing.assert_close(again.model.state_dict()["map_head.output.weight"], ours["map_head.output.weight"])


def test_it_starts_from_a_model_of_other_patches_and_a_classifier_from_it(images: Path, tmp_path: Path) -> None:
    start = masked_model(tmp_path / "start")
    over = {"model": {"image": {"patch": 4}}, "train": {"steps": 1, "start_from": str(tmp_path / "start"), "lr": 1e-20}}
    whole = table(images, **over)
    tuned = kl.train(whole, run=tmp_path / "tuned")
    ours, theirs = tuned.model.state_dict(), start.state_dict()
    expected = repatched(theirs["patches.projection.weight"], 8, 4)
    torch.testing.assert_close(ours["patches.projection.weight"], expected)
    assert ours["positions.weight"].shape == (17, 16)

    sources = {"train": str(images / "train"), "size": 16, "rows": 8}
    given = {
        "task": "classify_image",
        "images": sources,
        "train": {**over["train"], "start_from": str(tuned.folder), "device": "cpu"},
    }
    body = kl.train(given, run=tmp_path / "classifier").model.state_dict()
    assert "map_head.output.weight" not in body
    for name, weight in body.items():
        if not name.startswith("head."):
            torch.testing.assert_close(weight, ours[name], msg=name)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"model": {"image": {"size": 32}}}, "model reads"),
        ({"model": {"image": {"patch": 5}}}, "do not divide an image of 16 x 16"),
        ({"model": {"image": {"mask_token": True}}}, "mask_token"),
        ({"augment": {"cutmix": 1.0}}, "no effect on label images"),
        ({"images": {"train_labels": "none"}}, "train is given without train_labels"),
        ({"images": {"valid": "none", "valid_labels": "none"}, "train": {"patience": 3}}, "patience"),
        ({"model": {"map_head": "none"}}, "has a map head"),
    ],
)
def test_contradictions_are_refused(images: Path, sections: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        build(RunConfig, table(images, **sections))


def test_labels_that_are_no_class_and_another_number_of_classes_are_refused(images: Path) -> None:
    with pytest.raises(InputError, match=r"ids that are no class, 4, 5, 6: [\d,]+ pixels") as caught:
        task_for(images, images={"classes": NAMES[:4]})
    assert ".png" in caught.value.where
    assert "images.classes" in caught.value.fix
    with pytest.raises(OptionError, match="classes is 5, but there are 7 classes"):
        task_for(images, model={"map_head": {"classes": 5}})
    unnamed = {key: value for key, value in table(images)["images"].items() if key != "classes"}
    found = prepare(build(RunConfig, {**table(images), "images": unnamed}), cache_folder())
    assert found.classes == tuple("0123456")


def test_the_plan_counts_patches(images: Path) -> None:
    work = build(RunConfig, table(images)).usual_batch(None)
    assert (work.rows, work.length) == (8, 5)
    assert build(RunConfig, table(images)).model.map_head.classes == 7


@pytest.mark.parametrize("kind", ["upernet", "linear"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_plan_counts_what_a_step_holds(images: Path, kind: str, precision: Precision) -> None:
    task, classes = task_for(images), 60
    head: dict[str, Any] = {"kind": kind, "classes": classes, **({"channels": 8} if kind == "upernet" else {})}
    image = {"size": 32, "patch": 8}
    config = ModelConfig(shape="encoder", **SHAPE, vocab_size=None, positions="learned", image=image, map_head=head)
    model = build_model(config, seed=1).train()
    if precision == "bf16":
        model.cast_weights(torch.bfloat16)
    pixels, labels = torch.randn(16, 3, 32, 32), torch.randint(-1, classes, (16, 32, 32))
    with LiveTensors() as live:
        task.loss(model, (pixels, labels, torch.tensor(labels.numel())), hidden_states=False).total.backward()
    planned = budget(config, Work(16, 17, precision=precision)).training
    assert planned.activations + planned.logits == pytest.approx(live.peak, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["upernet", "linear"])
def test_drawn_shapes_are_learned_without_any_data(tmp_path: Path, kind: str) -> None:
    run = kl.train({"task": "segment", "model": {"map_head": {"kind": kind}}}, run=tmp_path / "run", train={"device": "cpu"})
    by_class = run.scores()["iou_by_class"]
    assert [each["name"] for each in by_class] == NAMES
    # Calling every pixel background has an IoU of its share there, and 0 elsewhere.
    majority = 100 * by_class[0]["pixels"] / sum(each["pixels"] for each in by_class) / len(by_class)
    assert run.scores()["test"]["mean_iou"]["value"] > 3 * majority


@pytest.mark.slow
def test_camvid_is_learned(tmp_path: Path) -> None:
    archive = Path(os.environ.get("KILOLAYER_DATA", "/nowhere")) / "camvid" / "camvid_480x360.tar.xz"
    if not archive.exists():
        pytest.skip("needs KILOLAYER_DATA/camvid")
    sources = {"train": "train", "valid": "val", "test": "test"}
    named = {
        f"{part}{end[0]}": f"{archive}:{folder}{end[1]}"
        for part, folder in sources.items()
        for end in (("", ""), ("_labels", "annot"))
    }
    run = kl.train(
        {
            "task": "segment",
            "model": {"layers": 4, "dim": 64, "heads": 4, "ffn_dim": 128, "image": {"patch": 6}, "map_head": {"channels": 32}},
            "images": {**named, "size": "90x120", "void": 11, "rows": 8},
            "train": {"steps": 150, "lr": 2e-3, "device": "cpu"},
        },
        run=tmp_path / "run",
    )
    assert run.scores()["test"]["mean_iou"]["value"] > 12  # road everywhere: 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_recorded_training_follows_eager_training(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The augmentation is recorded too."""
    found = []
    for eager in (False, True):
        options = {"device": "cuda", "precision": "fp32", "steps": 30, "valid_every": 10, "eager": eager}
        over: dict[str, Any] = {
            "model": {"activation": "gelu"},
            "augment": {"randaugment": 1, "crop": "resized", "scale": 0.3},
            "train": options,
        }
        run = kl.train(table(images, **over), run=tmp_path / str(eager))
        found.append([row["loss"] for kind in ("train", "valid") for row in run.metrics(kind)])
        assert "eager mode" not in capsys.readouterr().out
    assert len(found[0]) == 33
    assert found[0] == pytest.approx(found[1], rel=1e-3)
