"""A language model is trained by the same loop: exact resume, accumulation, early stopping."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer import recipes
from kilolayer.data.windows import TextBatch
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.runs import checkpoint
from kilolayer.runs.metrics import read_metrics
from kilolayer.speed.fast import compile_layers
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.causal_lm.task import CausalLMTask
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.loop import train
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import DTYPES
from tests.fixtures.small_runs import bytes_of, new_text_run, record, stopped_and_resumed, task_of

CALIBRATED = [name for name in recipes.names() if recipes.get(name).calibration() is not None]
PIECES = {"kind": "unigram", "vocab_size": 330}
VARIANTS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "pieces": {"tokenizer": PIECES},
    "byte-level BPE": {"tokenizer": {"kind": "byte_bpe", "vocab_size": 330}},
    "dropout, accumulation, norms of layers": {"model": {"dropout": 0.2}, "train": {"accumulate": 3, "layers_every": 1}},
    "calibrated": {"model": {"recipe": CALIBRATED[0]}},
    "bf16": {"train": {"precision": "bf16"}},
    "experts": {
        "model": {"moe": {"experts": 4, "second": "sampling", "capacity": 1.0}},
        "train": {"log_every": 4, "clip_norm": 0.1, "precision": "bf16", "recompute": "layer"},
    },
    "validation before the break": {"train": {"valid_every": 2}},
    "several epochs": {"text": {"length": 64}, "batches": {"tokens": 4096}},
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps_and_three_more_are_six_to_the_bit(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    whole, broken = (new_text_run(tmp_path / name, corpus, **VARIANTS[variant]) for name in ("whole", "broken"))
    found = stopped_and_resumed(whole, broken, monkeypatch)
    if variant == "several epochs":
        assert json.loads(found["state"])["batches"]["epoch"] > 0


def test_every_step_reads_batches_of_one_shape(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    take = Stepper.step

    def note(stepper: Stepper, batches: Any, *arguments: Any) -> Any:
        seen.extend(tuple(part.shape for part in batch.parts) for batch in batches)
        assert all(part.min() >= 3 for batch in batches for part in batch.parts)  # nothing is padding
        return take(stepper, batches, *arguments)

    monkeypatch.setattr(Stepper, "step", note)
    run = new_text_run(tmp_path / "run", corpus, train={"accumulate": 2})
    train(run, task_of(run))
    assert set(seen) == {((8, 16), (8, 16))}
    assert len(seen) == 12


def stepper_of(model_options: dict[str, Any] | None = None, device: str = "cpu", **options: Any) -> Stepper:
    config = TrainConfig(**{"lr": 1e-2, "warmup_steps": 0, "label_smoothing": 0.0, **options})
    sizes = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "vocab_size": 30, "pad_id": None}
    dtype = torch.float64 if device == "cpu" else torch.float32
    model = kl.build_model(kl.ModelConfig(shape="decoder", **sizes, **(model_options or {})), device, dtype, seed=1)
    precise = model.cast_weights(DTYPES[config.precision]) if config.precision in DTYPES else None
    sums = device == "cpu" or config.accumulate > 1
    optimizer = make_optimizer(model.train(), config, precise, sums=sums, runtime=FAST)
    return Stepper(model, optimizer, config, Guard(scaled=False), torch.device(device), pytest.fail, runtime=FAST)


def test_accumulated_windows_are_one_batch_of_their_union() -> None:
    tokens = torch.randint(3, 30, (12, 9))

    def batch(rows: slice) -> TextBatch:
        inputs, labels = tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous()
        return TextBatch(inputs, labels, labels.numel())

    whole, apart = stepper_of(), stepper_of(accumulate=3)
    one = whole.step([batch(slice(0, 12))], 1e-2)
    three = apart.step([batch(slice(0, 2)), batch(slice(2, 9)), batch(slice(9, 12))], 1e-2)
    assert (one.tokens, three.tokens) == (96, 96)
    assert (three.loss, three.nll) == pytest.approx((one.loss, one.nll), rel=1e-6)
    assert three.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-6)
    for (name, a), b in zip(whole.model.named_parameters(), apart.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=name)


def random_batch(seed: int, rows: int = 8, length: int = 12) -> TextBatch:
    tokens = torch.randint(3, 30, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return TextBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows * length)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler warns about itself
def test_a_layer_without_padding_is_compiled_once() -> None:
    options = {"positions": "rotary", "recipe": recipes.get("sub_ln")}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, plain = stepper_of(options), stepper_of(options)
    compile_layers(compiled.form, "aot_eager")
    for seed in range(3):
        one, other = compiled.step([random_batch(seed)], 1e-2), plain.step([random_batch(seed)], 1e-2)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"precision": "bf16"}])
def test_recorded_steps_follow_eager_ones(options: dict[str, Any]) -> None:
    recorded, eager = (stepper_of(device="cuda", eager=eager, **options) for eager in (False, True))
    count = options.get("accumulate", 1)
    for step in range(60):
        batches = [random_batch(step * count + part) for part in range(count)]
        ours, theirs = recorded.step(batches, 1e-3), eager.step(batches, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, rel=0.02 if "precision" in options else 1e-4)
    assert len(recorded.recorder.recordings) == count  # one for the step, or one for the batches and one for the update


def test_two_tables_start_without_an_opinion_and_one_repeats_what_it_reads() -> None:
    tokens = torch.randint(3, 200, (4, 32))
    surest = {}
    for tied in (False, True):
        sizes = {"layers": 4, "dim": 64, "heads": 2, "ffn_dim": 128, "vocab_size": 200, "pad_id": None}
        model = kl.build_model(kl.ModelConfig(shape="decoder", tie_embeddings=tied, **sizes), seed=1).eval()
        with torch.no_grad():
            surest[tied] = float(model(tokens).logits.softmax(dim=-1).gather(-1, tokens[..., None]).mean())
    assert surest[False] < 2 / 200
    assert surest[True] > 0.5


def test_it_learns(tmp_path: Path, corpus: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 60, "valid_every": 20, "lr": 5e-3}, "model": {"dim": 32, "dropout": 0.0}}
    run = new_text_run(tmp_path / "run", corpus, **sections)
    assert train(run, task_of(run)) == 0
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "valid"]
    assert [row["step"] for row in rows] == [20, 40, 60]
    assert rows[0]["bits_per_byte"] > rows[1]["bits_per_byte"] > rows[2]["bits_per_byte"]
    assert rows[-1]["bits_per_byte"] < 4.0  # the frequencies of the bytes alone need 4.2
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row.keys() == {"kind", "step", "loss", "perplexity", "bits_per_byte"}
    log = (run.folder / "log.txt").read_text()
    assert "bits per byte" in log
    assert "DeepNorm 2L, " in log
    assert "batches of 8 x 16" in log


def test_training_stops_when_it_no_longer_gets_better_and_the_best_is_used(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([5.0, 4.0, 4.5, 4.2, 4.1])
    real = CausalLMTask.validate

    def scored(*arguments: Any) -> Any:
        found = real(*arguments)
        assert found is not None
        return type(found)(next(losses) * found.tokens, found.tokens, found.bytes)

    monkeypatch.setattr(CausalLMTask, "validate", scored)
    run = new_text_run(tmp_path / "run", corpus, train={"steps": 40, "valid_every": 2, "patience": 2, "keep": 1})
    assert train(run, task_of(run)) == 0
    assert json.loads(record(run)["state"])["best"] == {"step": 4, "value": -4.0, "waited": 2}
    best = checkpoint.load(checkpoint.path_of(run.checkpoints, 4)).model
    model = run.load_model(torch.device("cpu"))
    assert isinstance(model, kl.Decoder)
    assert all(bytes_of(tensor) == bytes_of(best[name]) for name, tensor in model.state_dict().items())
