from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build, merge
from kilolayer.data.corruptions import NAMES
from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.image_labels import measure_images, wilson
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.regrid import regridded
from kilolayer.tasks.config import RunConfig
from tests.fixtures.small_runs import prepared


def table(images: Path, **sections: Any) -> dict[str, Any]:
    small = {
        "task": "classify_image",
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "image": {"patch": 4}},
        "images": {**{part: str(images / part) for part in ("train", "valid", "test")}, "size": 16, "rows": 8},
        "train": {"steps": 3, "device": "cpu", "log_every": 1, "layers_every": 0},
    }
    return merge(small, sections)


@pytest.fixture(scope="module")
def run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kl.train(table(images), run=tmp_path_factory.mktemp("runs") / "run")


def task_for(images: Path, **sections: Any) -> Any:
    return prepared(table(images, **sections))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_torch_and_rows_that_fill_up_a_batch_do_not_count(images: Path, smoothing: float) -> None:
    task = task_for(images, train={"label_smoothing": smoothing})
    model = build_model(task.resolve(task.config).model, seed=1)
    pixels, labels = torch.randn(5, 3, 16, 16), torch.tensor([0, 3, 5, 2, -1])
    found = task.loss(model, (pixels, labels), hidden_states=False)
    logits = model(pixels).logits[:4]
    torch.testing.assert_close(
        found.total, F.cross_entropy(logits, labels[:4], label_smoothing=smoothing, reduction="sum"), rtol=1e-5, atol=1e-5
    )
    assert int(found.count) == 4
    shares = torch.rand(5, 6)
    shares = shares / shares.sum(dim=1, keepdim=True)
    shares[4] = 0
    mixed = task.loss(model, (pixels, shares), hidden_states=False)
    expected = F.cross_entropy(logits, shares[:4], label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(mixed.total, expected, rtol=1e-5, atol=1e-5)
    assert int(mixed.count) == 4


def test_labels_are_mixed_on_the_device_only_with_mixup_or_cutmix(images: Path) -> None:
    for augment, shape in (({}, (8,)), ({"mixup": 0.8}, (8, 6))):
        task = task_for(images, augment=augment)
        pixels, labels = task.on_device(next(task.training_batches(1)).parts)
        assert pixels.dtype == torch.float32
        assert labels.shape == shape


def test_scores_by_hand() -> None:
    scores = np.random.default_rng(0).normal(size=(40, 7)).astype(np.float32)
    labels = np.random.default_rng(1).integers(7, size=40)
    found = measure_images(scores, labels)
    ranked = [sorted(range(7), key=lambda index, row=row: -row[index]) for row in scores.tolist()]
    assert found.scores()["accuracy"].value == pytest.approx(
        100 * sum(r[0] == y for r, y in zip(ranked, labels, strict=True)) / 40
    )
    assert found.scores()["top5"].value == pytest.approx(
        100 * sum(y in r[:5] for r, y in zip(ranked, labels, strict=True)) / 40
    )
    assert found.confusion[3, 2] == sum(y == 3 and r[0] == 2 for r, y in zip(ranked, labels, strict=True))
    assert "top5" not in measure_images(scores[:, :5], labels % 5).scores()


@pytest.mark.parametrize(("right", "count"), [(0, 10), (7, 10), (10, 10), (913, 1000)])
def test_the_ends_of_wilsons_interval_are_where_the_normal_test_would_just_reject(right: int, count: int) -> None:
    for end, other in zip(wilson(right, count), (0.0, 1.0), strict=True):
        if end != pytest.approx(other):
            assert abs(right / count - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.959964, rel=1e-4)


def test_a_run_is_scored_shown_and_classifies(
    run: Any, images: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scores = json.loads((run.folder / "scores.json").read_text())
    assert np.array(scores["confusion"]).sum(axis=1).tolist() == [2] * 6
    page = (run.folder / "report.html").read_text()
    assert "Confused most" in page
    assert page.count('<img src="data:image/png;base64,') == 12
    some = sorted((images / "test").rglob("*.png"))
    found = run.classify(some)
    right = sum(each.label == path.parent.name for each, path in zip(found, some, strict=True))
    assert 100 * right / 12 == pytest.approx(scores["test"]["accuracy"]["value"])
    for each in found:
        assert sum(each.probabilities.values()) == pytest.approx(1)
        assert list(each.probabilities.values()) == sorted(each.probabilities.values(), reverse=True)

    with Image.open(some[0]) as opened:
        opened.load()
    for same in (opened, np.asarray(opened), torch.from_numpy(np.asarray(opened).copy())):
        assert run.classify(same).probabilities == pytest.approx(found[0].probabilities)
    opened.resize((32, 32), Image.Resampling.NEAREST).save(tmp_path / "large.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "notes.txt").write_text("no image")
    capfd.readouterr()
    below = run.classify(tmp_path)
    assert "not image files by their names: left out: notes.txt" in capfd.readouterr().err
    assert [(Path(each.image).name, each.fault) for each in below] == [
        ("broken.png", "cannot be decoded"),
        ("large.png", None),
    ]
    with pytest.raises(InputError, match="cannot be decoded"):
        run.classify(tmp_path / "broken.png")
    floats = Image.fromarray(np.zeros((4, 4), np.float32))
    for wrong in (np.zeros((4, 4), np.float32), np.zeros((3, 16, 16), np.uint8), floats):  # channels come last
        with pytest.raises(InputError, match="image 1"):
            run.classify(wrong)

    capfd.readouterr()
    assert main(["classify", str(run.folder), str(some[0]), str(tmp_path), "--json", "--top", "2"]) == 1
    out, err = capfd.readouterr()
    first, broken, large = json.loads(out)
    assert first["label"] == found[0].label
    assert list(first["probabilities"]) == list(found[0].probabilities)[:2]
    assert broken == {"image": str(tmp_path / "broken.png"), "fault": "cannot be decoded"}
    assert "label" in large
    assert "broken.png" in err
    assert main(["classify", str(run.folder), str(some[0])]) == 0
    assert main(["classify", str(run.folder), str(some[0]), "--overlays", str(tmp_path / "overlays")]) == 2
    assert "--overlays has no effect on an image classifier" in capfd.readouterr().err


def test_corruptions_have_the_same_numbers_in_other_batches_and_from_the_command(
    run: Any, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run.corruptions(most=6)
    assert found.images == 6
    assert list(found.errors) == list(NAMES)
    values = [each for errors in found.errors.values() for each in errors]
    assert len(values) == 75
    assert found.mean_corruption_error == pytest.approx(sum(values) / 75)
    assert main(["evaluate", str(run.folder), "--corruptions", "--most", "6", "--json", "--test", str(images / "test")]) == 0
    assert json.loads(capsys.readouterr().out)["errors"] == found.errors
    assert main(["evaluate", str(run.folder), "--most", "6"]) == 2


def test_other_images_are_scored_by_class_too(run: Any, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run.scores()
    capsys.readouterr()
    assert main(["evaluate", str(run.folder), "--test", str(images / "test"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["classes"], found["confusion"]) == (own["classes"], own["confusion"])
    assert main(["evaluate", str(run.folder), "--test", str(images / "test")]) == 0
    assert "accuracy by class" in capsys.readouterr().out


def test_corrupted_images_need_no_training_images(run: Any, images: Path, tmp_path: Path) -> None:
    for part in ("train", "test"):
        shutil.copytree(images / part, tmp_path / part)
    own = {"images": {part: str(tmp_path / part) for part in ("train", "valid", "test")} | {"valid": "none"}}
    moved = kl.train(merge(table(images), own), run=tmp_path / "run")
    shutil.rmtree(tmp_path / "train")
    assert moved.corruptions(most=2).images == 2


def test_it_starts_from_the_body_of_a_model_of_masked_images_of_another_size(images: Path, tmp_path: Path) -> None:
    image = {"size": 32, "patch": 4, "mask_token": True}
    config = ModelConfig(shape="encoder", layers=2, dim=16, heads=2, ffn_dim=32, positions="learned", vocab_size=9, image=image)
    start = build_model(config, seed=5)
    kl.save(start, tmp_path / "start")
    bare = {name: value for name, value in table(images).items() if name != "model"}
    over = {"start_from": str(tmp_path / "start"), "lr": 1e-20}
    tuned = kl.train(merge(bare, {"train": over}), run=tmp_path / "tuned")
    ours, theirs = tuned.model.state_dict(), start.state_dict()
    assert tuned.config.train.layer_decay < 1
    assert ours["positions.weight"].shape == (17, 16)
    grown = regridded(theirs, start.config, tuned.config.model)["positions.weight"]
    expected = F.interpolate(
        theirs["positions.weight"][1:].view(1, 8, 8, 16).permute(0, 3, 1, 2), (4, 4), mode="bicubic", align_corners=False
    )
    torch.testing.assert_close(grown[1:].view(4, 4, 16).permute(2, 0, 1), expected[0])
    for name, weight in ours.items():
        if not name.startswith(("head.", "positions.")):
            torch.testing.assert_close(weight, theirs[name], msg=name)
    torch.testing.assert_close(ours["positions.weight"], grown)

    again = kl.train(merge(table(images), {"train": {"start_from": str(tuned.folder), "lr": 1e-20}}), run=tmp_path / "again")
    torch.testing.assert_close(again.model.state_dict()["head.output.weight"], ours["head.output.weight"])


def test_options_that_fit_drawn_shapes_give_way_to_those_that_are_set() -> None:
    drawn: Any = build(RunConfig, {"task": "classify_image"})
    assert (drawn.model.layers, drawn.model.dim, drawn.augment.crop) == (4, 64, "pad")
    given: Any = build(
        RunConfig,
        {"task": "classify_image", "model": {"encoder_layers": 2}, "augment": {"crop": "resized"}, "train": {"steps": 9}},
    )
    assert (given.model.encoder_layers, given.augment.crop, given.train.steps, given.train.epochs) == (2, "resized", 9, None)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"model": {"image": {"size": 32}}}, "model reads"),
        ({"model": {"image": {"mask_token": True}}}, "mask_token"),
        ({"images": {"train": "none"}}, "none to train"),
        ({"images": {"valid": "none"}, "train": {"patience": 3}}, "patience"),
        ({"model": {"head": "none"}}, "has a head"),
    ],
)
def test_contradictions_are_refused(images: Path, sections: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        build(RunConfig, merge(table(images), sections))


def test_the_plan_counts_patches(images: Path) -> None:
    config = build(RunConfig, table(images))
    work = config.usual_batch(None)
    assert (work.rows, work.length) == (8, 17)


def test_the_plan_counts_the_classes_that_are_listed(images: Path) -> None:
    config: Any = build(RunConfig, merge(table(images), {"images": {"classes": ["a", "b", "c", "d", "e", "f", "g"]}}))
    assert config.model.head.outputs == 7


@pytest.mark.slow
def test_drawn_shapes_are_learned_without_any_data(tmp_path: Path) -> None:
    run = kl.train({"task": "classify_image"}, run=tmp_path / "run", train={"device": "cpu"})
    assert run.scores()["test"]["accuracy"]["value"] > 95


@pytest.mark.slow
def test_cifar10_is_learned(tmp_path: Path) -> None:
    archive = Path(os.environ.get("KILOLAYER_DATA", "/nowhere")) / "cifar10" / "cifar10_jpeg.tar.xz"
    if not archive.exists():
        pytest.skip("needs KILOLAYER_DATA/cifar10")
    run = kl.train(
        {
            "task": "classify_image",
            "model": {"layers": 4, "dim": 96, "heads": 4, "ffn_dim": 192},
            "images": {"train": f"{archive}:train", "test": f"{archive}:test", "valid_share": 0.02, "rows": 64},
            "train": {"steps": 700, "lr": 2e-3, "device": "cpu"},
        },
        run=tmp_path / "run",
    )
    assert run.scores()["test"]["accuracy"]["value"] > 35


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_recorded_training_follows_eager_training(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The augmentation is recorded too."""
    found = []
    for eager in (False, True):
        options = {"device": "cuda", "precision": "fp32", "steps": 30, "valid_every": 10, "eager": eager}
        over: dict[str, Any] = {
            "model": {"activation": "gelu"},
            "augment": {"randaugment": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0},
            "train": options,
        }
        run = kl.train(table(images, **over), run=tmp_path / str(eager))
        found.append([row["loss"] for kind in ("train", "valid") for row in run.metrics(kind)])
        assert "eager mode" not in capsys.readouterr().out
    assert len(found[0]) == 33
    assert found[0] == pytest.approx(found[1], rel=1e-3)
