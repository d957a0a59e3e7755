"""DeepNet, Figure 2: exploding gradients are not what makes Post-LN unstable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

RECIPES, DEPTHS = ("post_ln", "post_ln_init"), (6, 12, 18, 24)


@register
class Figure2(Reproduction):
    """Gradients of the top layers, and validation loss, of Post-LN and of Post-LN-init."""

    name = "deepnet-figure2"
    claim = (
        "Post-LN-init converges at 18L-18L and Post-LN does not, though Post-LN-init's gradients in the last layers are larger."
    )
    setting = (
        "German to English, Tatoeba for IWSLT-14, dim 128; gradients of the decoder's layers at the start, 6L-6L to 24L-24L, "
        "mean of three batches; 1,000 steps of 18L-18L at learning rate 1e-3, two seeds."
    )
    rule = (
        "Held if the last decoder layer's gradient of Post-LN-init is larger than Post-LN's at every depth, and Post-LN-init "
        "lives at 18L-18L while Post-LN dies or is clearly higher. Not held if it is smaller at every depth, or if Post-LN "
        "lives and is clearly lower. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.reproduce.early_training import EarlyTraining

        depths, batches = ((1, 2), 1) if lab.tiny else (DEPTHS, 3)
        gradients: dict[str, dict[str, list[float]]] = {}
        for recipe in RECIPES:
            for layers in depths:
                model = {"recipe": recipe, "encoder_layers": layers, "decoder_layers": layers, "dropout": 0.0}
                training = EarlyTraining(lab.translation(model=model))
                norms = [training.trial.step(0.0, layers=True).stacks["decoder"] for _ in range(batches)]
                gradients.setdefault(recipe, {})[str(layers)] = [sum(each) / batches for each in zip(*norms, strict=True)]
        axes = {"model.recipe": RECIPES, "layers": depths[-2:-1], "train.seed": (1,) if lab.tiny else (1, 2)}
        return {"gradients": gradients, "runs": lab.compare("post-ln-init", lab.translation(), axes)}

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.cells import cells_by, is_lower

        cells, last = cells_by(found["runs"], "model.recipe"), _last_layers(found)
        plain, scaled = cells["post_ln"], cells["post_ln_init"]
        larger = [last["post_ln_init"][depth] > value for depth, value in last["post_ln"].items()]
        why = (
            f"the last layer's gradient is larger with Post-LN-init at {sum(larger)} of {len(larger)} depths; Post-LN "
            f"{plain.shown}, Post-LN-init {scaled.shown}"
        )
        if not any(larger) or is_lower(plain, scaled):
            return not_held(why)
        worse = plain.died or is_lower(scaled, plain)
        return held(why) if all(larger) and scaled.lives and worse else undecided(why)

    def numbers(self, found: Found) -> Table:
        from kilolayer.reproduce.cells import cells_by

        last, cells = _last_layers(found), cells_by(found["runs"], "model.recipe")
        depths = list(last["post_ln"])
        header = ["last decoder layer's gradient", *(f"{depth}L-{depth}L" for depth in depths), "validation loss"]
        return Table(header, [[name, *(f"{last[name][depth]:.3g}" for depth in depths), cells[name].shown] for name in RECIPES])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, first_by, lines

        deepest = {name: list(by_depth.values())[-1] for name, by_depth in found["gradients"].items()}
        by_layer = {name: [(place + 1.0, norm) for place, norm in enumerate(norms)] for name, norms in deepest.items()}
        by_depth = {name: [(float(depth), y) for depth, y in each.items()] for name, each in _last_layers(found).items()}
        return [
            lines(by_layer, "Gradient by layer of the deepest model", "decoder layer", "gradient norm", log=True),
            lines(by_depth, "Gradient of the last layer by depth", "layers per side", "gradient norm", log=True),
            curves(first_by(found["runs"], "model.recipe"), "valid", "Validation loss"),
        ]


def _last_layers(found: Found) -> dict[str, dict[str, float]]:
    return {name: {depth: norms[-1] for depth, norms in each.items()} for name, each in found["gradients"].items()}
