"""Training models with experts: the router's loss, SparseClip, balance without a loss, and what is noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.data.batches import Batch
from kilolayer.errors import InputError, OptionError
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.moe.layer import expert_parameters, sparse_layers
from kilolayer.moe.router import Router
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.report.page import write_report
from kilolayer.runs.metrics import read_metrics
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training import loop
from kilolayer.training.guard import Guard
from kilolayer.training.step import Stepper
from tests.fixtures.small_runs import last_checkpoint, new_run, task_of

EXPERTS = 4


def some_batch(seed: int, rows: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    source, labels = (torch.randint(4, 30, (rows, length), generator=generator) for length in (5, 7))
    source[0, -2:], labels[1, -3:] = 0, 0
    target = torch.cat([torch.full((rows, 1), 2), labels[:, :-1]], dim=1).masked_fill(labels == 0, 0)
    return Batch(source, target, labels, int((labels != 0).sum()))


def stepper_of(moe: dict[str, Any] | None = None, **options: Any) -> Stepper:
    config = TrainConfig(**{"lr": 1e-2, "warmup_steps": 0, "label_smoothing": 0.0, **options})
    shape = kl.ModelConfig(
        layers=2, dim=16, heads=2, ffn_dim=32, vocab_size=30, moe=kl.MoE(**{"experts": EXPERTS, "every": 1, **(moe or {})})
    )
    model = kl.build_model(shape, seed=1).train()
    optimizer = make_optimizer(model, config, sums=True, runtime=FAST)
    return Stepper(model, optimizer, config, Guard(False), torch.device("cpu"), pytest.fail, runtime=FAST)


def gradients(stepper: Stepper, batch: Batch) -> dict[str, torch.Tensor]:
    """By autograd, of the mean loss with the router's."""
    model = stepper.model
    out = model(batch.source, batch.target)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch.labels.flatten(), ignore_index=0)
    found = torch.autograd.grad(loss + out.router_loss, list(model.parameters()))
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


def norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.mark.parametrize(("clip", "weight"), [("auto", 0.25), ("sparse", 0.25), ("plain", 1.0)])
def test_experts_count_less_in_the_norm_and_everything_is_scaled(clip: str, weight: float) -> None:
    batch, stepper = some_batch(1), stepper_of(clip=clip, clip_norm=0.05, optimizer="adam", beta1=0.5)
    expected = gradients(stepper, batch)
    experts = {name for name, _ in expert_parameters(stepper.model)}
    dense = norm_of([gradient for name, gradient in expected.items() if name not in experts])
    expert = norm_of([expected[name] for name in experts])
    total = (dense**2 + weight * expert**2) ** 0.5
    result = stepper.step([batch], 1e-2)
    assert (result.dense_norm, result.expert_norm) == pytest.approx((dense, expert), rel=1e-5)
    assert result.gradient_norm == pytest.approx(total, rel=1e-5)
    assert result.clipped
    means = {
        name: mean for group in stepper.optimizer.groups for name, mean in zip(group.names, group.state["mean"], strict=True)
    }
    for name, gradient in expected.items():
        # After the first update the running mean is (1 - beta1) times the gradient that was used.
        torch.testing.assert_close(means[name], 0.5 * gradient * 0.05 / total, rtol=1e-4, atol=1e-9)


def test_one_expert_is_clipped_as_torch_clips() -> None:
    batch = some_batch(1)
    stepper = stepper_of({"experts": 1, "top_k": 1}, clip_norm=0.05)
    expected = norm_of(list(gradients(stepper, batch).values()))
    assert stepper.step([batch], 1e-2).gradient_norm == pytest.approx(expected, rel=1e-5)


def test_the_router_counts_as_dense() -> None:
    names = {group.of_experts: group.names for group in stepper_of().optimizer.groups}
    assert any(".router." in name for name in names[False])
    assert all(".experts." in name for name in names[True])


def test_matrices_of_experts_are_decayed_and_their_biases_are_not() -> None:
    decays = {
        name: group.decay
        for group in stepper_of(weight_decay=0.1).optimizer.groups
        for name in group.names
        if ".experts." in name
    }
    assert {name.rsplit(".", 1)[1]: decay for name, decay in decays.items()} == {"weight": 0.1, "bias": 0.0}


def test_the_routers_loss_is_a_part_of_the_step_by_its_share_of_the_tokens() -> None:
    batches = [some_batch(1), some_batch(2, rows=7)]
    stepper = stepper_of({"balance": 0.5}, accumulate=2)
    outs = [stepper.model(batch.source, batch.target) for batch in batches]
    tokens = sum(batch.tokens for batch in batches)
    expected = sum(float(out.router_loss.detach()) * batch.tokens for out, batch in zip(outs, batches, strict=True)) / tokens
    result = stepper.step(batches, 1e-2)
    assert result.loss - result.nll == pytest.approx(expected, rel=1e-4)


