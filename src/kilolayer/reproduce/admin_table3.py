"""Very Deep Transformers, Table 3: encoder and decoder depths, with significance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import cells_by
from kilolayer.reproduce.stored_run import Run, keep

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kilolayer.config import Table as ConfigTable
    from kilolayer.reproduce.lab import Lab

ADMIN = {"name": "admin", "start": "released"}
"""Admin, and below its baseline, as the authors' code starts them."""
DEFAULT = {"name": "post_ln", "init": "fairseq_0.8"}
DEPTHS = ("6-6", "12-12", "24-12", "48-12", "60-12", "36-36", "12-60")
SETTING = (
    "English to French, Tatoeba for WMT-14, dim 128, RAdam, learning rate 7e-4, 4,000 steps of 4,096 tokens, 1,600 of them for "
    "warm-up, two seeds; both start as in the authors' code"
)


def training(lab: Lab) -> ConfigTable:
    """The options of training that all tables and figures of the paper share."""
    return {**lab.long, "optimizer": "radam", "lr": 7e-4}


def admin_depths(lab: Lab) -> list[Run]:
    """Train Admin at the seven depths of the table; Figures 2 and 3 and Table 1 use some of the same runs."""
    return _train(lab, ADMIN, ("1-1", "2-1") if lab.tiny else DEPTHS)


def default_depths(lab: Lab) -> list[Run]:
    """Train Post-LN with its default initialization at the smallest and the largest depth."""
    return _train(lab, DEFAULT, ("1-1", "2-1") if lab.tiny else ("6-6", "60-12"))


def _train(lab: Lab, recipe: Mapping[str, str], depths: tuple[str, ...]) -> list[Run]:
    axes = {"model.recipe": (recipe,), "layers": depths, "train.seed": (1,) if lab.tiny else (1, 2)}
    return lab.compare("admin-depths", lab.translation("fra", into_english=False, train=training(lab)), axes)


@register
class Table3(Reproduction):
    """Seven depths, every pair compared on the same test sentences."""

    name = "admin-table3"
    claim = "60L-12L is significantly better than 6L-6L and 12L-12L, and a deep encoder is worth more than a deep decoder."
    setting = f"{SETTING}; BLEU on 500 sentences, compared by paired bootstrap on the translations of both seeds together."
    rule = (
        "The translations of both seeds are drawn together for each of the 500 sentences. Held if 60L-12L is significantly "
        "better (p < 0.05) than 6L-6L, 12L-12L and 12L-60L. Not held if it is significantly worse than one of them, or dies in "
        "a seed. Otherwise it is undecided."
    )
    published = Table(
        ["WMT-14 En-Fr", "BLEU"],
        [
            ["6L-6L", "41.5"],
            ["12L-12L", "42.6"],
            ["24L-12L", "43.3"],
            ["48L-12L", "43.6"],
            ["60L-12L", "43.8"],
            ["36L-36L", "43.7"],
            ["12L-60L", "43.1"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.data.text import read_lines
        from kilolayer.evaluate.significance import comparison_matrix

        runs = admin_depths(lab)
        texts: dict[str, list[list[str] | None]] = {}
        for run in runs:
            texts.setdefault(str(run["options"]["layers"]), []).append(keep(run, "translations", _translations))
        references = list(read_lines(lab.folder.parent / "text" / "fra" / "test.fra"))
        whole = {name: [line for text in seeds for line in text or ()] for name, seeds in texts.items() if None not in seeds}
        signs: dict[str, dict[str, str]] = {}
        if len(whole) > 1:
            seeds = len(next(iter(texts.values())))
            matrix = comparison_matrix(whole, references * seeds, copies=seeds)
            signs = {
                name: dict(zip(matrix.names, row, strict=True)) for name, row in zip(matrix.names, matrix.verdicts, strict=True)
            }
        return {"runs": runs, "signs": signs}

    def judge(self, found: Found) -> Verdict:
        cells = cells_by(found["runs"], "layers")
        deep = "60-12" if "60-12" in cells else list(cells)[-1]
        others = [name for name in ("6-6", "12-12", "12-60") if name in cells] or list(cells)[:1]
        if cells[deep].died:
            return not_held(f"{deep}: {cells[deep].text}")
        signs = [found["signs"].get(deep, {}).get(other) for other in others]
        why = "; ".join(f"{deep} {sign or '?'} {other}" for sign, other in zip(signs, others, strict=True))
        if "-" in signs:
            return not_held(why)
        return held(why) if all(sign == "+" for sign in signs) else undecided(why)

    def numbers(self, found: Found) -> Table:
        cells = cells_by(found["runs"], "layers")
        rows = [
            [
                name,
                cell.text or ("-" if cell.bleu is None else f"{cell.bleu:.1f}"),
                *(found["signs"].get(name, {}).get(other, "") for other in cells),
            ]
            for name, cell in cells.items()
        ]
        return Table(["layers", "BLEU", *cells], rows)


def _translations(folder: Path) -> list[str] | None:
    """The translations of the test set; None if the run has none."""
    from kilolayer.data.text import read_lines

    path = next(folder.glob("test.*.txt"), None)
    return None if path is None else list(read_lines(path))
