"""The files between `kilolayer train` and the residual equation, as docs/design.md lists them."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import tomli_w
from torch import Tensor

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.layers.sublayer import Sublayer
from kilolayer.runtime.runtime import PLAIN
from tests.fixtures.small_runs import table

SOURCE = Path(kl.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def listed_files() -> list[str]:
    """The files that the page lists, and that there are as many as it says."""
    text = " ".join(DESIGN.read_text(encoding="utf-8").split())
    found = re.search(
        r"there are (\d+) files and (\d+) hops between them, as the stack of calls of a step shows: ([^.]+)\.", text
    )
    assert found is not None
    files = found[3].replace("the task", "tasks/translation/task").split(", ")
    assert [int(found[1]), int(found[2])] == [len(files), len(files) - 1]
    return files


def test_the_page_lists_the_files_of_the_stack_of_calls(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    forward = Sublayer.forward

    def seen(self: Sublayer, x: Tensor, *inputs: object) -> Tensor:
        if not entered:
            calls = [Path(call.filename) for call in traceback.extract_stack()[:-1]]
            ours = [path.relative_to(SOURCE).with_suffix("").as_posix() for path in calls if path.is_relative_to(SOURCE)]
            entered.extend(dict.fromkeys([*ours, "layers/sublayer"]))
        return forward(self, x, *inputs)

    monkeypatch.setattr(Sublayer, "forward", seen)
    monkeypatch.setattr("kilolayer.speed.runtime.FAST", PLAIN)
    config = tmp_path / "small.toml"
    config.write_text(tomli_w.dumps(table(corpus, train={"steps": 1})), encoding="utf-8")
    assert main(["train", str(config), "--run", str(tmp_path / "run")]) == 0
    assert entered == listed_files()
