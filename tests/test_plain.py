"""Without `speed/` the library is right, and slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kilolayer
from kilolayer.speed.operators import kernels
from tests.fixtures.undrawn_charts import EMPTY

MODULES = """
import itertools
import sys

import torch

import kilolayer as kl

torch.set_num_threads(1)
drops = dict(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1, drop_path=0.1)
sizes = dict(dim=8, heads=2, ffn_dim=12, layers=2, vocab_size=11)
text = torch.tensor([[3, 5, 2, 9, 0], [0, 7, 1, 8, 6]])
count = 0
for recipe, shape, moe in itertools.product(kl.recipes.names(), SHAPES, (None, kl.MoE(experts=4))):
    config = kl.ModelConfig(shape=shape, recipe=kl.recipes.get(recipe), moe=moe, **sizes, **drops)
    model = kl.build_model(config, seed=0).train()
    out = model(text, text) if shape == "encoder_decoder" else model(text)
    (out.logits[text != 0].logsumexp(-1).mean() + out.router_loss).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients), (recipe, shape)
    count += 1
loaded = [name for name in sys.modules if name.startswith("kilolayer.speed")]
assert not loaded, loaded
print(kl.__file__, count)
""".replace("SHAPES", '("encoder", "decoder", "encoder_decoder")')

RUNS = """
import sys

import torch

import kilolayer as kl
from small_plain_runs import text_model, translator

torch.set_num_threads(1)
for table in (translator(), text_model()):
    kl.train(table, run=f"runs/{table['task']}")
reader = kl.load("runs/translation", device="cpu")
assert [isinstance(text, str) for text in reader.translate(["the dog sleeps", "a cat sings"], beam=3)] == [True, True]
assert 0 <= reader.scores()["test"]["bleu"]["value"] <= 100
assert reader.scores(source="valid.en", reference="valid.de")["test"]["bleu"]["value"] >= 0
writer = kl.load("runs/causal_lm", device="cpu")
assert isinstance(writer.generate("the", max_tokens=5, greedy=True), str)
assert writer.scores()["test"]["loss"]["value"] > 0
table = text_model()
table["train"]["steps"] = 2
compared = kl.run_comparison(table, {"model.recipe": ["pre_ln"]}, folder="compared", parallel=1)
(row,) = compared.rows()
assert row["outcome"] != "failed" and not compared.failures()
loaded = [name for name in sys.modules if name.startswith("kilolayer.speed")]
assert not loaded, loaded
print(kl.__file__, row["step"], min(value for value in row.values() if isinstance(value, float)) > 0)
"""

TABLES = '''
"""Small runs, on text that this module writes where it is imported."""

from pathlib import Path

SENTENCES = {"the dog sleeps": "der Hund schläft", "a cat sings": "eine Katze singt", "the cat sees a dog": "die Katze sieht"}
for part in ("train", "valid", "test"):
    for name, lines in (("en", SENTENCES), ("de", SENTENCES.values())):
        Path(f"{part}.{name}").write_text("".join(f"{line}\\n" for line in [*lines] * 10), encoding="utf-8")
MODEL = {"layers": 3, "dim": 32, "heads": 2, "ffn_dim": 64, "dropout": 0.0}
TRAIN = {"steps": 20, "lr": 1e-3, "warmup_steps": 0, "eps": 1e-3, "device": "cpu", "precision": "fp32", "clip_norm": 1.0}


def translator() -> dict:
    return {
        "task": "translation",
        "model": dict(MODEL),
        "data": {"folder": ".", "directions": ["en-de"], "valid": "valid", "test": "test"},
        "tokenizer": {"vocab_size": 40, "byte_fallback": False, "character_coverage": 1.0},
        "batches": {"tokens": 200},
        "train": dict(TRAIN),
    }


def text_model() -> dict:
    text = {part: f"{part}.en" for part in ("train", "valid", "test")}
    return {
        "task": "causal_lm",
        "model": dict(MODEL),
        "text": {**text, "length": 24},
        "tokenizer": {"kind": "bytes"},
        "batches": {"tokens": 200},
        "train": dict(TRAIN),
    }
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has no `speed/` and draws nothing, which would take most of the time."""
    folder, source = tmp_path_factory.mktemp("plain"), Path(kilolayer.__file__).parent
    shutil.copytree(source, folder / "kilolayer", ignore=shutil.ignore_patterns("__pycache__", "speed"))
    with (folder / "kilolayer/report/figure.py").open("a") as file:
        file.write(f"\n\nFigure.savefig = lambda figure, buffer, **options: buffer.write({EMPTY!r})\n")
    (folder / "small_plain_runs.py").write_text(TABLES, encoding="utf-8")
    return folder


def run(program: str, home: Path, folder: Path) -> list[str]:
    """Run a program with that copy; returns the words that it prints, the first of which is the package's file."""
    environment = {**os.environ, "PYTHONPATH": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    imported, *words = done.stdout.split()
    assert Path(imported).parent == home / "kilolayer"
    return words


@pytest.mark.slow
def test_every_model_trains_without_speed(home: Path, tmp_path: Path) -> None:
    assert run(MODULES, home, tmp_path) == [str(len(kilolayer.recipes.names()) * 3 * 2)]


# On a CPU the fast form calls the same modules. The operators' formulas sum in another order, which changes an element of a
# gradient of norm 1 (clipped) by about half a unit in the last place, 2^-24; Adam changes the weight by at most lr / eps = 1
# times that, in each of 20 steps.
NOISE = {"modules": 0.0, "operators": 20 * 2**-24}


@pytest.fixture(scope="module")
def plain(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with runs that were trained, loaded, used and compared without `speed/`, and what was printed."""
    folder = tmp_path_factory.mktemp("plain_runs")
    return folder, run(RUNS, home, folder)


@pytest.mark.parametrize("by", NOISE)
def test_runs_without_speed_end_with_the_weights_of_the_fast_form(
    by: str, plain: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast form as a CPU runs it, and by the operators that a GPU has kernels for, through their plain formulas."""
    monkeypatch.chdir(tmp_path)
    tables: dict[str, Any] = {}
    exec(TABLES, tables)
    for table in (tables["translator"](), tables["text_model"]()):
        with kernels.assumed("cpu") if by == "operators" else nullcontext():
            kilolayer.train(table, run=f"runs/{table['task']}")
        ours, theirs = (weights(folder / "runs" / table["task"]) for folder in (plain[0], tmp_path))
        assert ours.keys() == theirs.keys()
        apart = {name: float((ours[name] - theirs[name]).abs().max()) for name in ours}
        assert max(apart.values()) <= NOISE[by], apart


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step-00000020" / "model.safetensors")


def test_runs_are_compared_without_speed(plain: tuple[Path, list[str]]) -> None:
    assert plain[1] == ["2", "True"]
