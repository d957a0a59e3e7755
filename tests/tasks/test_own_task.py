"""A task in a user's own file: the one that the documentation shows, from a shell and from Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.config import build, parse_toml
from kilolayer.data.grammar import pairs
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.tasks import registry
from kilolayer.tasks.config import RunConfig
from tests.fixtures.commands import typed

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
VERB = """
from kilolayer.cli.output import show_line

def configure(parser):
    parser.add_argument("run")

def run(options, typed):
    show_line("spoken by my verb")
    return 0
"""
TINY = [
    "--model.layers=2",
    "--model.dim=16",
    "--model.heads=2",
    "--model.ffn_dim=32",
    "--batches.tokens=1024",
    "--train.steps=60",
]
TINY += ["--train.steps=60", "--train.lr=0.02", "--train.warmup_steps=5", "--train.device=cpu", "--text.length=32"]


def block(language: str) -> str:
    """The block of the page that is the file capitals.py or capitals.toml."""
    (found,) = [each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if '"capitals:' in each]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The documentation's files, with a verb, and a text to learn from; the folder is on the path."""
    folder = tmp_path_factory.mktemp("own")
    code = block("python").replace("config=", 'verbs={"spell": Verb("says something", "my_verb")},\n        config=', 1)
    (folder / "capitals.py").write_text(code.replace("import Headline, Registration", "import Headline, Registration, Verb"))
    (folder / "my_verb.py").write_text(VERB)
    (folder / "capitals.toml").write_text(block("toml"))
    (folder / "book.txt").write_text("\n".join(german for _, german in pairs(600, seed=1, unseen=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for module in ("capitals", "my_verb"):
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[int, str, str]:
    return typed("train", folder / "capitals.toml", "--run", folder / "run", *TINY, f"--text.train={folder / 'book.txt'}")


def test_it_trains_scores_and_reports(folder: Path, trained: tuple[int, str, str]) -> None:
    code, out, err = trained
    assert code == 0, err
    assert re.search(r"^accuracy 0\.\d{4}$", out, re.MULTILINE)
    scores = json.loads((folder / "run/scores.json").read_text())
    assert scores["test"]["accuracy"]["value"] > 0.9  # to leave all letters small gives 0.85
    assert "own text" not in err
    assert "Accuracy" in (folder / "run/report.html").read_text()


def test_its_run_is_used_by_the_verbs_of_all_runs_and_by_its_own(folder: Path, trained: tuple[int, str, str]) -> None:
    code, out, err = typed("evaluate", folder / "run")
    assert code == 0, err
    assert "letters:ascii" in out
    (shown,) = re.findall(r"^accuracy (0\.\d{4})$", trained[1], re.MULTILINE)
    assert re.findall(r"accuracy +(\S+)", out) == [shown]
    assert re.findall(r"accuracy +(\S+)", str(kl.load(folder / "run"))) == [shown, shown]  # in the table, and as the last line
    assert f">{shown}<" in (folder / "run/report.html").read_text()
    assert typed("plan", folder / "capitals.toml")[0] == 0
    assert typed("spell", folder / "run")[:2] == (0, "spoken by my verb\n")
    assert "this run is a restorer of capitals" in typed("generate", folder / "run")[2]


def test_another_text_is_not_scored_as_the_task_that_it_extends_does(folder: Path, trained: tuple[int, str, str]) -> None:
    code, out, err = typed("evaluate", folder / "run", "--test", folder / "capitals.toml")
    assert (code, out) == (2, "")
    assert "a restorer of capitals is scored on its own test set only" in err
    assert "scores_of" in err


@pytest.mark.slow
def test_a_module_that_lies_beside_the_run_is_not_imported(folder: Path, trained: tuple[int, str, str]) -> None:
    words = [sys.executable, "-P", "-m", "kilolayer", "evaluate", "run"]
    environment = {**os.environ, "PYTHONPATH": str(Path(kl.__file__).parents[1])}
    refused = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no module 'capitals'" in refused.stderr
    assert "PYTHONPATH" in refused.stderr


def test_registered_from_python_it_has_a_name_and_may_be_registered_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", registry._registry.copy())
    own = replace(registry.get("capitals:CapitalsTask"), name="capitals")
    for _ in range(2):
        assert registry.register(own) is own
    assert "capitals" in registry.names()
    config = build(RunConfig, parse_toml(block("toml")) | {"task": "capitals"})
    assert config.model.shape == "encoder"
    assert type(config).__name__ == "CapitalsConfig"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("causal_ml", "did you mean 'causal_lm'"),
        ("capitals:", "task is 'capitals:'"),
        ("no_such_module:Task", "there is no module 'no_such_module'"),
        ("json:JSONDecoder", "is not a task"),
        ("json:Nothing", "has no 'Nothing'"),
        ("os.path;x:y", "task is"),
        (3, "task is 3"),
        (["causal_lm"], "task is ['causal_lm']"),
        ({"name": "causal_lm"}, "task is {"),
    ],
)
def test_a_task_that_is_none_is_refused(name: Any, what: str) -> None:
    with pytest.raises((InputError, OptionError, KilolayerError)) as caught:
        build(RunConfig, {"task": name})
    assert what in caught.value.what


@pytest.mark.parametrize(
    ("text", "what"), [("import no_such_part", "No module named"), ("class Task(:", "SyntaxError"), ("1 / 0", "Zero")]
)
def test_a_module_that_fails_is_named_as_the_fault(
    text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_task.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=f"the module 'failing_task' cannot be imported: .*{what}"):
        registry.get("failing_task:Task")


def test_the_module_shows_what_a_task_is_written_with_and_nothing_else() -> None:
    for module in (kl.tasks, kl.recipes):
        assert dir(module) == sorted(module.__all__)
        assert not any(isinstance(getattr(module, name), ModuleType) for name in dir(module))
    assert {"Task", "RunConfig", "Registration", "register"} <= set(dir(kl.tasks))
