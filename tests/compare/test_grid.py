"""The combinations of a comparison, their names, and the configurations that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.compare.grid import (
    Axis,
    apply_setting,
    axes_of,
    differing,
    join_axes,
    name_of,
    parse_axis,
    settings_of,
    shown_value,
)
from kilolayer.errors import OptionError


def test_settings_are_every_combination_in_order() -> None:
    found = settings_of([Axis("model.recipe", ("a", "b")), Axis("layers", (6, "60-12")), Axis("train.seed", (1, 2))])
    assert found == [
        {"model.recipe": recipe, "layers": layers, "train.seed": seed}
        for recipe in ("a", "b")
        for layers in (6, "60-12")
        for seed in (1, 2)
    ]


def test_without_axes_there_is_one_run() -> None:
    assert settings_of([]) == [{}]
    assert name_of({}) == "run"


def test_names_tell_the_values() -> None:
    setting = {"model.recipe": "deepnorm", "layers": 18, "train.lr": 4e-4, "model.dropout": 0, "train.seed": 1}
    assert name_of(setting) == "deepnorm-18L-lr0.0004-dropout0-seed1"
    assert name_of({"layers": "60-12", "train.save_best": False}) == "60L-12L-save_best=false"
    assert name_of({"a.dim": 1, "b.dim": 2}) == "a.dim1-b.dim2"


def test_names_tell_the_options_that_are_named_and_else_all() -> None:
    setting = {"model.recipe": "sub_ln", "layers": 12, "train.steps": 20, "train.seed": 1}
    assert name_of(setting, ["train.seed", "layers", "model.recipe", "train.lr"]) == "sub_ln-12L-seed1"
    assert name_of({"train.lr": 0.1, "a.dim": 2}, ["layers"]) == "lr0.1-dim2"


def test_options_differ_by_another_value_or_by_none() -> None:
    settings = [{"a.x": 1, "b.y": 2, "c.z": 3}, {"a.x": 1.0, "b.y": 4}]
    assert differing(settings) == ["b.y", "c.z"]
    assert differing(settings[:1]) == []


VALUES = st.one_of(
    st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text(max_size=300)
)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=2, unique_by=repr))
def test_other_values_have_other_names_that_are_names_of_folders(pairs: list[tuple[Any, Any]]) -> None:
    one, other = (Axis("a.x", (x,)).values + Axis("b.y", (y,)).values for x, y in pairs)
    same_values = all(len(Axis("a.x", (a, b)).values) == 1 for a, b in zip(one, other, strict=True))
    names = [name_of({"a.x": x, "b.y": y}) for x, y in (one, other)]
    for name in names:
        assert name not in ("", ".", "..")
        assert not set(name) & set("/\0\n\\")
        assert len(name.encode()) < 200
    if not same_values and "-" not in "".join(str(value) for value in (*one, *other)):
        assert names[0] != names[1]


def test_values_are_read_as_toml_and_else_as_text() -> None:
    assert parse_axis("train.lr", "4e-4, 8e-4,1").values == (4e-4, 8e-4, 1)
    assert parse_axis("model.recipe", "post_ln,pre_ln").values == ("post_ln", "pre_ln")
    assert parse_axis("train.beta1", ".5,5.,-.5e1").values == (0.5, 5.0, -5.0)
    assert parse_axis("train.save_best", "true,false").values == (True, False)
    assert parse_axis("data.directions", '["en-de","de-en"],["en-de"]').values == (["en-de", "de-en"], ["en-de"])
    assert parse_axis("model.recipe", '{name="deepnorm", alpha="one"},"a,b"').values == (
        {"name": "deepnorm", "alpha": "one"},
        "a,b",
    )


def test_equal_values_count_once() -> None:
    assert Axis("train.lr", (1, 1.0, 2)).values == (1, 2)
    assert Axis("a.b", (True, 1, "1")).values == (True, 1, "1")


def test_axes_of_one_name_are_joined() -> None:
    joined = join_axes([Axis("a.x", (1,)), Axis("b.y", (5,)), Axis("a.x", (2, 1))])
    assert joined == [Axis("a.x", (1, 2)), Axis("b.y", (5,))]


def test_axes_are_found_in_settings() -> None:
    assert axes_of([{"a.x": 1, "b.y": 2}, {"a.x": 3}]) == [Axis("a.x", (1, 3)), Axis("b.y", (2,))]


@pytest.mark.parametrize("name", ["lr", "", "train.", ".lr", "train lr", "train.lr=3"])
def test_what_is_no_option_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="is not an option"):
        Axis(name, (1,))


@pytest.mark.parametrize("layers", [6.5, True, "6-", "a", "6-6-6", [6]])
def test_what_is_no_depth_is_refused(layers: object) -> None:
    with pytest.raises(OptionError, match="layers is"):
        Axis("layers", (layers,))


@pytest.mark.parametrize("text", ["", "1,,2", ",", "1,"])
def test_missing_values_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"a value of train.lr is empty"):
        parse_axis("train.lr", text)


def test_a_depth_replaces_all_depths_of_the_base() -> None:
    base = {"model": {"encoder_layers": 18, "decoder_layers": 18, "dim": 64}}
    assert apply_setting(base, {"layers": 6}) == {"model": {"layers": 6, "dim": 64}}
    assert apply_setting({"model": {"layers": 6}}, {"layers": "60-12"}) == {
        "model": {"encoder_layers": 60, "decoder_layers": 12}
    }
    assert base["model"]["encoder_layers"] == 18


def test_a_recipe_replaces_the_bases_with_its_options() -> None:
    base = {"model": {"recipe": {"name": "admin", "weight": "trainable"}}}
    assert apply_setting(base, {"model.recipe": "post_ln"}) == {"model": {"recipe": "post_ln"}}
    assert apply_setting(base, {"model.recipe.weight": "fixed"}) == {"model": {"recipe": {"name": "admin", "weight": "fixed"}}}


def test_other_values_are_laid_over_the_base_whatever_their_order() -> None:
    setting = {"model.recipe.alpha": "one", "train.lr": 1.0, "model.recipe": "deepnorm"}
    found = apply_setting({"train": {"lr": 2.0, "steps": 5}}, setting)
    assert found == {"model": {"recipe": {"name": "deepnorm", "alpha": "one"}}, "train": {"lr": 1.0, "steps": 5}}


def test_a_table_shows_values_as_people_write_them() -> None:
    assert shown_value("layers", 6) == "6L"
    assert shown_value("layers", "60-12") == "60L-12L"
    assert shown_value("train.lr", 4e-4) == "0.0004"
    assert shown_value("model.recipe", {"name": "deepnorm", "alpha": "one"}) == "deepnorm alpha=one"
