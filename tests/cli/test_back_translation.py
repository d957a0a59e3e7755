"""Back-translation from end to end: a reverse model, its translations, a model on the mix."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kilolayer.runs.run import Run, cache_folder
from tests.cli.typed_commands import quietly, translate

TINY = ["--train.steps", "2", "--train.valid_bleu", "false"]
MANIFEST = """\
directions = ["en-de"]

[[train]]
files = "train"
upsample = 2

[[train]]
files = "bt"
synthetic = true

[[valid]]
files = "valid"

[[test]]
files = "test"
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["--temperature 1", pytest.param("--beam 5", marks=pytest.mark.slow)])
def test_back_translated_text_is_tagged_and_the_rest_is_shown_twice(
    method: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(config.parent, tmp_path / "corpus")
    code, _, err = quietly("train", config, "--run", tmp_path / "reverse", "--data.directions", '["de-en"]', *TINY)
    assert code == 0, err
    monolingual = "".join(f"{line}\n" for line in (folder / "train.de").read_text(encoding="utf-8").splitlines()[:30])
    code, lines, err = translate(monkeypatch, monolingual.encode(), tmp_path / "reverse", *method.split())
    assert (code, len(lines)) == (0, 30), err
    (folder / "bt.de").write_text(monolingual, encoding="utf-8")
    (folder / "bt.en").write_text("".join(f"{line or '.'}\n" for line in lines), encoding="utf-8")
    (folder / "mixed.toml").write_text(MANIFEST, encoding="utf-8")
    text = config.read_text(encoding="utf-8")
    start, end = text.index("[data]"), text.index("[tokenizer]")
    (folder / "small.toml").write_text(f'{text[:start]}[data]\nmanifest = "{folder}/mixed.toml"\n\n{text[end:]}')
    filters = ["--data.filters.max_ratio", "0", "--data.filters.duplicates", "true"]
    code, _, err = quietly("train", folder / "small.toml", "--run", tmp_path / "mixed", *filters, *TINY)
    assert code == 0, err
    task = Run.open(tmp_path / "mixed").task(cache_folder())
    batches = task.training_batches(seed=1)
    assert batches.mixture.report.kept == 230
    tag, shown = task.tokenizers.source.synthetic_id, {True: 0, False: 0}
    for _ in range(len(batches)):  # one epoch
        sources = next(batches).source.numpy()
        for row in sources[sources.any(axis=1)]:
            shown[bool(row[0] == tag)] += 1
            assert np.count_nonzero(row == tag) <= 1
    assert shown == {True: 30, False: 400}
