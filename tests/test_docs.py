"""What the pages say can be typed."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.data.grammar import write_corpus
from kilolayer.optimizers import registry as optimizers
from kilolayer.recipes import registry

ROOT = Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


# The compiler's work on this page takes longer than all others together.
SLOW = ("diagnose.md", "extend.md", "models.md", "python.md")
# Their code writes folders, under names that all processes know.
WRITE = ("accelerate.md", "trainer.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else (), id=page.name)
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_python_runs_as_written(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if page.name in WRITE:
        monkeypatch.chdir(tmp_path)
    for name in optimizers.names():
        optimizers.find(name)
    for each in (registry, optimizers):  # a page may register a recipe or an optimizer
        monkeypatch.setattr(each, "_registry", each._registry.copy())
    exec("\n".join(blocks(page, "python")), {})


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    found = [line.partition("#")[0].strip() for line in lines if line.startswith("kilolayer ")]
    return [line for line in found if line.split()[1] in ("plan", "recipes")]  # the others need a run


@pytest.mark.parametrize("command", commands())
def test_commands_run_as_written(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_code_that_the_design_page_quotes_is_in_the_source() -> None:
    quoted = re.findall(r"\n\n((?:    .+\n)+)\n", (ROOT / "docs/design.md").read_text())
    sources = ["".join(path.read_text().split()) for path in (ROOT / "src").rglob("*.py")]
    assert quoted
    for block in quoted:
        assert any("".join(block.split()) in source for source in sources), block


def test_the_first_runnable_line_comes_within_150_words() -> None:
    before = (ROOT / "README.md").read_text().partition("make quickstart")[0]
    assert len(before.split()) < 150


def test_the_pages_of_recipes_are_the_registry() -> None:
    pages = runpy.run_path(str(ROOT / "docs/make_recipes.py"))["pages"]()
    assert {f"recipes/{path.name}" for path in (ROOT / "docs/recipes").iterdir()} | {"recipes.md"} == set(pages)
    for path, text in pages.items():
        assert (ROOT / "docs" / path).read_text() == text, "run: python docs/make_recipes.py"


def test_every_recipe_has_a_measured_result() -> None:
    for page in (ROOT / "docs/recipes").iterdir():
        assert "## Measured" in page.read_text(), f"run benchmarks/propagation/measure.py --recipes {page.stem}"


@pytest.mark.parametrize(
    ("plain", "typeset"),
    [
        ("x' = LN(alpha x + f(x))", r"x' = \mathrm{LN}(\alpha  x + f(x))"),
        ("W_o, W_1 start at L^-1/6 Xavier", r"W_{o}, W_{1}\text{ start at }L^{-1/6}\,\mathrm{Xavier}"),
        ("every matrix of layer l: (alpha / sqrt(l)) w", r"\text{every matrix of layer }l:\; (\alpha  / \sqrt{l}) w"),
        ("x = sum_k w . y_k, 1e-5 <= l", r"x = \sum_{k} w \odot y_{k}, 10^{-5} \le l"),
    ],
)
def test_equations_are_typeset(plain: str, typeset: str) -> None:
    assert runpy.run_path(str(ROOT / "docs/typeset.py"))["clauses"](f"{plain};  y") == [typeset, "y"]


def test_equations_become_mathml_and_code_stays() -> None:
    pytest.importorskip("latex2mathml")
    convert = runpy.run_path(str(ROOT / "docs/equations.py"))["on_page_markdown"]
    page = convert("a $x^2$ b, `$x$`, US$5 and 6$\n\n$$\ny = 1\n$$\n```sh\necho $HOME $PATH\n```\n")
    assert page.count("<math") == 2
    assert "<msup><mi>x</mi><mn>2</mn></msup>" in page
    assert all(kept in page for kept in ("`$x$`", "US$5 and 6$", "echo $HOME $PATH"))
    for path in PAGES:
        assert "$$" not in convert(path.read_text()), path.name


def test_arguments_in_the_text_of_a_docstring_are_a_list() -> None:
    pytest.importorskip("griffe")
    listed = runpy.run_path(str(ROOT / "docs/argument_lists.py"))["listed"]
    text = "What it does.\n\nfirst: a tensor [a, b]. other,\nlast: two more; note: this is no name.\n\nMore of it."
    assert listed(text.replace("other,\n", "other, "), {"first", "other", "last"}) == (
        "What it does.\n\n- `first`: a tensor [a, b].\n- `other`, `last`: two more; note: this is no name.\n\nMore of it."
    )
    assert listed("Plain. It has: none.", {"first"}) == "Plain. It has: none."


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if path.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_quickstarts_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["thousand_layers.py", "--layers", "20"])
    runpy.run_path(str(ROOT / "examples/thousand_layers.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "deepnorm" in shown
    assert "post_ln" in shown


def test_the_reference_has_every_public_name() -> None:
    reference = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    for name in set(kl.__all__) - {"optimizers", "recipes", "tasks"}:
        assert f"::: {getattr(kl, name).__module__}.{name}\n" in reference, name


def test_every_page_of_the_site_has_a_place_in_it() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in sorted((ROOT / "docs").rglob("*.md")):
        assert f" {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation, page.name


def test_the_tests_that_are_named_exist() -> None:
    named = {found for page in PAGES for found in re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", page.read_text())}
    assert named
    for path, name in sorted(named):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


@pytest.mark.slow
def test_the_configuration_for_a_corpus_of_ones_own_gives_a_translator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of the page on translation, with the built-in corpus as the user's files, at a size for one core."""
    folder, config = tmp_path / "data/multi30k", tmp_path / "my.toml"
    write_corpus(folder)
    for part, name in {"valid": "val", "test": "test_2016_flickr"}.items():
        for language in ("en", "de"):
            (folder / f"{part}.{language}").rename(folder / f"{name}.{language}")
    config.write_text(blocks(ROOT / "docs/translation.md", "toml")[0])
    monkeypatch.chdir(tmp_path)
    run = kl.train(
        config,
        model={"encoder_layers": 3, "decoder_layers": 3, "dim": 64, "ffn_dim": 128, "dropout": 0.0},
        tokenizer={"vocab_size": 600},
        batches={"tokens": 800},
        train={"steps": 600, "lr": 4e-3, "warmup_steps": 100, "device": "cpu", "threads": 1},
        search={"method": "greedy"},
    )
    assert run.folder.name == "my"
    assert run.scores()["test"]["bleu"]["value"] > 50
    translated, wanted = (
        path.read_text().splitlines() for path in (run.folder / "test.en-de.txt", folder / "test_2016_flickr.de")
    )
    assert len(translated) == len(wanted)
