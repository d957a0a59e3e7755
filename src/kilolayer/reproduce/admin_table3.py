"""Very Deep Transformers, Table 3: encoder and decoder depths, with significance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab, Run

DEPTHS = ("6-6", "12-12", "24-12", "48-12", "60-12", "36-36", "12-60")


def admin_depths(lab: Lab) -> list[Run]:
    """Train Admin at the seven depths of the table; Figures 2 and 3 and Table 1 use some of the same runs."""
    axes = {"model.recipe": ("admin",), "layers": DEPTHS, "train.seed": (1,)}
    if lab.tiny:
        axes = {"model.recipe": ("admin",), "layers": ("1-1", "2-1"), "train.seed": (1,)}
    return lab.compare("admin-depths", lab.translation("fra", into_english=False, train=lab.gentle), axes)


def default_depths(lab: Lab) -> list[Run]:
    """Train Post-LN with its default initialization at the smallest and the largest depth."""
    axes = {"model.recipe": ("post_ln",), "layers": ("1-1", "2-1") if lab.tiny else ("6-6", "60-12"), "train.seed": (1,)}
    return lab.compare("default-depths", lab.translation("fra", into_english=False, train=lab.gentle), axes)


@register
class Table3(Reproduction):
    """Seven depths, every pair compared on the same test sentences."""

    name = "admin-table3"
    claim = "60L-12L is significantly better than 6L-6L and 12L-12L, and a deep encoder is worth more than a deep decoder."
    setting = (
        "English to French, Tatoeba for WMT-14, Admin, dim 128, 2,000 steps of 4,096 tokens, learning rate 5e-4 after "
        "800, one seed; BLEU on 500 sentences, compared by paired bootstrap."
    )
    rule = (
        "Held if 60L-12L is significantly better (p < 0.05) than 6L-6L and than 12L-60L. Not held if it is significantly worse "
        "than either, or dies. Otherwise it is undecided."
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
        scored = {str(run["options"]["layers"]): run for run in runs if run["bleu"] is not None}
        references = list(read_lines(lab.folder.parent / "text" / "fra" / "test.fra"))
        hypotheses = {name: list(read_lines(next(Path(run["folder"]).glob("test.*.txt")))) for name, run in scored.items()}
        signs: dict[str, dict[str, str]] = {}
        if len(hypotheses) > 1:
            matrix = comparison_matrix(hypotheses, references)
            signs = {
                name: dict(zip(matrix.names, row, strict=True)) for name, row in zip(matrix.names, matrix.verdicts, strict=True)
            }
        return {"runs": runs, "signs": signs}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import died

        cells = {str(run["options"]["layers"]): run for run in found["runs"]}
        deep = "60-12" if "60-12" in cells else list(cells)[-1]
        others = [name for name in ("6-6", "12-60") if name in cells] or list(cells)[:1]
        if died(cells[deep]):
            return not_held(f"{deep}: {cells[deep]['text']}")
        signs = [found["signs"].get(deep, {}).get(other) for other in others]
        why = "; ".join(f"{deep} {sign or '?'} {other}" for sign, other in zip(signs, others, strict=True))
        if "-" in signs:
            return not_held(why)
        return held(why) if all(sign == "+" for sign in signs) else undecided(why)

    def numbers(self, found: Found) -> Table:
        names = [str(run["options"]["layers"]) for run in found["runs"]]
        rows = []
        for run in found["runs"]:
            name = str(run["options"]["layers"])
            score = run["text"] if run["bleu"] is None else f"{run['bleu']:.1f}"
            rows.append([name, score, *(found["signs"].get(name, {}).get(other, "") for other in names)])
        return Table(["layers", "BLEU", *names], rows)