def test_loads_without_a_loss_are_evened_out_by_one_move_a_step() -> None:
    batches = [some_batch(1), some_batch(2)]
    stepper = stepper_of({"loss_free": 0.01}, accumulate=2)
    routing = [stepper.model(batch.source, batch.target).routing for batch in batches]
    stepper.step(batches, 1e-2)
    for index, layer in enumerate(sparse_layers(stepper.model).values()):
        load = sum(told[index].load for told in routing).double()
        assert layer.router.selection_bias is not None
        torch.testing.assert_close(layer.router.selection_bias, 0.01 * (load.mean() - load).sign().float())


def test_a_step_that_is_not_finite_leaves_no_trace_of_its_routing() -> None:
    stepper = stepper_of({"loss_free": 0.01})
    stepper.guard.scale = float("inf")
    assert stepper.step([some_batch(1)], 1e-2).fault == "the gradient"
    assert stepper.routing is not None
    assert not any(total.any() for total in (*stepper.routing.total, *stepper.routing.of_step))
    assert not any(layer.router.selection_bias.any() for layer in sparse_layers(stepper.model).values())


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("second", "recompute"), [("all", "none"), ("random", "none"), ("random", "layer"), ("all", "selective")]
)
def test_what_is_noted_of_the_routing_is_what_the_forwards_told(second: str, recompute: str) -> None:
    batches = [some_batch(seed) for seed in range(3)]
    stepper = stepper_of({"capacity": 0.5, "second": second}, lr=1e-12, recompute=recompute)
    torch.manual_seed(7)
    told = [stepper.model(batch.source, batch.target).routing for batch in batches]
    torch.manual_seed(7)
    for batch in batches:
        stepper.step([batch], 1e-12)
    assert stepper.routing is not None
    found = stepper.routing.read()
    source, target = (
        sum(int((tokens != 0).sum()) for tokens in parts)
        for parts in zip(*((b.source, b.target) for b in batches), strict=True)
    )
    assert found["tokens"] == [source, source, target, target]
    assert found["layers"] == ["encoder 1", "encoder 2", "decoder 1", "decoder 2"]
    for index in range(4):
        load = sum(each[index].load for each in told).double()
        assert found["load"][index] == pytest.approx((load / load.sum()).tolist())
        assert found["choices"][index] == int(load.sum())
        assert (found["choices"][index] == 2 * found["tokens"][index]) == (second == "all")
        assert found["entropy"][index] == pytest.approx(sum(float(each[index].entropy) for each in told) / 3, rel=1e-5)
        assert found["dropped"][index] == pytest.approx(sum(float(each[index].dropped) for each in told) / 3, rel=1e-5)
        assert found["dropped"][index] > 0
        assert found["temperature"][index] == pytest.approx(0.3)
    assert not any(value for layer in stepper.routing.read()["load"] for value in layer)


def test_a_run_writes_down_its_routing(tmp_path: Path, corpus: Path) -> None:
    moe = {"moe": {"experts": EXPERTS, "every": 2}}
    run = new_run(tmp_path / "run", corpus, model=moe, train={"log_every": 3, "clip_norm": 0.1})
    assert loop.train(run, task_of(run)) == 0
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "routing"]
    assert [row["step"] for row in rows] == [3, 6]
    for row in rows:
        assert row["layers"] == ["encoder 2", "decoder 2"]
        assert [sum(load) for load in row["load"]] == pytest.approx([1.0, 1.0])
        assert row["dense_norm"] > 0
        assert row["expert_norm"] > 0
        assert row["clipped"] == 3


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"experts": 16, "top_k": 2, "every": 1}, "16 experts, top-2, in every layer"),
        ({"experts": 32, "top_k": 1, "every": 2}, "32 experts, top-1, in every 2nd layer"),
    ],
)
def test_the_first_line_of_a_run_tells_experts_and_active_parameters(
    tmp_path: Path, corpus: Path, moe: dict[str, Any], words: str
) -> None:
    run = new_run(tmp_path / "run", corpus, model={"moe": moe}, train={"steps": 1, "log_every": 1})
    assert loop.train(run, task_of(run)) == 0
    whole = dict(run.load_model(torch.device("cpu")).named_parameters())
    experts = {name: tensor for name, tensor in whole.items() if ".experts." in name}
    count = sum(tensor.numel() for tensor in whole.values())
    asleep = sum(tensor.numel() for tensor in experts.values()) * (moe["experts"] - moe["top_k"]) / moe["experts"]
    assert len(experts) == 4 * (4 if moe["every"] == 1 else 2)  # two matrices and two biases a layer
    first = (run.folder / "log.txt").read_text().splitlines()[0]
    told = f"DeepNorm 2L-2L, {words}, {count / 1e6:.2f} M parameters, {(count - asleep) / 1e6:.2f} M active, on cpu in fp32"
    assert first.endswith(told)


