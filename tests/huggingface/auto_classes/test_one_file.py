"""The module that is saved next to a model computes what the package does, where the package cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.huggingface.auto_classes.module_file import module_source
from kilolayer.huggingface.auto_classes.one_file import Home, one_file
from tests.huggingface.auto_classes.small_models import WRAPPERS, bare_model, inputs_of, logits_of, wrapped

OWN = """
import kilolayer as kl
from dataclasses import replace as Mask
from kilolayer import recipes
from kilolayer.recipes import Recipe

Projection, shown = 0.5, "<>"
'A constant, and names that are also those of others.'


class Faded(Recipe):
    power: float = kl.recipes.bounded(Projection, least=0, most=2)
    equation = f"{shown}: x' = x + l^-{Projection} f(LN(x))"

    def plan(self, place):
        # A comment.
        return Mask(recipes.Plan(pre_norm=True), branch=kl.recipes.PerLayer(place.layer**-self.power))


unused = recipes.names
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], Any]:
    """The module of a source, and the logits that its class computes with a model's configuration and weights, both where
    neither Kilolayer nor a user's module can be imported."""

    def logits_alone(source: str, model: Any) -> Any:
        given = wrapped(model)
        table, weights = given.config.to_dict(), given.state_dict()
        module: Any = ModuleType("folder.modeling_kilolayer")
        with monkeypatch.context() as without:
            without.setitem(sys.modules, module.__name__, module)
            for name in ("kilolayer", "a_module"):
                without.setitem(sys.modules, name, None)
            exec(compile(source, "modeling_kilolayer.py", "exec", dont_inherit=True), vars(module))
            found = getattr(module, type(given).__name__)(module.KilolayerConfig(**table)).eval()
            found.load_state_dict(weights)
            assert found.config.model["recipe"]["name"] == model.config.recipe.name
            return module, found(**inputs_of(found)).logits

    return logits_alone


@pytest.mark.matrix(24)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_every_recipe_computes_the_same_in_one_file(recipe: str, alone: Callable[[str, Any], Any]) -> None:
    source = module_source(kl.recipes.find(recipe))
    for shape in WRAPPERS:
        model = bare_model(shape, recipe, moe=kl.MoE(experts=4), drop_path=0.2)
        assert torch.equal(alone(source, model)[1], logits_of(model)), shape


def test_a_recipe_of_a_users_own_goes_along_with_its_file(
    tmp_path: Path, alone: Callable[[str, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    model = bare_model("decoder", "a_module:Faded")
    source = module_source(type(model.config.recipe))
    assert "# A comment." in source
    assert "unused" not in source.partition("# a_module")[2]
    module, logits = alone(source, model)
    assert torch.equal(logits, logits_of(model))
    assert module.Faded.equation == "<>: x' = x + l^-0.5 f(LN(x))"


def test_the_file_names_nothing_that_it_does_not_define_and_imports_nothing_that_it_does_not_use() -> None:
    source = module_source(kl.recipes.find("sub_ln"))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", "--ignore", "F402", "-"]
    done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_cannot_be_written_into_one_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trying.py").write_text(
        "try:\n    from math import pi\nexcept ImportError:\n    pi = 3\n\ndef half():\n    return pi / 2\n"
    )
    with pytest.raises(InputError, match="'pi' is neither defined nor imported at the top"):
        one_file([Home("trying", "half")], {})
    with pytest.raises(InputError, match="'whole' is not defined at the top"):
        one_file([Home("trying", "whole")], {})
    with pytest.raises(InputError, match="source of the module cannot be read"):
        one_file([Home("builtins", "sum")], {})
    (tmp_path / "named.py").write_text("def half():\n    return 1\n\ndef both():\n    return dict(half=half())\n")
    (tmp_path / "other.py").write_text("def half():\n    return 2\n")
    with pytest.raises(InputError, match="'half' is also a local name in 'both'"):
        one_file([Home("other", "half"), Home("named", "both")], {})
