"""Several processes compute what one computes on all their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.parallel.peers import Peers
from tests.fixtures.process_pool import ProcessPool
from tests.parallel import one_or_many
from tests.parallel.one_or_many import Case, build

CASES = {
    "top-1": Case(kl.MoE(experts=4, top_k=1)),
    "top-2": Case(kl.MoE(experts=8)),
    "top-3 linear": Case(kl.MoE(experts=4, top_k=3, router="linear", z_loss=0.01)),
    "fp32": Case(kl.MoE(experts=8), dtype=torch.float32),
    "fp32 top-1 of translation": Case(kl.MoE(experts=4, top_k=1, z_loss=0.01), "encoder_decoder", dtype=torch.float32),
    "encoder": Case(kl.MoE(experts=4, gate="sigmoid", every=1), "encoder", "deepnorm"),
    "shared shifts": Case(kl.MoE(experts=4), "encoder_decoder", "r_fixup"),
    "capacity": Case(kl.MoE(experts=4, capacity=0.5)),
    "capacity top-1": Case(kl.MoE(experts=4, top_k=1, capacity=0.75, router="linear"), "encoder_decoder"),
    "capacity top-3": Case(kl.MoE(experts=4, top_k=3, capacity=0.6)),
    "second at random": Case(kl.MoE(experts=4, second="random", capacity=0.9)),
    "second drawn": Case(kl.MoE(experts=4, second="sampling")),
    "all to one process": Case(kl.MoE(experts=4, loss_free=1e-3, balance=0.1), crowded=(0, 1)),
    "all to one expert": Case(kl.MoE(experts=4, top_k=1, loss_free=1e-3), crowded=(3,), dtype=torch.float32),
    "over one expert's capacity": Case(kl.MoE(experts=4, top_k=1, loss_free=1e-3, capacity=1.5), crowded=(2,)),
    "recomputed layers": Case(kl.MoE(experts=4, capacity=0.75), recompute="layer"),
    "recomputed in part": Case(kl.MoE(experts=4, second="random"), recompute="selective"),
    "evaluation": Case(kl.MoE(experts=4, capacity=0.5, second="sampling"), training=False),
}


def each_on_two_and_four() -> list[Any]:
    """Every case on two processes and on four; in the quick tests on two and on four in turn."""
    return [
        pytest.param(case, size, id=f"{name}-{size}", marks=() if size == (2, 4)[index % 2] else pytest.mark.slow)
        for index, (name, case) in enumerate(CASES.items())
        for size in (2, 4)
    ]


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("case", "size"), each_on_two_and_four())
def test_many_processes_are_one(pool: ProcessPool, case: Case, size: int) -> None:
    pool.run(one_or_many.check_equal_to_one_process, size, case)


def test_one_process_shares_with_nobody(pool: ProcessPool) -> None:
    pool.run(one_or_many.check_equal_to_one_process, 1, CASES["top-2"])


@pytest.mark.parametrize("recipe", ["sub_ln", "deepnorm"])
def test_experts_start_as_in_the_whole_model(pool: ProcessPool, recipe: str) -> None:
    pool.run(one_or_many.check_start, 4, recipe)


@pytest.mark.parametrize("shape", ["encoder_decoder", "decoder"])
def test_searches_find_what_one_process_finds(pool: ProcessPool, shape: str) -> None:
    pool.run(one_or_many.check_search, 2, shape)


@pytest.mark.parametrize("kind", ["auto", "plain"])
def test_training_is_that_of_one_process(pool: ProcessPool, kind: str) -> None:
    pool.run(one_or_many.check_training, 2, kind)


@pytest.mark.parametrize("kind", ["sparse", "plain"])
def test_all_processes_find_the_norm_of_one(pool: ProcessPool, kind: str) -> None:
    pool.run(one_or_many.check_clipping_in_fp32, 2, kind)


def test_the_balance_loss_is_of_all_tokens(pool: ProcessPool) -> None:
    pool.run(one_or_many.check_balance_of_unequal_batches, 2)


def test_frozen_experts(pool: ProcessPool) -> None:
    pool.run(one_or_many.check_frozen, 2)


COMPILED = {
    "decoder": (Case(kl.MoE(experts=4), recompute="none"), 4),
    "encoder": (Case(kl.MoE(experts=4, every=1, z_loss=0.01), "encoder", "deepnorm", recompute="none"), 3),
    "encoder-decoder": (Case(kl.MoE(experts=4, top_k=1), "encoder_decoder", recompute="none"), 8),
    "capacity": (Case(kl.MoE(experts=4, second="random", capacity=0.75), recompute="none"), 4),
    "second state": (Case(kl.MoE(experts=4), "encoder_decoder", "resi_dual", recompute="none"), 8),
    "recomputed layers": (Case(kl.MoE(experts=4, capacity=0.75), "encoder_decoder", recompute="layer"), 8),
    "recomputed in part": (Case(kl.MoE(experts=4), recompute="selective"), 4),
    "all to one process": (Case(kl.MoE(experts=4, loss_free=1e-3), crowded=(0, 1), recompute="none"), 4),
}


@pytest.mark.parametrize(
    ("case", "graphs"),
    [pytest.param(*given, id=name, marks=pytest.mark.slow) for name, given in COMPILED.items()],
)
def test_compiled_layers_that_share_experts(pool: ProcessPool, case: Case, graphs: int) -> None:
    pool.run(one_or_many.check_compiled, 2, case, graphs)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "layer"])
def test_dropout_of_compiled_layers_that_share_experts(pool: ProcessPool, recompute: str) -> None:
    # Random numbers in dense layers are kept by a pass of another backend of the compiler.
    case = Case(kl.MoE(experts=4, every=1), dtype=torch.float32, dropout=0.2, recompute=recompute)
    pool.run(one_or_many.check_dropout_of_compiled, 2, case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "recompute", "size", "backend", "autocast"),
    [
        ("decoder", "none", 2, "gloo", False),
        ("decoder", "selective", 2, "gloo", False),
        ("decoder", "layer", 2, "gloo", True),
        ("encoder_decoder", "none", 2, "gloo", True),
        ("decoder", "none", 1, "nccl", True),  # NCCL takes one process for each GPU
    ],
)
def test_compiled_layers_on_the_gpu(
    pool: ProcessPool, shape: str, recompute: str, size: int, backend: str, autocast: bool
) -> None:
    case = Case(kl.MoE(experts=4), shape, dtype=torch.float32, recompute=recompute)
    pool.run(one_or_many.check_compiled_on_gpu, size, case, backend, autocast, seconds=400)  # others compile beside it


def test_mistakes_tell_the_fix(pool: ProcessPool) -> None:
    pool.run(one_or_many.check_mistakes, 2)


def test_states_do_not_depend_on_the_number_of_processes(pool: ProcessPool, tmp_path: Path) -> None:
    case = Case(kl.MoE(experts=8, loss_free=1e-3), recipe="sub_ln", dtype=torch.float32)
    for size in (4, 1):
        path = tmp_path / f"{size}.safetensors"
        pool.run(one_or_many.save_state, size, path, 8)
        for other in (1, 2, 4):
            pool.run(one_or_many.load_state, other, path, 8)
        pool.run(one_or_many.load_other_state, 2, path)
        whole = build(case)
        expected = {name: value.clone() for name, value in whole.state_dict().items()}
        whole.load_state_dict(safetensors.torch.load_file(path))  # names and shapes are those of the whole model
        for name, value in whole.named_parameters():
            assert torch.equal(value, 1.5 * expected[name]), name
        again = build(case)
        kl.load_full_state_dict(again, kl.full_state_dict(whole))
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in again.state_dict().items())


@pytest.mark.slow
def test_64_experts_of_4_processes_load_on_1_2_and_8(tmp_path: Path) -> None:
    pool, path = ProcessPool(tmp_path, sizes=(1, 2, 4, 8)), tmp_path / "state.safetensors"
    try:
        pool.run(one_or_many.save_state, 4, path, 64)
        for size in (1, 2, 8):
            pool.run(one_or_many.load_state, size, path, 64)
    finally:
        pool.stop()


def test_without_processes_the_fix_is_told() -> None:
    with pytest.raises(InputError, match="there is no process group"):
        kl.shard_experts(build(Case(kl.MoE(experts=4))))
    with pytest.raises(InputError, match="no other process shares"):
        kl.reduce_gradients(build(Case(kl.MoE(experts=4))))


def test_parts_lie_side_by_side() -> None:
    parts = [Peers(None, rank, 8).part(64) for rank in range(8)]  # pyright: ignore[reportArgumentType]
    assert [expert for part in parts for expert in part] == list(range(64))
