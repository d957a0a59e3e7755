"""A recipe in a user's own file: registered, named in configurations, trained, resumed, planned and compared."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.compare.comparison import Comparison
from kilolayer.compare.flat_options import plain_recipe
from kilolayer.compare.grid import Axis
from kilolayer.config import build
from kilolayer.data.grammar import pairs
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.recipes import registry
from tests.fixtures.commands import typed

CODE = '''
import kilolayer as kl

@kl.recipes.register
class HalfBranch(kl.recipes.Recipe):
    """Pre-LN whose branches are multiplied by a number."""

    factor: float = kl.recipes.bounded(0.5, above=0, most=1)
    """Of each branch."""

    def plan(self, place):
        return kl.recipes.Plan(pre_norm=True, branch=self.factor)

    def top(self, side, depths):
        return kl.recipes.Top(norm=True)


class Unregistered(HalfBranch):
    """Found by its path alone."""
'''
TINY = [
    "--model.layers=2",
    "--model.dim=16",
    "--model.heads=2",
    "--model.ffn_dim=32",
    "--text.length=16",
    "--batches.tokens=128",
]
TINY += ["--train.warmup_steps=2", "--train.device=cpu", "--tokenizer.kind=bytes"]
SMALL: dict[str, Any] = {"vocab_size": 11, "dim": 8, "heads": 2, "ffn_dim": 12, "layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The recipe's file, on the path, and a text."""
    folder = tmp_path_factory.mktemp("own_recipe")
    (folder / "half_branch.py").write_text(CODE)
    (folder / "book.txt").write_text("\n".join(german for _, german in pairs(200, seed=1, unseen=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(registry, "_registry", registry._registry.copy())
        yield folder
    sys.modules.pop("half_branch", None)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The registry, as it was before the test once this is over."""
    monkeypatch.setattr(registry, "_registry", registry._registry.copy())
    return registry._registry


def own_class(**members: Any) -> type[kl.recipes.Recipe]:
    plan = {"plan": lambda self, place: kl.recipes.Plan(out_norm=True)}
    return type("Mine", (kl.recipes.Recipe,), {"__qualname__": "Mine", **plan, **members})


def test_a_cell_of_a_notebook_may_be_run_twice(known: dict[str, Any]) -> None:
    first, second = (kl.recipes.register(own_class()) for _ in range(2))
    assert first is not second
    assert kl.recipes.find("mine") is second
    assert kl.recipes.names().count("mine") == 1
    assert kl.Encoder(**SMALL, recipe="mine").config.recipe == second()


def test_a_name_that_another_recipe_has_is_refused_with_the_fix(known: dict[str, Any]) -> None:
    kl.recipes.register(own_class())
    with pytest.raises(OptionError, match=r"the recipe 'mine' is that of (?s:.*)another name: name ="):
        kl.recipes.register(own_class(__qualname__="Other"))
    with pytest.raises(OptionError, match="the recipe 'deepnorm' is built in"):
        kl.recipes.register(own_class(name="deepnorm"))
    assert kl.recipes.find("deepnorm").__module__ == "kilolayer.recipes.deepnorm"


def test_the_class_gives_name_title_and_options_where_nothing_else_does(known: dict[str, Any]) -> None:
    class MyBestRecipe(kl.recipes.find("deepnorm")):  # pyright: ignore
        """DeepNorm with one option more."""

        extra: int = 3

    made = kl.recipes.register(MyBestRecipe)
    assert (made.name, made.title) == ("my_best_recipe", "MyBestRecipe")
    assert kl.recipes.get("my_best_recipe", extra=5).options()["extra"] == 5
    with pytest.raises(KilolayerError, match="extra is 'many'"):
        kl.recipes.get("my_best_recipe", extra="many")


def test_a_class_whose_fields_are_no_options_yet_tells_to_register_it(known: dict[str, Any]) -> None:
    class Fading(kl.recipes.Recipe):
        power: float = kl.recipes.bounded(0.5, least=0)

        def plan(self, place: kl.recipes.Place) -> kl.recipes.Plan:
            return kl.recipes.Plan(out_norm=True, branch=kl.recipes.PerLayer(self.power))

    for options in ({}, {"power": 1.0}):
        with pytest.raises(InputError, match=r"Fading are not options yet[\s\S]*register"):
            Fading(**options)
    kl.recipes.register(Fading)
    assert kl.Encoder(**SMALL, recipe=Fading(power=1.0)).config.recipe.options() == {"power": 1.0, "init": "derived"}


@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder_decoder"])
def test_it_is_asked_for_sublayers_that_the_model_has_alone(shape: str, known: dict[str, Any]) -> None:
    class OneStack(kl.recipes.Recipe):
        def plan(self, place: kl.recipes.Place) -> kl.recipes.Plan:
            assert place.kind in place.depths.kinds(place.side)
            assert place.kind.value != "cross_attention" or shape == "encoder_decoder"
            return kl.recipes.Plan(pre_norm=True)

    recipe, sizes = kl.recipes.register(OneStack)(), {**SMALL, "layers": None} if shape == "encoder_decoder" else SMALL
    layers = {"encoder_layers": 2, "decoder_layers": 2} if shape == "encoder_decoder" else {}
    config = kl.ModelConfig(shape=shape, recipe=recipe, norm_eps=1e-6, **sizes, **layers)  # pyright: ignore
    assert not recipe.unusual_rates(config.depths, config.dim)


def test_it_is_given_to_constructors_by_its_path_and_computes_what_it_says(folder: Path) -> None:
    model = kl.Decoder(**SMALL, recipe="half_branch:HalfBranch", pad_id=None, dtype=torch.float64)
    plain: Any = kl.Decoder(**SMALL, recipe="pre_ln", pad_id=None, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    for sublayer in plain.decoder.sublayers():
        sublayer.f.output.weight.data *= 0.5  # biases start at 0
    tokens = torch.randint(11, (2, 5))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_a_table_keeps_its_path_and_its_options(folder: Path) -> None:
    for path in ("half_branch:HalfBranch", "half_branch:Unregistered"):
        config = build(kl.ModelConfig, {"recipe": {"name": path, "factor": 0.25}})
        assert config.recipe.table() == {"name": path, "factor": 0.25, "init": "derived"}
        assert kl.recipes.parse(config.recipe.table()) == config.recipe
    assert plain_recipe({"name": "half_branch:HalfBranch", "factor": 0.5}) == "half_branch:HalfBranch"
    assert plain_recipe({"name": "half_branch:HalfBranch", "factor": 1}) == {"name": "half_branch:HalfBranch", "factor": 1}


def test_a_run_of_it_is_trained_resumed_planned_and_used(folder: Path) -> None:
    words = [
        *TINY,
        f"--text.train={folder / 'book.txt'}",
        "--model.recipe=half_branch:HalfBranch",
        "--model.recipe.factor=0.25",
    ]
    (folder / "base.toml").write_text('task = "causal_lm"')
    code, _, err = typed("train", folder / "base.toml", "--run", folder / "run", *words, "--train.steps=3")
    assert code == 0, err
    kept = tomllib.loads((folder / "run/config.toml").read_text())["model"]["recipe"]
    assert kept == {"name": "half_branch:HalfBranch", "factor": 0.25, "init": "derived"}
    assert typed("train", "--resume", folder / "run")[0] == 0
    assert typed("generate", folder / "run", "--prompt", "Ein")[0] == 0
    code, out, err = typed("plan", folder / "run/config.toml", "--json")
    assert code == 0, err
    assert json.loads(out)
    assert "HalfBranch" in typed("recipes", "half_branch:HalfBranch")[1]


def test_it_is_compared(folder: Path) -> None:
    (folder / "base.toml").write_text('task = "causal_lm"\n[text]\ntrain = "book.txt"\n')
    axes = [Axis("model.recipe", ("half_branch:HalfBranch", "pre_ln")), Axis("layers", (2,))]
    Comparison.make(folder / "comparison", folder / "base.toml", axes)
    opened = Comparison.open(folder / "comparison")
    assert [opened.config_of(member).model.recipe.title for member in opened.members] == ["HalfBranch", "Pre-LN"]
    assert opened.members[0].options["model.recipe"] == "half_branch:HalfBranch"


@pytest.mark.parametrize("value", ["half_branch", {"name": "half_branch", "factor": 0.25}])
def test_compared_by_a_name_that_only_this_process_knows_it_asks_for_module_and_class(value: Any, folder: Path) -> None:
    kl.recipes.get("half_branch:HalfBranch")
    (folder / "base.toml").write_text('task = "causal_lm"\n[text]\ntrain = "book.txt"\n')
    with pytest.raises(OptionError, match="processes of their own, which do not know the recipe 'half_branch'") as refused:
        kl.run_comparison(folder / "base.toml", {"model.recipe": [value]}, folder=folder / "named")
    assert refused.value.fix == 'name it by its module and class: "half_branch:HalfBranch"'
    assert not (folder / "named").exists()


def test_compared_from_a_notebook_it_asks_for_a_file(
    known: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noted(kl.recipes.Recipe):
        def plan(self, place: Any) -> Any:
            return kl.recipes.Plan(pre_norm=True)

    Noted.__module__, Noted.__qualname__ = "__main__", "Noted"
    made = kl.recipes.register(Noted)
    monkeypatch.setattr(sys.modules["__main__"], "Noted", made, raising=False)
    (folder / "base.toml").write_text('task = "causal_lm"\n[text]\ntrain = "book.txt"\n')
    for recipe in ("noted", made(), "__main__:Noted"):
        with pytest.raises(OptionError, match="processes of their own") as refused:
            kl.run_comparison(folder / "base.toml", {"model.recipe": [recipe, "pre_ln"]}, folder=folder / "noted")
        assert "my_module:Noted" in refused.value.fix


def test_a_plan_that_is_none_says_so_wherever_it_is_used(known: dict[str, Any]) -> None:
    @kl.recipes.register
    class Forgotten(kl.recipes.Recipe):
        def plan(self, place: Any) -> Any:
            kl.recipes.Plan(pre_norm=True)

    class Planless(kl.recipes.Recipe):
        pass

    for use in (
        lambda: kl.Decoder(**SMALL, recipe="forgotten"),
        lambda: kl.adapt(torch.nn.TransformerEncoderLayer(8, 2, 12), "forgotten"),
        lambda: kl.recipes.get("forgotten").plan(Any),
    ):
        with pytest.raises(InputError, match="plan of the recipe Forgotten returns None") as refused:
            use()
        assert "return kilolayer.recipes.Plan(" in refused.value.fix
    with pytest.raises(InputError, match="Planless has no plan method"):
        kl.Decoder(**SMALL, recipe=Planless())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepnrom", "did you mean 'deepnorm'"),
        ("half_branch:", "recipe is 'half_branch:'"),
        ("no_such_module:Recipe", "there is no module 'no_such_module'"),
        ("json:JSONDecoder", "is not a recipe"),
        ("json:Nothing", "has no 'Nothing'"),
        ("kilolayer.recipes.base:Recipe", "has no plan"),
    ],
)
def test_a_recipe_that_is_none_is_refused(name: str, what: str) -> None:
    with pytest.raises((InputError, OptionError)) as caught:
        build(kl.ModelConfig, {"recipe": name})
    assert what in caught.value.what


def test_a_name_is_no_recipe_to_register() -> None:
    with pytest.raises(InputError, match="'mine' is not a recipe"):
        kl.recipes.register("mine")  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_module_that_fails_is_named_as_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_recipe.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="the module 'failing_recipe' cannot be imported: ZeroDivision"):
        kl.recipes.get("failing_recipe:Recipe")


def test_what_a_recipe_and_a_task_are_written_with_is_public_and_needs_no_torch_before_it_is_used() -> None:
    probe = (
        "import sys, kilolayer as kl; kl.recipes.Recipe, kl.recipes.Plan, kl.recipes.Learned, kl.tasks.Registration; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", probe], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert issubclass(kl.tasks.registry.get("causal_lm").load(), kl.tasks.Task)


def test_a_class_of_a_task_is_registered_by_the_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    from kilolayer.tasks import registry as tasks

    monkeypatch.setattr(tasks, "_registry", tasks._registry.copy())
    registration = kl.tasks.Registration(
        summary="nothing", title="nothing", usage="evaluate {}", config="kilolayer.tasks.causal_lm.config:CausalLMConfig"
    )

    def define(**members: Any) -> Any:
        return kl.tasks.register(
            type("MyTask", (kl.tasks.Task,), {"__module__": __name__, "__qualname__": "MyTask", **members})
        )

    for _ in range(2):
        cls = define(registration=registration)
        assert kl.tasks.get(f"{__name__}:MyTask").task == f"{cls.__module__}:MyTask"
    with pytest.raises(InputError, match="is not a task"):
        define()
    with pytest.raises(OptionError, match="the task 'translation' is built in"):
        define(registration=kl.tasks.Registration(name="translation", summary="", title="", usage="", config="a:B"))
