"""A run of an image tokenizer on drawn images: it learns, it is resumed to the bit, and a collapse is named."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import build
from kilolayer.data.images import normalized
from kilolayer.errors import InputError, OptionError
from kilolayer.report.record import read_record
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.image_tokenizer.code_use import has_collapsed, perplexity, used_share
from kilolayer.tasks.image_tokenizer.report import ImageTokenizerReport
from kilolayer.tasks.image_tokenizer.task import decibels

pytest.importorskip("PIL")
pytest.importorskip("kornia")

TINY: dict[str, Any] = {
    "task": "image_tokenizer",
    "images": {"size": 16, "rows": 16},
    "model": {"dim": 16, "codes": 32, "code_dim": 8, "blocks": 0},
    "augment": {"crop": "none"},
}
TRAIN: dict[str, Any] = {"steps": 80, "lr": 4e-3, "warmup_steps": 5, "device": "cpu", "threads": 1, "valid_every": 20}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return kl.train(TINY, run=tmp_path_factory.mktemp("tokenizer") / "run", train=TRAIN)


def test_it_learns(trained: Any) -> None:
    psnr = [row["psnr"] for row in trained.metrics("valid")]
    assert len(psnr) == 4
    assert psnr[-1] > psnr[0] + 0.5
    assert not any(row["collapsed"] for row in trained.metrics("valid"))


def test_its_scores_are_those_of_its_codes(trained: Any) -> None:
    """The scores of the test images, from `encode` and `decode` alone."""
    from kilolayer.data.drawn_images import given_or_drawn
    from kilolayer.data.images import find_images
    from kilolayer.runs.run import cache_folder

    images = find_images(given_or_drawn(trained.config.images, cache_folder()), cache_folder(), labelled=False).test
    assert images is not None
    pixels = torch.from_numpy(np.array(images.pixels)).permute(0, 3, 1, 2)
    run: Any = kl.load(trained.folder)
    codes = run.encode(pixels)
    assert codes.shape == (len(images), 16)
    assert torch.equal(run.encode(normalized(pixels[:5])), codes[:5])
    error = (run.decode(codes) - normalized(pixels)).double().square().flatten(1).mean(dim=1)
    scores = trained.scores()
    assert scores["test"]["psnr"]["value"] == pytest.approx(float((10 * torch.log10(4 / error)).mean()), rel=1e-5)
    counts = np.bincount(codes.flatten().numpy(), minlength=32)
    assert scores["code_uses"] == counts.tolist()
    shares = counts[counts > 0] / counts.sum()
    assert scores["test"]["code_perplexity"]["value"] == pytest.approx(
        math.exp(-sum(share * math.log(share) for share in shares))
    )


def test_resumed_it_goes_on_to_the_bit_codes_too(tmp_path: Path) -> None:
    short = {**TRAIN, "steps": 6, "save_every": 3, "keep": 9}
    whole = kl.train(TINY, run=tmp_path / "whole", train=short)
    broken = Path(shutil.copytree(whole.folder, tmp_path / "broken"))
    (broken / "scores.json").unlink()
    shutil.rmtree(broken / "checkpoints/step-00000006")
    torch.manual_seed(77)
    again = kl.train(resume=broken)
    for file in ("model", "optimizer"):
        theirs, ours = (load_file(run.folder / f"checkpoints/step-00000006/{file}.safetensors") for run in (whole, again))
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
        before = load_file(broken / f"checkpoints/step-00000003/{file}.safetensors")
        assert not any(torch.equal(before[name], ours[name]) for name in before if name.startswith("codebook."))
    assert {"codebook.vectors", "codebook.uses", "codebook.sums"} <= set(
        load_file(broken / "checkpoints/step-00000006/model.safetensors")
    )


def test_a_collapse_is_named_in_log_report_and_comparison(trained: Any, tmp_path: Path) -> None:
    """Without restarts, and pulled to one code by a heavy commitment, all patches share a few codes."""
    model = {**TINY["model"], "codes": 256, "restart": 0.0, "commitment": 100.0}
    run = kl.train({**TINY, "model": model}, run=tmp_path / "run", train={**TRAIN, "steps": 20})
    last = run.metrics("valid")[-1]
    assert last["collapsed"] is True
    text = f"256 codes are used like {last['code_perplexity']:.1f}"
    assert f"warning: the codebook has collapsed: {text}" in (run.folder / "log.txt").read_text()
    assert f"The codebook has collapsed: {text}" in (run.folder / "report.html").read_text()
    assert "The codebook has collapsed" in str(kl.compare_runs([run.folder, trained.folder]))
    assert "collapsed" not in (trained.folder / "report.html").read_text()


def test_its_report_shows_images_and_codes(trained: Any) -> None:
    from PIL import Image

    page, scores = (trained.folder / "report.html").read_text(), trained.scores()
    assert f"data:image/png;base64,{scores['reconstructions']}" in page
    picture = Image.open(io.BytesIO(base64.b64decode(scores["reconstructions"])))
    assert picture.size == (12 * 16, 2 * 16)
    assert "Use of the codes" in page
    record = read_record(trained.folder)
    record.scores["reconstructions"] = '"><script>'
    record.scores["code_uses"] = ["many"]
    assert ImageTokenizerReport().sections(record, "") == []


def test_it_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokenizer.toml"
    path.write_text('task = "image_tokenizer"\n[images]\nsize = "32x64"\nrows = 16\n')
    assert main(["plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    model = kl.build_model(build(RunConfig, {"task": "image_tokenizer", "images": {"size": "32x64"}}).model, device="meta")
    assert plan["parameters"]["total"] == sum(weight.numel() for weight in model.parameters())
    assert plan["work"]["batch"] == 16
    assert plan["flops"]["forward_per_token"] > 1e8
    # At least what the first convolution gives, of 16 images.
    assert plan["training_memory"]["activations"] > 16 * 128 * 32 * 64 * 4


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"model": {"height": 8}}, "the model reads images of 8 x 16 pixels in 3 channels, but .images. has 16 x 16 pixels"),
        ({"augment": {"mixup": 0.5}}, "mixup would make images that an image tokenizer is not meant to reconstruct"),
        ({"images": {"size": 16, "classes": ["a", "b"]}}, "classes have no effect on an image tokenizer"),
        ({"train": {"label_smoothing": 0.1}}, "label_smoothing has no effect"),
        ({"images": {"size": 16, "valid": "somewhere"}}, "none to train"),
        ({"model": {"recipe": "deepnorm"}}, "model.recipe has no effect on the task 'image_tokenizer'"),
    ],
)
def test_options_without_a_meaning_are_refused(table: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        build(RunConfig, {**TINY, **table})


def test_code_use() -> None:
    assert perplexity([5, 5, 0, 0]) == pytest.approx(2)
    assert used_share([5, 5, 0, 0]) == 0.5
    assert perplexity([1] * 64) == pytest.approx(64)
    assert has_collapsed(2, 64, 10**6)
    assert not has_collapsed(30, 64, 10**6)
    assert not has_collapsed(30, 10**5, 64)  # few patches cannot use many codes
    np.testing.assert_allclose(decibels(np.array([4.0, 0.04])), [0, 20])


def test_codes_that_do_not_fit_are_refused(trained: Any) -> None:
    with pytest.raises(InputError, match="codes are"):
        trained.decode(np.zeros((1, 3), np.int64))
    with pytest.raises(InputError, match="images are"):
        trained.encode([])
    wrong = np.zeros((1, 3, 3, 3), np.uint8)
    with pytest.raises(InputError, match=r"(?s)images are torch.uint8 .*floating-point numbers from -1 to 1 or uint8"):
        trained.encode(wrong)
    with pytest.raises(InputError, match="numbers up to 255"):
        trained.encode(np.full((1, 3, *trained.config.model.sides), 255.0, np.float32))
