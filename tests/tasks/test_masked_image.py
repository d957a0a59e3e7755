"""Runs that learn from masked images, of pixels and of a tokenizer's codes."""

from __future__ import annotations

import base64
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kilolayer as kl
from kilolayer.config import build, merge
from kilolayer.data.image_batches import batch_of
from kilolayer.data.images import normalized
from kilolayer.errors import InputError, OptionError
from kilolayer.layers.grid_positions import resampled
from kilolayer.models.build import build_model
from kilolayer.report.record import read_record
from kilolayer.runs.run import Run, cache_folder
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.masked_image.code_vocabulary import CodeVocabulary
from kilolayer.tasks.masked_image.report import MaskedImageReport
from kilolayer.tasks.task import digest_of
from tests.fixtures.small_runs import new_run_of, prepared, stopped_and_resumed

TOKENIZER: dict[str, Any] = {
    "task": "image_tokenizer",
    "model": {"dim": 8, "codes": 12, "code_dim": 4, "blocks": 0},
    "train": {"steps": 4, "device": "cpu", "lr": 4e-3},
}
MAE = {"model": {"image": {"decoder": {"layers": 1, "dim": 16, "heads": 2}}}, "masking": {"kind": "random"}}


def sources(images: Path) -> dict[str, Any]:
    return {**{part: str(images / part) for part in ("train", "valid", "test")}, "size": 16, "rows": 8}


