"""Muon against torch's, against singular value decompositions in float64, and in steps of its own."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.optimizers.hidden_matrices import HiddenMatrix, hidden_matrices
from kilolayer.optimizers.optimizer import Optimizer, make_optimizer
from kilolayer.optimizers.rules.muon import COEFFICIENTS, Orthogonal, orthogonalized
from kilolayer.runs.metrics import read_metrics
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.loop import train
from tests.fixtures.read_nothing import NothingIsRead
from tests.fixtures.small_runs import new_run_of, record, stop_after, task_of

ONE, YES, NO = torch.tensor(1.0), torch.tensor(True), torch.tensor(False)


def muon(**options: Any) -> dict[str, Any]:
    return {"name": "muon", **options}


def decoder(**options: Any) -> nn.Module:
    return kl.build_model(
        kl.ModelConfig(shape="decoder", layers=2, dim=8, heads=2, ffn_dim=24, vocab_size=20, **options), seed=1
    )


def take_step(model: nn.Module, optimizer: Any, seed: int, *, scale: Tensor = ONE, finite: Tensor = YES) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight)
    if not isinstance(optimizer, Optimizer):
        return optimizer.step()
    optimizer.collect()
    found = optimizer.update(scale, finite)
    optimizer.clear()
    return found


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """A decoder's own projections, each as a weight of its own, and the rest."""
    hidden = [module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear) and "blocks" in name]
    return hidden, [weight for weight in model.parameters() if not any(weight is each for each in hidden)]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("factor", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_ten_steps_are_those_of_torchs_muon_and_adamw(factor: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())  # torch's Muon rounds what it multiplies
    model, peer = decoder(), decoder()
    for stack in (model, peer):  # torch's knows no fused projections
        for name, module in stack.named_modules():
            if isinstance(module, nn.Linear) and "blocks" in name:
                module.rows = [module.out_features]  # pyright: ignore[reportAttributeAccessIssue]
    config = TrainConfig(
        optimizer=muon(momentum=0.9, nesterov=nesterov, factor=factor), lr=0.02, weight_decay=0.1, beta2=0.95, eps=1e-6
    )
    ours = make_optimizer(model, config, sums=True)
    hidden, rest = split(peer)
    theirs = torch.optim.Muon(
        hidden, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=factor, ns_coefficients=COEFFICIENTS
    )
    decayed = [{"params": [w for w in rest if w.dim() > 1], "weight_decay": 0.1}, {"params": [w for w in rest if w.dim() < 2]}]
    others = torch.optim.AdamW(decayed, lr=0.02, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    for seed in range(10):
        take_step(model, ours, seed)
        take_step(peer, theirs, seed)
        others.step()
    for (name, a), b in zip(model.named_parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_the_direction_is_the_polynomial_of_each_singular_value(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonalized(matrices, 5), u @ torch.diag_embed(s) @ v, rtol=1e-8, atol=1e-10)
    assert ((s > 0.3) & (s < 1.25)).all()
    cosine = (orthogonalized(matrices, 5) * (u @ v)).sum() / (orthogonalized(matrices, 5).norm() * (u @ v).norm())
    assert cosine > 0.97  # that of the sign of the singular values


@pytest.mark.parametrize("transposed", [False, True])
def test_each_projection_of_a_fused_matrix_and_each_expert_is_a_matrix_of_its_own(transposed: bool) -> None:
    rule = Orthogonal(0.95, True, 5, "original", HiddenMatrix((8, 4, 4), transposed), 0.0)
    inputs = torch.randn(3, 2, 16, 6, dtype=torch.float64)  # weights, experts, rows, columns
    found = rule.directions(inputs.mT).mT if transposed else rule.directions(inputs)
    for weight in range(3):
        for expert in range(2):
            for start, rows in ((0, 8), (8, 4), (12, 4)):
                u, s, v = torch.linalg.svd(inputs[weight, expert, start : start + rows], full_matrices=False)
                s = s / s.norm()
                for _ in range(5):
                    s = COEFFICIENTS[0] * s + COEFFICIENTS[1] * s**3 + COEFFICIENTS[2] * s**5
                expected = math.sqrt(max(1, rows / 6)) * (u * s) @ v
                torch.testing.assert_close(found[weight, expert, start : start + rows], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "recipe": "sub_ln"}, {"moe": {"experts": 4, "every": 1}}])
def test_hidden_matrices_are_the_projections_of_layers(options: dict[str, Any]) -> None:
    model = decoder(**options)
    hidden = hidden_matrices(model)
    names = {name: hidden[weight] for name, weight in model.named_parameters() if weight in hidden}
    assert all(".blocks." in name and name.endswith("weight") for name in names)
    assert not any("router" in name or "norm" in name or "embedding" in name for name in names)
    assert all(sum(hidden[weight].rows) == weight.shape[-2] for weight in hidden)
    assert HiddenMatrix((8, 4, 4) if "kv_heads" in options else (8, 8, 8)) in names.values()
    assert any("experts" in name for name in names) == ("moe" in options)


def test_frozen_experts_are_left_alone() -> None:
    model = decoder(moe={"experts": 4, "every": 1})
    kl.freeze_experts(model)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", weight_decay=0.1), sums=True)
    take_step(model, optimizer, 0)
    still = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
    assert still == {name for name in before if "router" in name or "experts" in name}


def test_rates_of_a_layer_and_of_a_recipe_multiply_the_step() -> None:
    config = TrainConfig(optimizer="muon", lr=0.01, layer_decay=0.5)
    model = decoder(recipe={"name": "complete_p", "base_depth": 1, "base_width": 4})
    plain = copy.deepcopy(model)
    factors = {name: each.lr for name, _, each in kl_factors(model, 0.5)}
    assert len(set(factors.values())) > 3
    optimizer = make_optimizer(model, config, sums=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    take_step(model, optimizer, 3)
    hidden = hidden_matrices(plain)
    for name, weight in plain.named_parameters():
        if weight not in hidden:
            continue
        generator, gradient = torch.Generator().manual_seed(3), None
        for other, each in plain.named_parameters():
            drawn = torch.randn(each.shape, generator=generator)
            gradient = drawn if other == name else gradient
        rule = Orthogonal(0.95, True, 5, "match_rms_adamw", hidden[weight], 0.0)
        assert gradient is not None
        expected = 0.01 * factors[name] * rule.directions(gradient[None])[0]
        torch.testing.assert_close(before[name] - model.get_parameter(name), expected, rtol=1e-3, atol=1e-6)


def kl_factors(model: nn.Module, layer_decay: float) -> Any:
    from kilolayer.optimizers.weight_factors import trained_weights

    return trained_weights(model, layer_decay)


@pytest.mark.parametrize("moe", [None, {"experts": 4, "every": 1}])
def test_a_step_reads_nothing_and_a_skipped_one_changes_nothing(moe: Any) -> None:
    model, peer = decoder(moe=moe), decoder(moe=moe)
    config = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.1)
    waiting, other = make_optimizer(model, config), make_optimizer(peer, config)
    other.groups = [group for group in other.groups if isinstance(group.rule, Orthogonal)]
    other.waits = False
    for seed, finite in enumerate((NO, YES, NO, YES)):
        gradient = torch.randn((), generator=torch.Generator().manual_seed(seed)) if finite else torch.tensor(math.nan)
        take_step(model, waiting, seed, finite=finite)
        generator = torch.Generator().manual_seed(seed)
        for weight in peer.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator) * (1 if finite else gradient)
        with NothingIsRead():
            other.update(ONE, finite)
    assert float(other.taken) == float(waiting.taken) == 2
    for name in other.precise():
        torch.testing.assert_close(peer.get_parameter(name), model.get_parameter(name), rtol=1e-5, atol=1e-6)


