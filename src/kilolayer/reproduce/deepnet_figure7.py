"""DeepNet, Figure 7: larger learning rate, batch and width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import cells_by, is_lower

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

FAMILIES: dict[str, tuple[Any, ...]] = {
    "train.lr": (5e-4, 1e-3, 2e-3),
    "batches.tokens": (2048, 4096, 8192, 16_384),
    "model.dim": (64, 128, 256),
}
TINY_FAMILIES: dict[str, tuple[Any, ...]] = {"train.lr": (1e-3, 5e-3), "batches.tokens": (400,), "model.dim": (16,)}
TITLES = {"train.lr": "learning rate", "batches.tokens": "tokens per batch", "model.dim": "width"}


@register
class Figure7(Reproduction):
    """18L-18L DeepNorm with one of the three changed at a time."""

    name = "deepnet-figure7"
    claim = "DeepNorm at 18L-18L trains at the largest learning rate, batch and width, converges faster, and gains from each."
    setting = (
        "German to English, Tatoeba for WMT-17; dim 128, 4,096 tokens and 1e-3 with one changed at a time; 1,600 steps, 800 "
        "of them for warm-up, two seeds. The width goes with four times as wide feed-forward layers."
    )
    rule = (
        "Held if every run lives and the largest value of each of the three is clearly lower in validation loss (two standard "
        "errors and 0.02 nats) than the smallest. Not held if a largest value dies or is clearly higher than the smallest. "
        "Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        layers = 1 if lab.tiny else 18
        model = {"recipe": "deepnorm", "encoder_layers": layers, "decoder_layers": layers}
        settings = [
            {option: value, **({"model.ffn_dim": 4 * value} if option == "model.dim" else {}), "train.seed": seed}
            for option, values in (TINY_FAMILIES if lab.tiny else FAMILIES).items()
            for value in values
            for seed in ((1,) if lab.tiny else (1, 2))
        ]
        config = lab.translation(model=model, train={"steps": 1600, "warmup_steps": 800})
        runs = lab.compare_settings("larger", config, settings)
        return {option: [run for run in runs if option in run["options"]] for option in FAMILIES}

    def judge(self, found: Found) -> Verdict:
        rows = {option: list(cells_by(found[option], option).values()) for option in FAMILIES}
        shown = {option: ", ".join(cell.shown for cell in cells) for option, cells in rows.items()}
        why = "; ".join(f"{TITLES[option]}: {text}" for option, text in shown.items())
        largest = [cells[-1] for cells in rows.values()]
        if any(cell.died for cell in largest) or any(is_lower(cells[0], cells[-1]) for cells in rows.values()):
            return not_held(why)
        lives = all(cell.lives for cells in rows.values() for cell in cells)
        return held(why) if lives and all(is_lower(cells[-1], cells[0]) for cells in rows.values()) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [
            [f"{TITLES[option]} {value:g}", cell.shown]
            for option in FAMILIES
            for value, cell in cells_by(found[option], option).items()
        ]
        return Table(["", "validation loss"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, first_by

        return [
            curves(first_by(found[option], option), "valid", f"Validation loss by {title}") for option, title in TITLES.items()
        ]