@pytest.fixture(scope="module")
def tokenizer(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kl.train({**TOKENIZER, "images": sources(images)}, run=tmp_path_factory.mktemp("tokenizer") / "run").folder


def table(folder: Path, **sections: Any) -> dict[str, Any]:
    small = {
        "task": "masked_image",
        "model": {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "image": {"patch": 4}},
        "images": sources(folder),
        "train": {"steps": 3, "device": "cpu", "log_every": 1, "layers_every": 0},
    }
    return merge(small, sections)


@pytest.fixture(scope="module")
def coded(images: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kl.train(table(images, target={"tokenizer": str(tokenizer)}), run=tmp_path_factory.mktemp("runs") / "run")


def task_for(folder: Path, **sections: Any) -> Any:
    return prepared(table(folder, **sections))


def model_for(task: Any) -> Any:
    return build_model(task.resolve(task.config).model, seed=1).double().eval()


def parts_of(task: Any) -> tuple[torch.Tensor, ...]:
    """The last batch of an epoch, with two rows that only fill up: in fp64."""
    batches = task.training_batches(1)
    for _ in range(3):
        batches.skip()
    batch = next(batches)
    assert batch.tokens == 6 * task.masks.count
    images, order, labels, real = task.on_device(batch.parts)
    assert real.tolist() == [True] * 6 + [False] * 2
    return images.double(), order, labels.double() if labels.is_floating_point() else labels, real


@pytest.mark.parametrize("sections", [{}, MAE], ids=["mask token", "decoder"])
def test_the_loss_of_pixels_is_that_of_a_loop_over_patches(images: Path, sections: dict[str, Any]) -> None:
    task = task_for(images, **sections)
    model, parts = model_for(task), parts_of(task)
    pictures, order, _, _ = parts
    count, visible = task.masks.count, order.shape[1] - task.masks.count
    assert count == (12 if sections else 6)
    expected = 0.0
    for row in range(6):
        hidden = order[row, visible:].tolist()
        if sections:
            outputs = model.reconstruct(pictures[row : row + 1], order[row : row + 1, :visible])[0]
        else:
            outputs = model(pictures[row : row + 1], masked=torch.tensor([[each in hidden for each in range(16)]])).logits[0]
        for patch in hidden:
            top, left = 4 * (patch // 4), 4 * (patch % 4)
            pixels = pictures[row, :, top : top + 4, left : left + 4].numpy().flatten()
            normal = (pixels - pixels.mean()) / np.sqrt(pixels.var(ddof=1) + 1e-6)
            expected += float(((outputs[patch].detach().numpy() - normal) ** 2).mean())
    found = task.loss(model, parts, hidden_states=False)
    assert found.total.item() == pytest.approx(expected, rel=1e-5)
    assert found.nll.item() == found.total.item()
    assert int(found.count) == 6 * count


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_codes_is_the_cross_entropy_of_the_tokenizers(images: Path, tokenizer: Path, smoothing: float) -> None:
    task = task_for(images, target={"tokenizer": str(tokenizer)}, train={"label_smoothing": smoothing})
    assert task.resolve(task.config).model.vocab_size == 12
    model, parts = model_for(task), parts_of(task)
    pictures, order, _, _ = parts
    loaded: Any = kl.load(tokenizer)
    codes = loaded.encode(pictures.float())
    nll = total = 0.0
    for row in range(6):
        hidden = order[row, -6:].tolist()
        scores = model(pictures[row : row + 1], masked=torch.tensor([[each in hidden for each in range(16)]])).logits[0]
        for patch in hidden:
            logs = scores[patch].detach().numpy() - np.logaddexp.reduce(scores[patch].detach().numpy())
            nll -= float(logs[codes[row, patch]])
            total -= float((1 - smoothing) * logs[codes[row, patch]] + smoothing * logs.mean())
    found = task.loss(model, parts, hidden_states=False)
    assert found.nll.item() == pytest.approx(nll, rel=1e-5)
    assert found.total.item() == pytest.approx(total, rel=1e-5)
    assert int(found.count) == 6 * 6


def test_with_a_decoder_a_hidden_pixel_changes_the_target_alone(images: Path) -> None:
    task = task_for(images, **MAE)
    model, parts = model_for(task), parts_of(task)
    pictures, order, labels, _ = parts
    hidden = int(order[0, -1])
    changed = pictures.clone()
    changed[0, :, 4 * (hidden // 4) + 1, 4 * (hidden % 4) + 2] += 0.3
    visible = order[:, :-12]
    assert torch.equal(model(changed, visible=visible).states, model(pictures, visible=visible).states)
    assert torch.equal(model.reconstruct(changed, visible), model.reconstruct(pictures, visible))
    other = task.target.labels(changed, order[:, -12:])
    assert not torch.equal(other[0, -1], labels[0, -1])
    assert model.reconstruct(pictures, visible).shape == (8, 16, 48)
    assert task.model_inputs(parts)["visible"].shape == (6, 4)
    assert set(task_for(images).model_inputs(parts)) == {"images", "masked", "positions"}


def test_training_masks_change_by_epoch_and_validation_masks_never(images: Path) -> None:
    tasks = [task_for(images, train={"seed": seed}) for seed in (1, 2)]
    keys = torch.tensor([[4, 0], [4, 1]])
    assert not torch.equal(*tasks[0].masks(keys))
    assert not torch.equal(tasks[0].masks(keys), tasks[1].masks(keys))
    assert torch.equal(tasks[0].fixed_masks(keys), tasks[1].fixed_masks(keys))
    model = model_for(tasks[0]).float()
    found = [each.validate(model, 10**9) for each in tasks]
    assert found[0].metrics() == found[1].metrics()
    smaller = task_for(images, images={"rows": 5}).validate(model, 10**9)
    assert smaller.loss == pytest.approx(found[0].loss, rel=1e-6)
    assert smaller.patches == 12 * 6


def test_scores_of_pixels_are_those_of_the_pictures(images: Path) -> None:
    """mse: of the reconstruction, with the patch's own mean and deviation, over hidden patches."""
    task = task_for(images)
    model = model_for(task).float()
    found = task.validate(model, 5)
    batch = batch_of(task.valid, np.arange(5) * len(task.valid) // 5, 5)  # from all over the set
    pictures, order = normalized(batch.pixels), task.fixed_masks(batch.keys)
    masked = torch.zeros(5, 16, dtype=torch.bool).scatter(1, order[:, -6:], value=True)
    outputs = model(pictures, masked=masked).logits.detach()
    drawn = task.target.filled(outputs.gather(1, order[:, -6:, None].expand(-1, -1, 48)), pictures, order[:, -6:])
    assert torch.isfinite(drawn).all()
    error = (drawn - pictures).square().sum() / (5 * 6 * 48)
    assert found.metrics()["mse"] == pytest.approx(float(error), rel=0.05)  # the picture is cut off at black and white
    kept = drawn.view(5, 3, 4, 4, 4, 4)[0, :, int(order[0, 0]) // 4, :, int(order[0, 0]) % 4]
    assert torch.equal(kept, pictures.view(5, 3, 4, 4, 4, 4)[0, :, int(order[0, 0]) // 4, :, int(order[0, 0]) % 4])


def test_a_run_is_scored_shown_and_reconstructs(coded: Any, images: Path, tmp_path: Path) -> None:
    scores = coded.scores()
    assert scores["test"]["loss"]["value"] > 0
    assert 0 <= scores["test"]["accuracy"]["value"] <= 100
    picture = Image.open(io.BytesIO(base64.b64decode(scores["reconstructions"])))
    assert picture.size == (12 * 18 - 2, 3 * 18 - 2)
    page = (coded.folder / "report.html").read_text()
    assert f"data:image/png;base64,{scores['reconstructions']}" in page
    assert "Accuracy of masked codes" in page
    record = read_record(coded.folder)
    record.scores["reconstructions"] = '"><script>'
    assert MaskedImageReport().sections(replace(record, valid=[]), "") == []
    again = coded.scores(images / "test")
    assert again["test"] == scores["test"]

    some = sorted((images / "test").rglob("*.png"))
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    found = coded.reconstruct([*some, tmp_path / "broken.png"])
    assert found[-1].fault == "cannot be decoded"
    with Image.open(some[0]) as opened:
        pixels = np.asarray(opened)
    assert np.array_equal(found[0].pixels, pixels)
    hidden = (found[0].masked != pixels).any(axis=2).reshape(4, 4, 4, 4).any(axis=(1, 3))
    assert hidden.sum() == 6
    assert found[0].filled.shape == (16, 16, 3)
    assert np.array_equal(coded.reconstruct(some[0]).filled, found[0].filled)
    assert not np.array_equal(coded.reconstruct(some[0], seed=5).masked, found[0].masked)
    with pytest.raises(InputError, match="cannot be decoded"):
        coded.reconstruct(tmp_path / "broken.png")


def test_a_run_keeps_its_tokenizer_and_refuses_another(coded: Any, tokenizer: Path, images: Path, tmp_path: Path) -> None:
    kept = CodeVocabulary.load(coded.folder)
    assert kept.digest == CodeVocabulary.of_run(tokenizer).digest
    pixels = normalized(torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8))
    original: Any = kl.load(tokenizer)
    assert torch.equal(kept.encode(pixels), original.encode(pixels))
    assert torch.equal(kept.decode(kept.encode(pixels)), original.decode(kept.encode(pixels)))

    moved = Path(shutil.copytree(coded.folder, tmp_path / "moved"))
    config = (moved / "config.toml").read_text()
    assert str(tokenizer) in config
    (moved / "config.toml").write_text(config.replace(str(tokenizer), str(tmp_path / "gone")))
    assert digest_of(Run.open(moved).task(cache_folder()).vocabulary) == kept.digest
    next(iter(kept.model.parameters())).data.add_(1e-3)
    other = CodeVocabulary(kept.model)
    assert other.digest != CodeVocabulary.load(moved).digest
    other.save(moved)
    with pytest.raises(InputError, match="vocabulary is not the one that the checkpoint was trained with"):
        _ = kl.load(moved).model
    with pytest.raises(InputError, match=r"target\.tokenizer cannot change"):
        kl.train(resume=coded.folder, target={"tokenizer": str(tmp_path / "gone")})
    with pytest.raises(InputError, match="this run is a masked image model"):
        task_for(images, target={"tokenizer": str(coded.folder)})
    with pytest.raises(OptionError, match=r"patches of 4, but the model .* patches of 8"):
        task_for(images, target={"tokenizer": str(tokenizer)}, model={"image": {"patch": 8}})


@pytest.mark.slow
def test_codes_are_predicted_by_a_run_that_starts_from_another(
    coded: Any, tokenizer: Path, images: Path, tmp_path: Path
) -> None:
    bare = {name: value for name, value in table(images).items() if name != "model"}
    over = {"start_from": str(coded.folder), "lr": 1e-20}
    again: Any = kl.train(merge(bare, {"train": over}), run=tmp_path / "again")
    assert digest_of(again.tokenizer) == digest_of(coded.tokenizer)
    assert again.scores()["test"] == coded.scores()["test"]
    named = {"target": {"tokenizer": str(tokenizer)}}
    assert kl.train(merge(bare, {"train": over, **named}), run=tmp_path / "named").tokenizer is not None
    named["target"]["tokenizer"] = str(
        kl.train({**TOKENIZER, "images": sources(images)}, run=tmp_path / "x", train={"seed": 5}).folder
    )
    with pytest.raises(OptionError, match="the tokenizer is not that of the run to start from"):
        kl.train(merge(bare, {"train": over, **named}), run=tmp_path / "other")
    for name, weight in again.model.state_dict().items():
        torch.testing.assert_close(weight, coded.model.state_dict()[name], msg=name)


@pytest.mark.parametrize("sections", [{}, MAE], ids=["mask token", "decoder"])
def test_it_goes_on_with_images_of_another_size(images: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    start: Any = kl.train(table(images, **sections), run=tmp_path / "start")
    bare = {name: value for name, value in table(images, **sections).items() if name != "model"}
    over = {"images": {"size": 24}, "train": {"start_from": str(start.folder), "steps": 1, "lr": 1e-20}}
    again: Any = kl.train(merge(bare, over), run=tmp_path / "again")
    assert (start.model.config.image.length, again.model.config.image.length) == (17, 37)
    theirs, ours = start.model.state_dict(), again.model.state_dict()
    for name, weight in ours.items():
        if weight.shape == theirs[name].shape:
            torch.testing.assert_close(weight, theirs[name], msg=name)
    resized = [name for name, weight in ours.items() if weight.shape != theirs[name].shape]
    assert resized == ["positions.weight", *(["decoder.positions.weight"] if sections else [])]
    for name in resized:
        expected = resampled(theirs[name], (4, 4), (6, 6))
        torch.testing.assert_close(ours[name], expected)


@pytest.mark.parametrize("kind", ["codes", "decoder"])
def test_an_image_classifier_starts_from_it(coded: Any, images: Path, tmp_path: Path, kind: str) -> None:
    start = coded if kind == "codes" else kl.train(table(images, **MAE), run=tmp_path / "start")
    tuned = kl.train(
        {"task": "classify_image", "images": sources(images)},
        run=tmp_path / "tuned",
        train={"start_from": str(start.folder), "steps": 1, "lr": 1e-20, "device": "cpu"},
    )
    theirs, ours = start.model.state_dict(), tuned.model.state_dict()
    body = {name for name in ours if not name.startswith("head.")}
    assert body < set(theirs)
    assert any(name.startswith("encoder.") for name in body)
    for name in body:
        torch.testing.assert_close(ours[name], theirs[name], msg=name)
    assert tuned.config.model.vocab_size is None


@pytest.mark.parametrize("sections", ["codes", pytest.param("decoder", marks=pytest.mark.slow)])
def test_stopped_and_resumed_it_is_to_the_bit_the_run_that_was_not(
    sections: str, tokenizer: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"target": {"tokenizer": str(tokenizer)}} if sections == "codes" else MAE
    whole, broken = (new_run_of("masked_image", tmp_path / name, corpus, **over) for name in ("whole", "broken"))
    stopped_and_resumed(whole, broken, monkeypatch)


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"target": {"kind": "codes"}}, "no tokenizer is given"),
        ({"target": {"kind": "pixels", "tokenizer": "somewhere"}}, "tokenizer has no effect on pixels"),
        ({"model": {"vocab_size": 7}}, "vocab_size is 7, but a patch has 48 pixels"),
        ({"model": {"image": {"mask_token": False}}}, "mask token"),
        (merge(MAE, {"model": {"image": {"mask_token": True}}}), "mask token"),
        ({"model": {"image": {"patch": 16}}}, "one patch"),
        ({"masking": {"block": 7}}, "a block of 7 patches is more than the 6"),
        ({"augment": {"mixup": 0.5}}, "mixup would make images"),
        ({"train": {"label_smoothing": 0.1}}, "label_smoothing has no effect"),
        ({"images": {"train": "none"}}, "none to train"),
        ({"masking": {"rate": 0.15}}, "masking.rate has no effect on the task 'masked_image'"),
    ],
)
def test_options_without_a_meaning_are_refused(images: Path, sections: dict[str, Any], what: str) -> None:
    with pytest.raises(OptionError, match=what):
        build(RunConfig, table(images, **sections))


def test_the_plan_counts_what_is_read_and_predicted(images: Path, tokenizer: Path) -> None:
    plain = build(RunConfig, table(images, target={"tokenizer": str(tokenizer)}))
    assert plain.model.vocab_size == 12
    work = plain.usual_batch(None)
    assert (work.rows, work.length, work.scored) == (8, 17, 6)
    work = build(RunConfig, table(images, **MAE)).usual_batch(None)
    assert (work.rows, work.length, work.scored) == (8, 5, None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
@pytest.mark.parametrize("kind", ["codes", "decoder"])
def test_a_gpu_draws_the_same_masks_and_has_the_same_scores(images: Path, tokenizer: Path, tmp_path: Path, kind: str) -> None:
    over: dict[str, Any] = {"target": {"tokenizer": str(tokenizer)}} if kind == "codes" else MAE
    keys = torch.stack([torch.arange(400), torch.arange(400) // 7], dim=1)
    task = task_for(images, **over)
    # Another rounding may give a block another side.
    assert (task.masks(keys) == task.masks(keys.cuda()).cpu()).all(dim=1).float().mean() > 0.98
    model = model_for(task).float()
    expected = task.validate(model, 10**9).metrics()
    assert task.validate(model.cuda(), 10**9).metrics() == pytest.approx(expected, rel=0.02)
    run = kl.train(table(images, **merge(over, {"train": {"device": "cuda", "steps": 6}})), run=tmp_path / "run")
    losses = [row["loss"] for row in run.metrics("train")]
    assert len(losses) == 6
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_it_learns_from_drawn_images(tmp_path: Path) -> None:
    """Far below the loss of what is likely without reading the image: the codes' frequencies, or the mean of pixels, 0."""
    small = {
        "images": {"size": 16, "rows": 32},
        "augment": {"crop": "none"},
        "train": {"device": "cpu", "lr": 3e-3, "steps": 300, "warmup_steps": 20},
    }
    tokens = kl.train(
        merge(TOKENIZER, {"images": small["images"], "augment": small["augment"], "train": {"steps": 150}}),
        run=tmp_path / "tokenizer",
    )
    for name, over in (("codes", {"target": {"tokenizer": str(tokens.folder)}}), ("pixels", {}), ("decoder", MAE)):
        run = kl.train(merge({"task": "masked_image", **small}, over), run=tmp_path / name)
        marginal = 47 / 48 if name != "codes" else run.metrics("reference")[0]["frequency_loss"]
        assert run.metrics("valid")[-1]["loss"] < 0.85 * marginal


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_recorded_training_follows_eager_training(
    images: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Augmentation, blocks and codes are recorded too."""
    found: list[list[float]] = []
    for eager in (False, True):
        options = {"device": "cuda", "precision": "fp32", "steps": 30, "valid_every": 10, "eager": eager}
        over: dict[str, Any] = {
            "model": {"activation": "gelu"},
            "augment": {"crop": "resized"},
            "train": options,
            "target": {"tokenizer": str(tokenizer)},
        }
        run = kl.train(table(images, **over), run=tmp_path / str(eager))
        found.append([row["loss"] for kind in ("train", "valid") for row in run.metrics(kind)])
        assert "eager mode" not in capsys.readouterr().out
    assert len(found[0]) == 33
    assert found[0] == pytest.approx(found[1], rel=1e-3)
