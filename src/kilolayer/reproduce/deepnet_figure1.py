"""DeepNet, Figure 1: the loss surfaces of Post-LN and DeepNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

RECIPES, STEPS, SIZE, SPAN = ("post_ln", "deepnorm"), 100, 17, 1.0
SMOOTHER = 2.0


@register
class Figure1(Reproduction):
    """The loss along two filter-normalized random directions, early in training."""

    name = "deepnet-figure1"
    trains_runs = False
    claim = "Early in training the loss surface of a 36-layer DeepNorm model is much smoother than Post-LN's."
    setting = (
        f"German to English, Tatoeba for IWSLT-14, 18L-18L, dim 128, after {STEPS} steps of Adam at 1e-3 with a warm-up of "
        f"100; {SIZE} x {SIZE} points within {SPAN:g} of the weights along two filter-normalized directions, two batches, "
        "three pairs of directions."
    )
    rule = (
        "Roughness is the mean size of the loss's second difference between neighbouring points, as a share of the surface's "
        f"height, a mean over the pairs of directions. Held if Post-LN's is at least {SMOOTHER:g} times DeepNorm's. Not held "
        "if it is smaller. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.probe.surface import grid, loss_surface, random_direction
        from kilolayer.reproduce.early_training import EarlyTraining
        from kilolayer.reproduce.landscape import surface_as_json

        layers, steps, size, tries = (1, 2, 3, 1) if lab.tiny else (18, STEPS, SIZE, 3)
        found: Found = {}
        for recipe in RECIPES:
            model = {"recipe": recipe, "encoder_layers": layers, "decoder_layers": layers}
            training = EarlyTraining(lab.translation(model=model, train={"warmup_steps": 100}))
            for _ in range(steps):
                training.step()
            loss = training.later_batches(2)
            points = grid(size, SPAN)
            found[recipe] = [
                surface_as_json(
                    loss_surface(
                        training.model,
                        loss,
                        [random_direction(training.model, 2 * number), random_direction(training.model, 2 * number + 1)],
                        points,
                        points,
                    )
                )
                for number in range(tries)
            ]
        return found

    def judge(self, found: Found) -> Verdict:
        plain, ours = (_mean_roughness(found, recipe) for recipe in RECIPES)
        why = f"roughness {plain:.4f} of Post-LN, {ours:.4f} of DeepNorm"
        if plain >= SMOOTHER * ours:
            return held(why)
        return not_held(why) if plain < ours else undecided(why)

    def numbers(self, found: Found) -> Table:
        return Table(["", "roughness"], [[recipe, f"{_mean_roughness(found, recipe):.4f}"] for recipe in RECIPES])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.landscape import picture

        return [picture(f"surface-{recipe}", found[recipe][0], f"Loss surface, {recipe}") for recipe in RECIPES]


def _mean_roughness(found: Found, recipe: str) -> float:
    from kilolayer.reproduce.landscape import roughness

    return sum(map(roughness, found[recipe])) / len(found[recipe])
