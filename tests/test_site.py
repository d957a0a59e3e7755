"""The site that `make docs` builds: it needs no network, and shows signatures, arguments and equations as such."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(words, check=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def shown(text: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", text))


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', text)
        assert not fetched, page.name


@pytest.mark.slow
def test_signatures_have_an_argument_a_line_and_arguments_are_a_list(site: Path) -> None:
    text = (site / "reference/runs.html").read_text(encoding="utf-8")
    signature, *_ = re.findall(r'<div class="doc-signature highlight">(.*?)</div>', text, flags=re.DOTALL)
    lines = shown(signature).strip().splitlines()
    assert lines[:2] == ["train(", "    config: Source = None,"]
    assert lines[-1] == ") -> TrainedRun"
    assert re.search(r"<li><code>config</code>: a TOML file", text)


@pytest.mark.slow
def test_equations_are_typeset(site: Path) -> None:
    text = (site / "recipes/deepnorm.html").read_text(encoding="utf-8")
    assert "<mi>&#x003B1;</mi>" in text  # alpha
    assert text.count('display="block"') == 2
    for page in site.rglob("*.html"):
        assert "$$" not in page.read_text(encoding="utf-8") or "project" in page.parts, page.name