def test_state_goes_round_to_the_bit() -> None:
    config = TrainConfig(optimizer=muon(factor="original"), lr=0.02, weight_decay=0.1)
    straight, broken = decoder(), decoder()
    whole, first = (make_optimizer(each, config, sums=True) for each in (straight, broken))
    for seed in range(3):
        take_step(straight, whole, seed)
        take_step(broken, first, seed)
    fresh = make_optimizer(broken, config, sums=True)
    fresh.load({name: tensor.clone() for name, tensor in first.tensors().items()})
    for seed in range(3, 6):
        take_step(straight, whole, seed)
        take_step(broken, fresh, seed)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), broken.parameters(), strict=True))
    names = whole.tensors()
    assert "embedding.weight/square" in names
    assert {name.partition("/")[0] for name in names if name.endswith("/mean") and f"{name[:-5]}/square" not in names} == {
        name for name, weight in straight.named_parameters() if weight in hidden_matrices(straight)
    }


def test_rounded_weights_follow_fp32_masters() -> None:
    model, peer = decoder(), decoder()
    precise = model.cast_weights(torch.bfloat16, torch.float32)  # pyright: ignore[reportCallIssue]
    config = TrainConfig(optimizer="muon", lr=1e-4)
    ours, theirs = make_optimizer(model, config, precise, sums=True), make_optimizer(peer, config, sums=True)
    for seed in range(5):
        take_step(model, ours, seed)
        take_step(peer, theirs, seed)
    for name, master in ours.precise().items():
        torch.testing.assert_close(master, peer.get_parameter(name), rtol=0.05, atol=2e-4)
        assert torch.equal(model.get_parameter(name), master.to(model.get_parameter(name).dtype))


