"""What is installed from a wheel works without the project's folder, and its extras are those that texts name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_an_extra_that_a_text_names_exists() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {extra for path in texts for extra in re.findall(r"kilolayer\[([\w-]+)\]", path.read_text())}
    assert named
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_packages_of_the_extras_are_those_that_the_tests_run_with() -> None:
    extras = PROJECT["optional-dependencies"]
    for name in ("bpe", "export", "understanding"):
        assert set(extras[name]) <= set(extras["dev"]), name


@pytest.mark.slow
def test_a_wheel_trains_in_a_bare_environment(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(project), folder=tmp_path)
    (wheel,) = tmp_path.glob("kilolayer-*.whl")
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", str(wheel), folder=tmp_path)
    home = run(str(python), "-c", "import kilolayer; print(kilolayer.__file__)", folder=tmp_path)
    assert home.startswith(str(tmp_path / "bare"))
    run(str(tmp_path / "bare/bin/kilolayer"), "train", "--train.steps", "2", "--run", "first", folder=tmp_path)
    assert {"config.toml", "scores.json", "report.html"} <= {path.name for path in (tmp_path / "first").iterdir()}


def run(*command: str, folder: Path) -> str:
    """Run it without what this process's environment says of Python; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    assert "WARNING" not in built.stderr
    assert (tmp_path / "site" / "index.html").exists()