def test_a_linear_router_has_no_temperature_to_tell(tmp_path: Path, corpus: Path) -> None:
    moe = {"moe": {"experts": EXPERTS, "router": "linear"}}
    run = new_run(tmp_path / "run", corpus, model=moe, train={"steps": 2})
    assert loop.train(run, task_of(run)) == 0
    rows = [row for row in read_metrics(run.folder) if row["kind"] == "routing"]
    assert all("entropy" in row and "temperature" not in row for row in rows)
    page = write_report(run.folder).path.read_text(encoding="utf-8")
    assert "Entropy of the gates" in page
    assert "Temperature of the gates" not in page


def test_the_report_of_a_collapsed_run_says_so(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefer_the_third(router: Router, generator: KeyedGenerator) -> None:
        assert router.selection_bias is not None
        router.selection_bias.zero_()[2] = 10.0

    monkeypatch.setattr(Router, "reset_parameters", prefer_the_third)
    run = new_run(tmp_path / "run", corpus, model={"moe": {"experts": EXPERTS, "top_k": 1, "loss_free": 1e-6}})
    assert loop.train(run, task_of(run)) == 0
    page = write_report(run.folder).path.read_text(encoding="utf-8")
    for layer in ("encoder 2", "decoder 2"):
        assert f"Layer {layer} has collapsed: expert 3 takes 100% of the tokens." in page
        assert f"Layer {layer}: 3 of 4 experts are dead, with almost no tokens: 1, 2, 4." in page
    assert "Load of each expert in each layer" in page


def test_sparse_clipping_of_a_dense_model_is_said_once() -> None:
    said: list[str] = []
    config = TrainConfig(clip="sparse", clip_norm=1.0)
    model = kl.build_model(kl.ModelConfig(layers=1, dim=16, heads=2, ffn_dim=32, vocab_size=30), seed=1).train()
    stepper = Stepper(model, make_optimizer(model, config, sums=True), config, Guard(False), torch.device("cpu"), said.append)
    for seed in range(2):
        stepper.step([some_batch(seed)], 1e-3)
    assert len(said) == 1
    assert "without experts" in said[0]


def test_a_kind_of_clipping_without_a_limit_is_refused() -> None:
    with pytest.raises(OptionError, match="no effect without clip_norm"):
        TrainConfig(clip="sparse")


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("precision", "loss_free"), [("fp32", 0.0), ("bf16", 0.0), ("fp32", 1e-2)])
def test_fine_tuning_starts_from_another_run_and_leaves_experts_alone(
    tmp_path: Path, corpus: Path, precision: str, loss_free: float
) -> None:
    moe = {"moe": {"experts": EXPERTS, "loss_free": loss_free}}
    first = new_run(tmp_path / "first", corpus, model=moe)
    assert loop.train(first, task_of(first)) == 0
    options = {"start_from": str(first.folder), "freeze": "experts", "precision": precision}
    second = new_run(tmp_path / "second", corpus, model=moe, train=options)
    assert loop.train(second, task_of(second)) == 0
    before, after = (last_checkpoint(run).model for run in (first, second))
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name]) == (".router." in name or ".experts." in name), name
    rows = [row for row in read_metrics(second.folder) if row["kind"] == "routing"]
    assert all(row["expert_norm"] == 0 for row in rows)


def test_a_start_with_another_vocabulary_or_another_model_is_refused(tmp_path: Path, corpus: Path) -> None:
    first = new_run(tmp_path / "first", corpus)
    assert loop.train(first, task_of(first)) == 0
    for name, options in {
        "vocabulary": {"tokenizer": {"vocab_size": 80}},
        "does not fit the configuration": {"model": {"dim": 32}},
    }.items():
        other = new_run(tmp_path / name, corpus, **options, train={"start_from": str(first.folder)})
        with pytest.raises(InputError, match=name):
            loop.train(other, task_of(other))


def test_there_are_no_experts_to_freeze_in_a_dense_model(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(OptionError, match="without experts"):
        new_run(tmp_path / "run", corpus, train={"freeze": "experts"})


def test_experts_that_have_learned_nothing_are_not_frozen(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(OptionError, match="name a trained run"):
        new_run(tmp_path / "run", corpus, model={"moe": {"experts": 4}}, train={"freeze": "experts"})
