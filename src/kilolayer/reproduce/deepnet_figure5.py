"""DeepNet, Figure 5: landscape and trajectory by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

RECIPES, DEPTHS, STEPS, EVERY, SIZE = ("deepnorm", "post_ln"), (6, 18, 50), 100, 5, 15


@register
class Figure5(Reproduction):
    """The plane of the first steps' two principal components."""

    name = "deepnet-figure5"
    trains_runs = False
    claim = (
        "With depth Post-LN's landscape becomes less smooth and its training gets stuck, while DeepNorm's stays as smooth and "
        "moves on."
    )
    setting = (
        "German to English, Tatoeba for IWSLT-14, the paper's model of 64-128-2 at 6L-6L, 18L-18L and 50L-50L; the first 100 "
        "steps of Adam at 1e-3 with a warm-up of 100, in the plane of their two principal components."
    )
    rule = (
        "Roughness as in deepnet-figure1. Held if at the greatest depth Post-LN is rougher than DeepNorm, and the loss of its "
        "training falls by less than half as much as DeepNorm's. Not held if Post-LN is smoother there and falls as much. "
        "Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.probe.surface import filters
        from kilolayer.probe.trajectory import Recorded, principal_plane, trajectory_surface
        from kilolayer.reproduce.early_training import EarlyTraining
        from kilolayer.reproduce.landscape import surface_as_json

        depths, steps, every, size = ((1, 2), 4, 1, 3) if lab.tiny else (DEPTHS, STEPS, EVERY, SIZE)
        found: Found = {recipe: {} for recipe in RECIPES}
        for recipe in RECIPES:
            for layers in depths:
                table = lab.translation(train={"warmup_steps": 100})
                table["model"] |= {"dim": 64, "ffn_dim": 128, "heads": 2, "recipe": recipe}
                table["model"] |= {"encoder_layers": layers, "decoder_layers": layers}
                training, noted = EarlyTraining(table), Recorded()
                noted.note(0, training.model)
                losses = []
                for step in range(1, steps + 1):
                    losses.append(training.step().nll)
                    if step % every == 0:
                        noted.note(step, training.model)
                plane = principal_plane(noted, list(filters(training.model)))
                surface = trajectory_surface(training.model, training.later_batches(2), plane, size)
                fall = sum(losses[:5]) / len(losses[:5]) - sum(losses[-5:]) / len(losses[-5:])
                found[recipe][str(layers)] = surface_as_json(surface, plane.path) | {"fall": fall, "explained": plane.explained}
        return found

    def judge(self, found: Found) -> Verdict:
        from kilolayer.reproduce.landscape import roughness

        ours, plain = (list(found[recipe].values())[-1] for recipe in RECIPES)
        smooth, rough = roughness(ours), roughness(plain)
        falls = f"the loss falls by {ours['fall']:.2f} and {plain['fall']:.2f}"
        why = f"roughness {smooth:.4f} of DeepNorm, {rough:.4f} of Post-LN; {falls}"
        if rough > smooth and plain["fall"] < ours["fall"] / 2:
            return held(why)
        return not_held(why) if rough < smooth and plain["fall"] >= ours["fall"] else undecided(why)

    def numbers(self, found: Found) -> Table:
        from kilolayer.reproduce.landscape import roughness

        rows = [
            [recipe, depth, f"{roughness(each):.4f}", f"{each['fall']:.3f}", f"{sum(each['explained']):.2f}"]
            for recipe in RECIPES
            for depth, each in found[recipe].items()
        ]
        return Table(["", "layers per side", "roughness", "fall of the loss", "variance in the plane"], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.landscape import picture

        return [
            picture(f"plane-{recipe}-{depth}", each, f"{recipe}, {depth} layers per side")
            for recipe in RECIPES
            for depth, each in found[recipe].items()
        ]
