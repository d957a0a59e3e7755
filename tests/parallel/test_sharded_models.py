"""`kl.fully_shard` and what `kl.save` writes of shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError
from tests.fixtures.process_pool import ProcessPool
from tests.parallel import sharded_models


def test_shards_of_a_model_with_scalars_train_what_one_process_trains(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(sharded_models.check_sharded, 2, sharded_models.native, "rezero", 1, str(tmp_path))


def test_shards_of_an_adapted_model_train_what_one_process_trains(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(sharded_models.check_sharded, 2, sharded_models.adapted, "complete_p", 1, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(
    ("make", "recipe", "unit"),
    [
        (sharded_models.native, "r_fixup", 2),
        (sharded_models.native, "x0_residual", 3),
        (sharded_models.native, "deepnorm", 4),
        (sharded_models.adapted, "sub_ln", 2),
        (sharded_models.adapted, "layer_scale", 1),
        (sharded_models.adapted, "normformer", 2),
    ],
)
def test_units_of_several_layers(
    pool: ProcessPool, processes: int, make: object, recipe: str, unit: int, tmp_path: Path
) -> None:
    pool.run(sharded_models.check_sharded, processes, make, recipe, unit, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "unit"), [("deepnorm", 1), ("pre_ln", 2), ("rezero", 1)])
def test_compiled_layers_of_shards_train_what_one_process_trains(pool: ProcessPool, recipe: str, unit: int) -> None:
    pool.run(sharded_models.check_compiled, 2, recipe, unit)


def test_what_cannot_be_sharded_or_saved_is_refused(pool: ProcessPool, tmp_path: Path) -> None:
    pool.run(sharded_models.check_refusals, 2, str(tmp_path))


def test_without_processes_the_error_says_how_to_start_them() -> None:
    model = kl.Decoder(13, 16, 2, 24, 2)
    with pytest.raises(InputError, match="torchrun"):
        kl.fully_shard(model)
    with pytest.raises(InputError, match="not a model"):
        kl.fully_shard(list(model.parameters()))  # pyright: ignore
    assert not torch.distributed.is_initialized()