def test_the_health_of_a_stack_is_told_by_the_momentum() -> None:
    model = decoder()
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", lr=0.01), sums=True)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    take_step(model, optimizer, 0)
    for group, (norms, changes) in zip(optimizer.groups, optimizer.health() or [], strict=True):
        for name, norm, change in zip(group.names, norms, changes, strict=True):
            gradient = group.state["mean"][group.names.index(name)] / (1 - getattr(group.rule, "momentum", 0.9))
            assert float(norm) == pytest.approx(float(gradient.norm()), rel=1e-4)
            moved = float((model.get_parameter(name) - before[name]).detach().norm())
            assert moved == pytest.approx(float(change), rel=0.3)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("options", [{"precision": "fp32", "accumulate": 2}, {"precision": "bf16"}])
def test_a_stopped_run_goes_on_to_the_bit(
    tmp_path: Path, corpus: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"optimizer": "muon", "weight_decay": 0.1, "lr": 3e-3, "steps": 20, "layers_every": 4, "clip_norm": 1.0}
    sections = {"model": {"moe": {"experts": 2, "every": 2}}, "train": {**usual, **options}}
    whole, broken = (new_run_of("causal_lm", tmp_path / name, corpus, **sections) for name in ("whole", "broken"))
    assert train(whole, task_of(whole)) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        assert train(broken, task_of(broken)) == 143
    assert train(broken, task_of(broken), resume=True) == 0
    assert record(whole) == record(broken)
    rows = read_metrics(whole.folder)
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5
    assert [row["step"] for row in rows if row["kind"] == "stacks"] == [10, 20]


def test_groups_say_which_weights_it_takes_and_torchs_muon_takes_them() -> None:
    model = decoder(recipe={"name": "complete_p", "base_depth": 1, "base_width": 4})
    groups = kl.parameter_groups(model, lr=0.01, weight_decay=0.1, layer_decay=0.5, optimizer="muon")
    taken = {weight for group in groups if group["optimizer"] == "muon" for weight in group["params"]}
    assert taken == set(hidden_matrices(model))
    assert {group["optimizer"] for group in groups} == {"muon", "adamw"}
    assert not any("eps" in group for group in groups if group["optimizer"] == "muon")
    torch.optim.Muon([group for group in groups if group["optimizer"] == "muon"])
    plain = kl.parameter_groups(model, lr=0.01, weight_decay=0.1, layer_decay=0.5)
    assert not any("optimizer" in group for group in plain)
    rates = {weight: group["lr"] for group in plain for weight in group["params"]}
    assert rates == {weight: group["lr"] for group in groups for weight in group["params"]}


def test_the_projections_of_other_libraries_layers_are_found() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 20))
    found = {name: hidden_matrices(model).get(weight) for name, weight in model.named_parameters()}
    assert found["1.layers.0.self_attn.in_proj_weight"] == HiddenMatrix((8, 8, 8))
    assert found["1.layers.1.linear1.weight"] == HiddenMatrix((16,))
    assert found["0.weight"] is found["2.weight"] is found["1.layers.0.norm1.weight"] is None


def test_matrices_that_are_stored_transposed_move_as_those_that_are_not() -> None:
    """GPT-2's matrices are [inputs, outputs]; those of queries, keys and values are one weight."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 20, "n_positions": 8}
    model = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    hidden = hidden_matrices(model)
    block = model.h[0]
    assert hidden[block.attn.c_attn.weight] == HiddenMatrix((8, 8, 8), transposed=True)
    assert hidden[block.mlp.c_proj.weight] == HiddenMatrix((8,), transposed=True)
    layer = nn.Linear(8, 24)
    for rule in (Orthogonal(0.95, True, 5, "original", matrix, 0.0) for matrix in hidden.values()):
        size = sum(rule.matrix.rows)
        gradient = torch.randn(2, layer.in_features if size == 24 else 32, size)
        straight = Orthogonal(0.95, True, 5, "original", HiddenMatrix(rule.matrix.rows), 0.0).directions(gradient.mT)
        torch.testing.assert_close(rule.directions(gradient), straight.mT)
        assert rule.directions(gradient).is_contiguous()  # as the kernel reads it
