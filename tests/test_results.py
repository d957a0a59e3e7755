"""Every number of README.md and docs/results.md is one that the files in benchmarks give (tests/derivations)."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import pytest

import kilolayer as kl
from kilolayer.evaluate.stack_label import LEVELS
from tests.derivations.methods import dead_table
from tests.derivations.page import changed, differences, links_of, plain, sections_of
from tests.derivations.section import DERIVATIONS, ROOT, Derivation, read

for path in sorted((ROOT / "tests/derivations").glob("*.py")):
    import_module(f"tests.derivations.{path.stem}")


@cache
def sections(page: str) -> dict[str, str]:
    return sections_of((ROOT / page).read_text())


def numbered() -> list[tuple[str, str]]:
    """The sections with numbers in them, by page and heading."""
    return [(page, heading) for page in DERIVATIONS for heading, text in sections(page).items() if changed(plain(text))]


def derivation_of(page: str, heading: str) -> Derivation:
    found = [each for each in DERIVATIONS[page] if each.heading in heading]
    assert len(found) == 1, f"{page}, {heading}: {len(found)} derivations of its numbers, but there has to be one"
    return found[0]


@cache
def pieces_of(derivation: Derivation) -> list[str]:
    return derivation.all_pieces(read)


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_every_number_is_derived_from_the_files(page: str, heading: str) -> None:
    found = list(differences(plain(sections(page)[heading]), pieces_of(derivation_of(page, heading))))
    assert not found, "\n".join((f"{page}, {heading}", *found))


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_a_changed_number_is_noticed(page: str, heading: str) -> None:
    pieces = pieces_of(derivation_of(page, heading))
    for number, text in changed(plain(sections(page)[heading])):
        assert any(differences(text, pieces)), f"{page}, {heading}: another number in place of {number}"


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_the_files_are_cited(page: str, heading: str) -> None:
    cited = links_of(sections(page)[heading])
    for file in derivation_of(page, heading).files:
        assert f"benchmarks/{file}" in cited, f"{page}, {heading}"


@pytest.mark.parametrize("page", DERIVATIONS)
def test_every_derivation_has_a_section(page: str) -> None:
    for derivation in DERIVATIONS[page]:
        assert any(derivation.heading in heading for heading in sections(page)), derivation.heading


def test_a_number_that_nobody_derives_is_named() -> None:
    text = "An H200 takes 12.5 ms, the two others 3.1 and 3.0."
    assert not list(differences(text, ["takes 12.5 ms", "two others 3.1", "3.0"]))
    assert [each[:36] for each in differences(text, ["2.5 ms", "two others 3.1"])] == [
        "derived, but not on the page: 2.5 ms",
        "on the page, but not derived: 12.5 i",
        "on the page, but not derived: 3.0 in",
    ]


def test_the_readmes_constant_is_the_recipes() -> None:
    encoder = kl.recipes.get("deepnorm").describe(encoder_layers=100, decoder_layers=100).encoder
    assert encoder is not None
    assert encoder.alpha == pytest.approx(0.81 * (100**4 * 100) ** (1 / 16))  # DeepNet, Figure 2
    assert f".encoder.alpha  # {encoder.alpha:.4f}\n" in (ROOT / "README.md").read_text()


def test_the_levels_of_fading_stacks_are_those_of_the_runs() -> None:
    table = dead_table()
    assert [(level.share, level.seen, level.recovered, level.learned) for level in LEVELS] == table["levels"](table["runs"])
