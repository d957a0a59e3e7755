"""What the script of the pages computes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kilolayer import report

PLOT = Path(report.__file__).parent / "templates/plot.js"


def evaluated(expression: str) -> object:
    """The value of an expression in the script of the pages."""
    read = f"vm.runInThisContext(fs.readFileSync({json.dumps(str(PLOT))}, 'utf8'))"
    start = f"const fs = require('fs'), vm = require('vm'); globalThis.window = {{ matchMedia: () => ({{}}) }}; {read};"
    done = subprocess.run(
        ["node", "-e", f"{start} console.log(JSON.stringify({expression}))"], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_layers_and_steps_have_whole_ticks() -> None:
    two_layers = evaluated("ticks(0.99, 2.01, 6, false, 1).map(({ text }) => text)")
    assert two_layers == ["1", "2"]
    many = evaluated("ticks(0, 100, 5, false, 1).map(({ at }) => at)")
    assert many == [0, 20, 40, 60, 80, 100]
    assert evaluated("ticks(0, 1, 5, false).map(({ at }) => at)") == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
