"""Models as data: what `ModelConfig` and `build_model` take, and where a table comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.config import build, dump, table_of
from kilolayer.errors import OptionError
from kilolayer.runs.run import Run
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig

SMALL: dict[str, Any] = {"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, "vocab_size": 20}


def weights_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("name", kl.recipes.names())
def test_a_recipe_is_given_by_its_name_its_table_or_itself(name: str) -> None:
    recipe = kl.recipes.get(name)
    forms: list[Any] = [name, recipe.table(), recipe]
    assert {kl.ModelConfig(**SMALL, recipe=form).recipe for form in forms} == {recipe}


@pytest.mark.parametrize("name", kl.recipes.names())
def test_a_recipes_table_is_written_and_read(name: str) -> None:
    config = kl.ModelConfig(**SMALL, recipe=kl.recipes.get(name))
    assert kl.ModelConfig(**tomllib.loads(dump(table_of(config)))) == config


def test_a_recipes_table_brings_its_options() -> None:
    table: Any = {"name": "deepnorm", "alpha_scale": 2.0}
    assert kl.ModelConfig(**SMALL, recipe=table).recipe == kl.recipes.get("deepnorm", alpha_scale=2.0)


@pytest.mark.parametrize("task", [each.name for each in registry.all_of() if not each.load_config().brings_model()])
def test_the_model_of_a_runs_file_is_built_from_its_table(task: str) -> None:
    config = build(RunConfig, {"task": task, "model": {"recipe": "sub_ln", "moe": {"experts": 4}}})
    table = tomllib.loads(dump(config.table()))["model"]
    assert kl.ModelConfig(**table) == config.model
    assert kl.ModelConfig(**table).pad_id is config.model.pad_id


def test_tables_of_experts_and_of_a_head_are_read() -> None:
    moe: Any = {"experts": 4, "router_dim": "none"}
    head: Any = {"outputs": 3, "pool": "mean"}
    config = kl.ModelConfig(**SMALL, shape="encoder", moe=moe, head=head)
    assert (config.moe, config.head) == (kl.MoE(experts=4), kl.Head(outputs=3, pool="mean"))
    none: Any = "none"
    assert kl.ModelConfig(**SMALL, moe=none, pad_id=none, kv_heads=none) == kl.ModelConfig(**SMALL, pad_id=None)


def test_a_table_builds_the_model_that_its_configuration_builds() -> None:
    config = kl.ModelConfig(**SMALL, shape="decoder", pad_id=None, recipe=kl.recipes.get("admin", weight="trainable"))
    table = table_of(config)
    assert table["pad_id"] == "none"
    assert weights_equal(kl.build_model(config, seed=3), kl.build_model(table, seed=3))
    assert kl.build_model(table, device="meta").config == config


MISTAKES: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "a number for a recipe": (lambda value: kl.ModelConfig(recipe=value), 3, "recipe is 3"),
    "an unknown recipe": (lambda value: kl.ModelConfig(recipe=value), "depnorm", "did you mean 'deepnorm'"),
    "an unknown option of a recipe": (
        lambda value: kl.ModelConfig(recipe=value),
        {"name": "admin", "weigth": "fixed"},
        "did you mean 'weight'",
    ),
    "a word for experts": (lambda value: kl.ModelConfig(moe=value), "many", "write it as a table"),
    "an unknown option of experts": (lambda value: kl.ModelConfig(moe=value), {"expert": 2}, "did you mean 'experts'"),
    "an unknown option": (lambda value: kl.ModelConfig(**value), {"layrs": 2}, "did you mean 'layers'"),
    "no table": (kl.build_model, "deepnorm", "give a ModelConfig"),
    "an unknown option of a table": (kl.build_model, {"dims": 16}, "did you mean 'dim'"),
    "the tables of a run": (kl.build_model, {"model": SMALL, "train": {}}, 'config["model"]'),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_do(name: str) -> None:
    call, value, text = MISTAKES[name]
    with pytest.raises(OptionError, match="(?s)" + text.replace("[", r"\[").replace("]", r"\]")):
        call(value)


def test_a_run_is_opened_by_the_text_of_its_path(tmp_path: Path) -> None:
    config = build(RunConfig, {"model": {**SMALL, "recipe": "pre_ln"}})
    (tmp_path / "config.toml").write_text(dump(config.table()))
    assert Run.open(str(tmp_path)) == Run.open(tmp_path) == Run(tmp_path, config)


def test_one_depth_serves_both_stacks() -> None:
    sizes: dict[str, Any] = {"vocab_size": 11, "dim": 8, "heads": 2, "ffn_dim": 12}
    both, each = kl.EncoderDecoder(**sizes, layers=2), kl.EncoderDecoder(**sizes, encoder_layers=2, decoder_layers=2)
    assert {name: tensor.shape for name, tensor in both.state_dict().items()} == {
        name: tensor.shape for name, tensor in each.state_dict().items()
    }
    assert kl.EncoderDecoder(**sizes, layers=1, encoder_layers=3).config.depths == kl.recipes.Depths(3, 1)
    for given in ({}, {"encoder_layers": 2}):
        with pytest.raises(OptionError, match="the number of layers is missing"):
            kl.EncoderDecoder(**sizes, **given)


@pytest.mark.parametrize("cls", [kl.Encoder, kl.Decoder, kl.EncoderDecoder])
def test_a_constructor_that_is_given_a_configuration_points_to_build_model(cls: Any) -> None:
    for config in (kl.ModelConfig(layers=2), {"layers": 2}):
        with pytest.raises(OptionError, match=r"kl\.build_model\(config\)"):
            cls(config)
