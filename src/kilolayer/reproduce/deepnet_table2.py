"""DeepNet, Table 2: six methods on two language pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import ADMIN
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import Cell, grid_of, is_lower
from kilolayer.reproduce.deepnet_table1 import RATES, SEEDS
from kilolayer.reproduce.sweep import at_best_rate

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

METHODS: tuple[Any, ...] = ("t_fixup", "post_ln", ADMIN, "pre_ln", "normformer", "deepnorm")
LANGUAGES = {"deu": "English to German", "fra": "English to French"}


@register
class Table2(Reproduction):
    """6L-6L and 18L-18L, English to German and to French."""

    name = "deepnet-table2"
    claim = "At 18L-18L Post-LN diverges, and DeepNorm is at least as good as every other method on both language pairs."
    setting = (
        "English to German and English to French, short sentences of Tatoeba for WMT-14, dim 128, 1,000 steps of 4,096 tokens, "
        "400 of them for warm-up; methods, learning rates and seeds as in deepnet-table1."
    )
    rule = (
        "Held if on both pairs DeepNorm lives at both depths, no method is clearly lower (two standard errors and 0.02 nats) "
        "at 18L-18L, and Post-LN dies there. Not held if DeepNorm dies, or on each of the pairs some method is clearly lower "
        "at 18L-18L. Otherwise it is undecided."
    )
    published = Table(
        ["BLEU, WMT-14", "En-De 6L-6L", "En-De 18L-18L", "En-Fr 6L-6L", "En-Fr 18L-18L"],
        [
            ["T-Fixup", "26.4", "28.0", "39.8", "41.9"],
            ["Post-LN", "27.4", "diverged", "39.6", "diverged"],
            ["Admin", "27.4", "28.4", "39.4", "42.4"],
            ["Pre-LN", "26.6", "27.8", "39.6", "41.8"],
            ["NormFormer", "27.2", "27.9", "39.7", "42.1"],
            ["DeepNorm", "27.3", "28.7", "39.9", "42.4"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.reproduce.lab import combinations

        axes: dict[str, Any] = {"model.recipe": METHODS, "layers": (6, 18)}
        if lab.tiny:
            axes = {"model.recipe": ("post_ln", "deepnorm"), "layers": (1,)}
        found: Found = {}
        for language in LANGUAGES:
            config = lab.translation(language, into_english=False)
            found[language] = at_best_rate(lab, f"six-methods-{language}", config, combinations(axes), RATES, SEEDS)
        return found

    def judge(self, found: Found) -> Verdict:
        grids = {language: _grid(found, language) for language in LANGUAGES}
        for language, grid in grids.items():
            if dead := [cell.text for cell in grid["deepnorm"].values() if cell.died]:
                return not_held(f"DeepNorm, {LANGUAGES[language]}: {dead[0]}")
        deep = {
            language: {method: list(cells.values())[-1] for method, cells in grid.items()} for language, grid in grids.items()
        }
        better = {
            language: {method: is_lower(cell, cells["deepnorm"]) for method, cell in cells.items()}
            for language, cells in deep.items()
        }
        why = "; ".join(
            f"{LANGUAGES[language]}, deep: {', '.join(f'{method} {cell.shown}' for method, cell in cells.items())}"
            for language, cells in deep.items()
        )
        if all(any(methods.values()) for methods in better.values()):
            return not_held(why)
        dies = all(cells["post_ln"].died for cells in deep.values())
        lives = all(cell.lives for grid in grids.values() for cell in grid["deepnorm"].values())
        best = all(
            cell.died or better[language][method] is False for language, cells in deep.items() for method, cell in cells.items()
        )
        return held(why) if lives and dies and best else undecided(why)

    def numbers(self, found: Found) -> Table:
        grids = {language: _grid(found, language) for language in LANGUAGES}
        columns = [(language, depth) for language, grid in grids.items() for depth in next(iter(grid.values()))]
        header = ["validation loss", *(f"{LANGUAGES[language]}, {depth}L-{depth}L" for language, depth in columns)]
        methods = list(next(iter(grids.values())))
        return Table(header, [[each, *(grids[lang][each][depth].shown for lang, depth in columns)] for each in methods])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import by_column

        return [
            by_column(found[language]["runs"], "model.recipe", "layers", "layers per side", f"Validation loss, {title}")
            for language, title in LANGUAGES.items()
        ]


def _grid(found: Found, language: str) -> dict[str, dict[int, Cell]]:
    return grid_of(found[language]["runs"], "model.recipe", "layers")
