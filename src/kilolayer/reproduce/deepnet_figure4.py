"""DeepNet, Figure 4: the model update over depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.config import merge
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

DEPTHS, STEPS = (6, 18, 50, 100), 5
GROWTH, SMALLER = 2.0, 3.0


@register
class Figure4(Reproduction):
    """||F(x, after a few steps) - F(x, at the start)|| of Post-LN and DeepNorm."""

    name = "deepnet-figure4"
    trains_runs = False
    claim = (
        "Early in training DeepNorm's model update is nearly constant over depth, and much smaller than Post-LN's, which "
        "explodes."
    )
    setting = (
        "German to English, Tatoeba for IWSLT-14, the paper's model of 64-128-2 at 6L-6L to 100L-100L, Post-LN with the "
        "start of nn.Linear; Adam at 1e-3 with a warm-up of 100 steps; the change of the states before the vocabulary within "
        f"{STEPS} steps, relative to their size; mean of three seeds."
    )
    rule = (
        "The two parts are judged apart. Nearly constant over depth: held if DeepNorm's update at the greatest depth is at "
        f"most {GROWTH:g} times that at the smallest, not held if it is more than {2 * GROWTH:g} times as large. Much smaller "
        f"than Post-LN's: held if Post-LN's at the greatest depth is at least {SMALLER:g} times DeepNorm's, not held if it is "
        "the smaller one. The claim is held if both parts are, and not held if one of them is not. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.reproduce.early_training import EarlyTraining, model_update

        depths, seeds, steps = ((1, 2), (1,), 3) if lab.tiny else (DEPTHS, (1, 2, 3), STEPS)
        updates: dict[str, dict[str, float]] = {"post_ln": {}, "deepnorm": {}}
        by_seed: dict[str, dict[str, list[float]]] = {recipe: {} for recipe in updates}
        for recipe, found in updates.items():
            for layers in depths:
                each = []
                for seed in seeds:
                    model = {"dim": 64, "ffn_dim": 128, "heads": 2, "dropout": 0.0, "recipe": recipe}
                    table = merge(
                        lab.translation(train={"warmup_steps": 100}),
                        {"model": {**model, "encoder_layers": layers, "decoder_layers": layers}},
                    )
                    training = EarlyTraining(merge(table, {"train": {"seed": seed}}))
                    start = training.output()
                    for _ in range(steps):
                        training.step()
                    each.append(model_update(start, training.output()) / float(start.norm(dim=-1).mean()))
                by_seed[recipe][str(layers)] = each
                found[str(layers)] = sum(each) / len(each)
        return {"updates": updates, "by_seed": by_seed}

    def judge(self, found: Found) -> Verdict:
        ours, plain = (list(found["updates"][recipe].values()) for recipe in ("deepnorm", "post_ln"))
        growth, ratio = ours[-1] / ours[0], plain[-1] / ours[-1]
        depths = list(found["updates"]["deepnorm"])
        constant = _part(
            growth <= GROWTH,
            growth > 2 * GROWTH,
            f"DeepNorm's update grows {growth:.2f} times from {depths[0]} to {depths[-1]} layers per side",
        )
        smaller = _part(ratio >= SMALLER, ratio < 1, f"Post-LN's is {ratio:.1f} times as large at {depths[-1]}")
        why = f"nearly constant over depth: {constant.word} ({constant.why}); much smaller than Post-LN's: {smaller.word} "
        words = {constant.word, smaller.word}
        return _part(words == {"held"}, "not held" in words, f"{why}({smaller.why})")

    def numbers(self, found: Found) -> Table:
        depths = list(found["updates"]["deepnorm"])
        rows = [[recipe, *(f"{values[depth]:.3g}" for depth in depths)] for recipe, values in found["updates"].items()]
        return Table(["relative update by layers per side", *depths], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        points = {recipe: [(float(depth), y) for depth, y in each.items()] for recipe, each in found["updates"].items()}
        return [lines(points, "Model update over depth", "layers per side", "relative change of the output", log=True)]


def _part(holds: bool, fails: bool, why: str) -> Verdict:
    return held(why) if holds else not_held(why) if fails else undecided(why)
