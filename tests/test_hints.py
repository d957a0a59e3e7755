"""What a hint says can be typed as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

from kilolayer import hints


def test_a_folder_with_spaces_is_quoted_in_a_shell_and_in_python() -> None:
    folder = Path("runs/my first")
    with hints.for_shell():
        assert shlex.split(hints.call("compare", folder))[-1] == str(folder)
        assert shlex.split(hints.call("train", resume=folder))[-2:] == ["--resume", str(folder)]
        assert hints.option("train.lr", 2.5e-4) == "--train.lr 2.5e-4"
    assert hints.call("compare", folder) == 'kl.run_comparison("runs/my first")'
