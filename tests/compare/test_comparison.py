"""A comparison as a folder: made, opened, extended, and refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.grid import Axis
from kilolayer.config import dump, load, merge
from kilolayer.errors import InputError, KilolayerError, OptionError
from tests.fixtures.small_runs import new_text_run, table, text_table


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    (tmp_path / "small.toml").write_text(dump(table(corpus)))
    return tmp_path / "small.toml"


def recipes(*names: str) -> Axis:
    return Axis("model.recipe", names)


def test_a_comparison_is_opened_as_it_was_made(tmp_path: Path, config: Path) -> None:
    axes = [recipes("pre_ln", "post_ln"), Axis("layers", (2, "3-1")), Axis("model.dropout", (0, 0.1))]
    made = Comparison.make(tmp_path / "out", config, axes, {"model.dim": 32, "train": {"steps": 7}})
    opened = Comparison.open(tmp_path / "out")
    assert (opened.members, opened.base, opened.axes) == (made.members, made.base, axes)
    assert len(opened.members) == 8
    found = opened.config_of(opened.members[3])
    assert (found.model.recipe.name, found.model.depths.encoder, found.model.depths.decoder) == ("pre_ln", 3, 1)
    assert (found.model.dim, found.model.dropout, found.train.steps) == (32, 0.1, 7)
    assert {result.outcome.kind for result in opened.results()} == {"waiting"}


def test_the_file_of_a_run_is_its_configuration(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln"), Axis("layers", ("3-1",))])
    assert load(made.config_path(made.members[0]))["model"] == {
        **{name: value for name, value in load(config)["model"].items() if name != "layers"},
        "recipe": "pre_ln",
        "encoder_layers": 3,
        "decoder_layers": 1,
    }


def test_further_values_are_added_and_what_is_there_stays(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln"), Axis("train.lr", (0.1, 0.2))])
    before = [member.name for member in made.members]
    made.extend([recipes("post_ln"), Axis("train.lr", (0.2, 0.3))])
    opened = Comparison.open(tmp_path / "out")
    assert [member.name for member in opened.members][:2] == before
    assert sorted((member.options["model.recipe"], member.options["train.lr"]) for member in opened.members) == [
        (recipe, rate) for recipe in ("post_ln", "pre_ln") for rate in (0.1, 0.2, 0.3)
    ]


def test_an_option_that_did_not_vary_has_had_the_bases_value(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln", "post_ln")])
    made.extend([Axis("train.seed", (1, 2)), Axis("layers", (2,)), Axis("train.clip_norm", (1.0,))])
    assert [member.name for member in made.members][:2] == ["pre_ln", "post_ln"]
    assert made.members[0].options == {
        "model.recipe": "pre_ln",
        "train.seed": 1,
        "layers": 2,
        "train.clip_norm": 0.0,
    }
    assert len(made.members) == 2 * 2 * 1 * 2


def test_the_bases_recipe_is_known_with_its_options(tmp_path: Path, corpus: Path) -> None:
    for name, recipe, expected in (("a", "admin", "admin"), ("b", {"name": "deepnorm", "alpha_scale": 2.0}, None)):
        (tmp_path / f"{name}.toml").write_text(dump(table(corpus, model={"recipe": recipe})))
        made = Comparison.make(tmp_path / name, tmp_path / f"{name}.toml", [Axis("train.seed", (1,))])
        made.extend([recipes("pre_ln")])
        assert made.members[0].options["model.recipe"] == (expected or {"name": "deepnorm", "alpha_scale": 2.0})


def test_single_runs_may_be_added(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln"), Axis("model.dim", (16,))])
    made.add([{"model.recipe": "post_ln", "model.dim": 32}, {"model.recipe": "pre_ln", "model.dim": 16}])
    assert [member.name for member in Comparison.open(tmp_path / "out").members] == ["pre_ln-dim16", "post_ln-dim32"]


def test_names_of_single_runs_tell_what_differs_and_stay_when_more_does(tmp_path: Path, config: Path) -> None:
    shared = {"layers": 2, "train.steps": 20, "train.warmup_steps": 1, "train.seed": 1}
    settings = [{"model.recipe": "sub_ln", **shared, "train.lr": lr} for lr in (0.1, 0.2)]
    made = Comparison.make(tmp_path / "out", config, settings=settings)
    before = ["sub_ln-2L-seed1-lr0.1", "sub_ln-2L-seed1-lr0.2"]
    assert [member.name for member in made.members] == before
    longer = {**settings[0], "train.steps": 40}
    again = Comparison.make_or_extend(tmp_path / "out", config, settings=[*settings, longer, {**longer, "train.lr": 0.3}])
    names = [member.name for member in again.members]
    assert names == [*before, "sub_ln-2L-steps40-seed1-lr0.1", "sub_ln-2L-steps40-seed1-lr0.3"]
    # What names have told once, they go on telling, also where it does not differ among the new ones.
    again.extend([Axis("train.seed", (2,))])
    assert [member.name for member in again.members[:4]] == names
    assert all("-steps" in member.name and "warmup" not in member.name for member in again.members[4:])
    assert Comparison.open(tmp_path / "out") == again


def test_an_axis_of_one_value_is_told(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln"), Axis("train.lr", (0.1,))])
    made.extend([recipes("post_ln")])
    assert [member.name for member in made.members] == ["pre_ln-lr0.1", "post_ln-lr0.1"]


def test_a_comparison_of_long_names_goes_on_with_them(tmp_path: Path, config: Path) -> None:
    Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])
    path = tmp_path / "out" / "comparison.toml"
    options = 'options = {"model.recipe" = "pre_ln", "train.steps" = 20, "train.seed" = 1}'
    path.write_text(f'started_in = "/"\n[[runs]]\nname = "pre_ln-steps20-seed1"\n{options}\n')
    found = Comparison.open(tmp_path / "out")
    setting = {"model.recipe": "pre_ln", "train.steps": 20}
    found.add([{**setting, "train.seed": 1}, {**setting, "train.seed": 2}])
    assert [member.name for member in found.members] == ["pre_ln-steps20-seed1", "pre_ln-steps20-seed2"]


def test_the_same_command_given_twice_extends(tmp_path: Path, config: Path) -> None:
    Comparison.make_or_extend(tmp_path / "out", config, [recipes("pre_ln")])
    again = Comparison.make_or_extend(tmp_path / "out", config, [recipes("pre_ln", "post_ln")])
    assert len(again.members) == 2
    again.members[0].folder.mkdir(parents=True)
    (again.members[0].folder / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match="of another configuration"):
        Comparison.make_or_extend(tmp_path / "out", config, [recipes("pre_ln")], {"model.dim": 8})


def test_a_comparison_of_which_no_run_has_begun_gives_way_to_a_corrected_one(tmp_path: Path, config: Path) -> None:
    before = Comparison.make_or_extend(tmp_path / "out", config, [recipes("pre_ln")])
    before.config_path(before.members[0])
    after = Comparison.make_or_extend(tmp_path / "out", config, [recipes("pre_ln", "post_ln")], {"model.dim": 8})
    assert [member.options["model.recipe"] for member in Comparison.open(tmp_path / "out").members] == ["pre_ln", "post_ln"]
    assert load(after.config_path(after.members[0]))["model"]["dim"] == 8


def test_without_a_configuration_the_embedded_one_gets_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr("kilolayer.tasks.translation.config.write_corpus", written.append)
    made = Comparison.make(tmp_path / "out", None, [recipes("pre_ln")])
    folder = load(made.config_path(made.members[0]))["data"]["folder"]
    assert Path(folder) == tmp_path / "out" / "data"
    assert written == [tmp_path / "out" / "data"]


BAD: list[tuple[list[Axis], dict[str, Any], str]] = [
    ([recipes("pre_ln", "deepnrm")], {}, "did you mean 'deepnorm'"),
    ([Axis("train.lrr", (1,))], {}, "unknown option"),
    ([Axis("train.lr", (1e-3, -1.0))], {}, "lr is -1.0"),
    ([Axis("train.lr", ("fast",))], {}, "lr is 'fast'"),
    ([recipes("deepnorm", "pre_ln"), Axis("model.recipe.alpha_scale", (2,))], {}, "alpha_scale"),
    ([Axis("layers", (0,))], {}, "layers is 0"),
    ([Axis("train.min_lr", (1e-5,))], {}, "has no effect"),
    ([Axis("model.dim", (15,))], {}, "heads"),
    ([recipes("pre_ln")], {"model.dmi": 3}, "did you mean 'dim'"),
]


@pytest.mark.parametrize(("axes", "options", "words"), BAD)
def test_a_mistake_in_any_run_is_found_before_anything_is_written(
    tmp_path: Path, config: Path, axes: list[Axis], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(KilolayerError, match=words) as refused:
        Comparison.make(tmp_path / "out", config, axes, options)
    assert "in the run " in refused.value.where
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_an_extension_leaves_the_comparison_as_it_was(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])
    text = (tmp_path / "out" / "comparison.toml").read_text()
    with pytest.raises(OptionError):
        made.extend([Axis("train.lr", (-1.0,))])
    assert (tmp_path / "out" / "comparison.toml").read_text() == text
    assert len(made.members) == 1


def test_too_many_runs_are_a_slip(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.compare.comparison.MOST_RUNS", 20)
    with pytest.raises(OptionError, match="more than 20 runs"):
        Comparison.make(tmp_path / "out", config, [Axis("train.seed", tuple(range(30)))])


def test_a_billion_runs_are_refused_at_once(tmp_path: Path, config: Path) -> None:
    many = tuple(range(1, 2000))
    axes = [Axis("train.seed", many), Axis("train.steps", many), Axis("model.dim", many)]
    with pytest.raises(OptionError, match="more than 10,000 runs"):
        Comparison.make(tmp_path / "out", config, axes)


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, config: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="the folder is not empty"):
        Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])


@pytest.mark.parametrize(
    "text",
    [
        "runs = 3",
        'started_in = "/"\nruns = [{name = "../../x", options = {}}]',
        'started_in = "/"\nruns = [{name = "", options = {}}]',
        'started_in = "/"\nruns = [{options = {}}]',
        'started_in = "/"\nruns = [{name = "a", options = {lr = 3}}]',
        'started_in = "/"\nruns = [{name = "a", options = 3}]',
        'started_in = "/"\nnamed = 3\nruns = [{name = "a", options = {}}]',
        "runs = [",
    ],
)
def test_a_strangers_comparison_is_read_with_care(tmp_path: Path, config: Path, text: str) -> None:
    Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])
    (tmp_path / "out" / "comparison.toml").write_text(text)
    with pytest.raises(KilolayerError):
        Comparison.open(tmp_path / "out")


def test_what_is_no_comparison_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this is not a comparison"):
        Comparison.open(tmp_path)


def test_a_start_from_another_run_gives_its_model(tmp_path: Path, corpus: Path) -> None:
    start = new_text_run(tmp_path / "start", corpus, model={"dim": 32})
    whole = {name: each for name, each in text_table(corpus).items() if name != "model"}
    (tmp_path / "more.toml").write_text(dump(whole))
    made = Comparison.make(tmp_path / "out", tmp_path / "more.toml", [Axis("train.start_from", (str(start.folder),))])
    assert made.config_of(made.members[0]).model.dim == 32


def test_from_python_axes_are_a_table(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("kilolayer.compare.session.run_all", lambda *given: asked.append(given) or 0)
    axes = {"model.recipe": ["pre_ln", "post_ln"], "layers": [2]}
    comparison = kl.run_comparison(config, axes, folder=tmp_path / "out", train={"steps": 3}, parallel=5, seconds=60)
    assert [member.name for member in comparison.members] == ["pre_ln-2L", "post_ln-2L"]
    assert asked == [(comparison, 5, 60)]
    assert (tmp_path / "out" / "comparison.json").exists()


@pytest.mark.parametrize(
    ("axes", "more", "words"),
    [
        ({"model.recipe": "pre_ln"}, {}, "model.recipe is 'pre_ln'"),
        ({"train.seed": 3}, {}, "train.seed is 3"),
        ({"train.seed": []}, {}, "train.seed has no values"),
        (None, {}, "there is nothing to compare"),
        (3, {}, "axes is 3"),
        ({"train.seed": [1]}, {"parallel": -1}, "parallel is -1"),
        ({"train.seed": [1]}, {"parallel": 1.5}, "parallel is 1.5"),
        ({"train.seed": [1]}, {"seconds": 0}, "seconds is 0"),
        ({"train.lr": [1e-3, 2e-3]}, {"train": {"lr": 1}}, "train.lr is both"),
        ({"layers": [1, 2]}, {"model": {"decoder_layers": 3}}, "model.decoder_layers is both"),
    ],
)
def test_from_python_a_mistake_is_refused_before_anything_is_written(
    tmp_path: Path, config: Path, axes: Any, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        kl.run_comparison(config, axes, folder=tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


def test_from_python_values_are_what_python_holds(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.compare.session.run_all", lambda *given: 0)
    axes = {"model.recipe": [kl.recipes.get("deepnorm", alpha_scale=2.0), "pre_ln"], "model.kv_heads": [None, 1]}
    made = kl.run_comparison(config, axes, folder=tmp_path / "out")
    first, *_, last = (made.config_of(member).model for member in Comparison.open(made.folder).members)
    assert (first.recipe, first.kv_heads) == (kl.recipes.get("deepnorm", alpha_scale=2.0), None)
    assert (last.recipe, last.kv_heads) == (kl.recipes.get("pre_ln"), 1)


def test_a_run_that_was_refused_is_trained_with_the_corrected_base(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "c", config, [recipes("pre_ln")])
    assert load(made.config_path(made.members[0]))["model"]["dim"] != 24
    base = made.folder / "base.toml"
    base.write_text(dump(merge(load(base), {"model": {"dim": 24}})))
    again = Comparison.open(made.folder)
    assert load(again.config_path(again.members[0])) == again.table_of(again.members[0])


def test_an_edit_of_the_base_that_is_a_mistake_is_told_with_its_place(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])
    base = made.folder / "base.toml"
    base.write_text(base.read_text().replace("dim = 16", 'dim = "x"', 1))
    with pytest.raises(OptionError, match="dim is 'x'") as refused:
        Comparison.open(made.folder).extend([Axis("train.seed", (1, 2))])
    assert f"in the run pre_ln of {made.folder}" in refused.value.where


def test_runs_that_exist_are_not_laid_over_a_comparison(tmp_path: Path, config: Path, corpus: Path) -> None:
    runs = [new_text_run(tmp_path / name, corpus).folder for name in ("one", "two")]
    made = Comparison.make(tmp_path / "out", config, [recipes("pre_ln")])
    with pytest.raises(OptionError, match="already holds a comparison"):
        kl.compare_runs(runs, out=made.folder)
    assert not (made.folder / "comparison.json").exists()
    with pytest.raises(OptionError, match="there is only one run"):
        kl.compare_runs([runs[0], runs[0] / "."])
    with pytest.raises(OptionError, match="folders is"):
        kl.compare_runs(str(runs[0]))


@pytest.mark.slow
def test_a_comparison_is_extended_by_an_option_of_its_recipe(tmp_path: Path) -> None:
    made = Comparison.make(tmp_path / "made", None, [Axis("model.recipe", ("deepnorm", "post_ln"))])
    with pytest.raises(OptionError):
        made.extend([Axis("model.recipe.alpha_scale", (2.0,))])  # Post-LN has none
    made = Comparison.make(tmp_path / "one", None, [Axis("train.seed", (1,))], {"model.recipe": "deepnorm"})
    made.extend([Axis("model.recipe.alpha_scale", (2.0,))])
    again = Comparison.open(made.folder)
    assert [member.options["model.recipe.alpha_scale"] for member in again.members] == [1.0, 2.0]
    assert [again.config_of(member).model.recipe.options()["alpha_scale"] for member in again.members] == [1.0, 2.0]


def test_a_dense_comparison_is_extended_by_experts_and_then_by_seeds(tmp_path: Path, config: Path) -> None:
    made = Comparison.make(tmp_path / "made", config, [Axis("train.seed", (1,))])
    made.extend([Axis("model.moe.experts", (2,))])
    made.extend([Axis("train.seed", (2,))])
    configs = [made.config_of(member) for member in Comparison.open(made.folder).members]
    found = [(each.train.seed, None if each.model.moe is None else each.model.moe.experts) for each in configs]
    assert found == [(1, None), (1, 2), (2, None), (2, 2)]


def test_a_model_without_experts_is_dense_beside_other_options_of_experts(tmp_path: Path, config: Path) -> None:
    def experts(made: Comparison) -> list[tuple[int, int] | None]:
        found = [made.config_of(member).model.moe for member in made.members]
        return [None if moe is None else (moe.experts, moe.top_k) for moe in found]

    counts, choices = Axis("model.moe.experts", ("none", 4)), Axis("model.moe.top_k", (1, 2))
    assert experts(Comparison.make(tmp_path / "one", config, [counts, choices])) == [None, (4, 1), (4, 2)]
    extended = Comparison.make(tmp_path / "two", config, [counts])
    extended.extend([choices])
    assert experts(extended) == [None, (4, 2), (4, 1)]  # two is what it had


def test_a_run_keeps_its_depth_when_the_depth_of_one_stack_is_varied(tmp_path: Path, corpus: Path) -> None:
    model = {"layers": "none", "encoder_layers": 3, "decoder_layers": 3}
    (tmp_path / "base.toml").write_text(dump(table(corpus, model=model)))
    made = Comparison.make(tmp_path / "made", tmp_path / "base.toml", [Axis("train.seed", (1,))])
    made.extend([Axis("model.decoder_layers", (2,))])
    depths = [made.config_of(member).model.depths for member in made.members]
    assert [(depth.encoder, depth.decoder) for depth in depths] == [(3, 3), (3, 2)]
