"""kilolayer diagnose, as a user types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kilolayer.errors import InputError
from tests.cli.typed_commands import quietly, refused


@pytest.mark.slow
def test_a_configuration_is_diagnosed_with_typed_options(config: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = quietly(
        "diagnose", config, "--model.recipe", "pre_ln", "--train.warmup_steps", "4000", "--out", page, draws=True
    )
    assert code == 0, err
    assert out.startswith("Pre-LN 2L-2L, before training; loss ")
    assert "Healthy: the gradient of the encoder's first layers is " in out
    assert "Adam, learning rate 0.01" in out
    assert page.read_text().count("<svg") >= 8
    assert str(page) in err


@pytest.mark.slow
def test_a_run_has_its_page_and_its_numbers(trained: tuple[Path, str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(trained[0], tmp_path / "run")  # other tests look at what training leaves
    code, out, err = quietly("diagnose", folder, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["measured"]["settings"]["step"] == 6
    assert [change["step"] for change in found["measured"]["changes"]] == [3, 6]
    assert "by layer" in (folder / "diagnose.html").read_text().lower()


def test_mistakes_are_refused_before_any_work(
    config: Path, trained: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = trained
    assert "neither a run nor a configuration" in refused("diagnose", tmp_path / "nothing")[0]
    assert "--train.lr applies to a configuration" in refused("diagnose", folder, "--train.lr", "1e-3")[0]
    assert "--steps applies to a configuration" in refused("diagnose", folder, "--steps", "3")[0]
    assert "a configuration has no checkpoints" in refused("diagnose", config, "--at", "3")[0]
    assert "no complete checkpoint of step 5" in refused("diagnose", folder, "--at", "5")[0]
    nowhere = tmp_path / "nothing" / "page.html"
    with monkeypatch.context() as patch:
        patch.setattr("kilolayer.probe.diagnose.diagnose", lambda *_, **__: pytest.fail("it is measured"))
        assert "cannot be written" in refused("diagnose", config, "--out", nowhere)[0]
    assert "the page must be a file" in refused("diagnose", config, "--out", tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["diagnose", "surface"])
def test_without_a_configuration_it_is_the_embedded_one(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--model.layers", "1", "--model.dim", "8", "--model.heads", "2", "--model.ffn_dim", "8", "--train.device", "cpu"]
    quick = ["--size", "3", "--batches", "1"] if verb == "surface" else []
    code, out, err = quietly(verb, *small, *quick, "--json")
    assert code == 0, err
    assert json.loads(out)
    assert [path.name for path in tmp_path.iterdir()] == (["surfaces"] if verb == "surface" else [])


@pytest.mark.slow
def test_the_embedded_text_is_there_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(config: Any, **_: Any) -> Any:
        has_text = (Path(config.data.folder) / "train.en").stat().st_size > 1000
        raise InputError(f"{has_text}, {config.model.depths.title}", where="here", fix="none")

    monkeypatch.setattr("kilolayer.probe.diagnose.diagnose", measured)
    assert "True, 3L-3L" in refused("diagnose", "--model.layers", "3")[0]
