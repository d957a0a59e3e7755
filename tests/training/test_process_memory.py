"""The memory of each of several processes, and what they send, is what `kilolayer plan` says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.process_pool import ProcessPool
from tests.training.measured_steps import check_a_step

SMALL = {"shape": "decoder", "layers": 6, "dim": 64, "heads": 4, "ffn_dim": 256, "vocab_size": 200, "recipe": "sub_ln"}
TRANSLATOR = SMALL | {"shape": "encoder_decoder", "layers": 3, "ffn_dim": 250}


@pytest.mark.parametrize("shard", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_two_processes_hold_and_send_what_is_planned(pool: ProcessPool, shard: str) -> None:
    pool.run(check_a_step, 2, 1, "bf16", {"shard": shard}, SMALL | {"layers": 8})


FORMS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "fp32", {"shard": "none"}, SMALL),
    (1, "fp32", {"shard": "full"}, TRANSLATOR),
    (1, "bf16", {"shard": "full", "shard_unit": 2}, SMALL),
    (1, "bf16", {"shard": "full", "reshard_after_forward": False}, SMALL),
    (1, "fp32", {"shard": "full", "reshard_after_forward": False, "accumulate": 2}, TRANSLATOR),
    (1, "bf16", {"shard": "full", "accumulate": 3}, SMALL | {"tie_embeddings": False, "vocab_size": 201}),
    (1, "bf16", {"shard": "full"}, SMALL | {"moe": {"experts": 4}}),
    (1, "bf16", {"shard": "none"}, SMALL | {"moe": {"experts": 4}}),
    (1, "bf16", {"shard": "full", "optimizer": "radam"}, SMALL | {"layers": 12}),
    (2, "fp32", {"shard": "hybrid", "accumulate": 2}, SMALL),
    (2, "bf16", {"shard": "hybrid"}, TRANSLATOR),
]


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "precision", "train", "model"), FORMS, ids=str)
def test_four_processes_hold_and_send_what_is_planned(
    pool: ProcessPool, machines: int, precision: str, train: dict[str, Any], model: dict[str, Any]
) -> None:
    pool.run(check_a_step, 4, machines, precision, train, model)
