"""DeepNet, Figure 2: exploding gradients are not what makes Post-LN unstable."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import is_lower, named_cells
from kilolayer.reproduce.stored_run import has, keep

if TYPE_CHECKING:
    from pathlib import Path

    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

# Both begin at Xavier's deviation, as in the paper's section 2, so that Post-LN-init differs by its factors alone.
RECIPES: dict[str, Any] = {"Post-LN": {"name": "post_ln", "init": "xavier"}, "Post-LN-init": "post_ln_init"}
DEPTHS, LAYERS, EVERY = (6, 12, 18, 24), 18, 100
STEPS = (1, 100, 300, 1000)
"""The steps of training at which gradients are compared; that of step 1 is of the initial weights."""


@register
class Figure2(Reproduction):
    """Gradients of the top layers, and validation loss, of Post-LN and of Post-LN-init."""

    name = "deepnet-figure2"
    claim = (
        "Post-LN-init converges at 18L-18L and Post-LN does not, though Post-LN-init's gradients in the last layers are larger."
    )
    setting = (
        "German to English, Tatoeba for IWSLT-14, dim 128, Xavier's start, in Post-LN-init divided by the paper's factors; "
        "gradients of the decoder's layers at the start, 6L-6L to 24L-24L, mean of three batches; 1,000 steps of 18L-18L at "
        "learning rate 1e-3, 400 of them for warm-up, two seeds, with the gradients at the start and after 100, 300 and 1,000 "
        "steps."
    )
    rule = (
        "The last decoder layer's gradient of Post-LN-init is compared with Post-LN's at the start, at each depth, and in the "
        "mean of the seeds at those of the four steps of training that both have reached. Held if it is larger at every depth "
        "and at every step, and Post-LN-init lives at 18L-18L while Post-LN dies or is clearly higher in validation loss (two "
        "standard errors and 0.02 nats). Not held if it is smaller at every depth or at every step, or if Post-LN lives and "
        "is clearly lower. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.reproduce.early_training import EarlyTraining

        depths, layers, batches = ((1, 2), 1, 1) if lab.tiny else (DEPTHS, LAYERS, 3)
        found: Found = {"gradients": {}, "runs": {}}
        for name, recipe in RECIPES.items():
            found["gradients"][name] = {}
            for depth in depths:
                model = {"recipe": recipe, "encoder_layers": depth, "decoder_layers": depth, "dropout": 0.0}
                training = EarlyTraining(lab.translation(model=model))
                norms = [training.trial.step(0.0, layers=True).stacks["decoder"] for _ in range(batches)]
                found["gradients"][name][str(depth)] = [fmean(each) for each in zip(*norms, strict=True)]
        config = lab.translation(train={"layers_every": 4 if lab.tiny else EVERY})
        axes = {"model.recipe": list(RECIPES.values()), "layers": (layers,), "train.seed": (1,) if lab.tiny else (1, 2)}
        runs = lab.compare("post-ln-init", config, axes)
        for run in runs:
            keep(run, "last_layer", _last_layer)
        for name, recipe in RECIPES.items():
            found["runs"][name] = [run for run in runs if has(run, {"model.recipe": recipe})]
        return found

    def judge(self, found: Found) -> Verdict:
        start, later = _at_the_start(found), _in_training(found)
        plain, scaled = named_cells(found["runs"]).values()
        depths = [start["Post-LN-init"][depth] - value for depth, value in start["Post-LN"].items()]
        steps = [later["Post-LN-init"][step] - later["Post-LN"][step] for step in _steps(later)]
        at_depths, at_steps = (f"{sum(gain > 0 for gain in gains)} of {len(gains)}" for gains in (depths, steps))
        why = (
            f"the last layer's gradient is larger with Post-LN-init at {at_depths} depths at the start, and at {at_steps} "
            f"steps of training; Post-LN {plain.shown}, Post-LN-init {scaled.shown}"
        )
        if any(gains and max(gains) < 0 for gains in (depths, steps)) or is_lower(plain, scaled):
            return not_held(why)
        larger = all(gains and min(gains) > 0 for gains in (depths, steps))
        worse = plain.died or is_lower(scaled, plain)
        return held(why) if larger and scaled.lives and worse else undecided(why)

    def numbers(self, found: Found) -> Table:
        start, later, cells = _at_the_start(found), _in_training(found), named_cells(found["runs"])
        depths, steps = list(start["Post-LN"]), _steps(later)
        header = [*(f"{depth}L-{depth}L, start" for depth in depths), *(f"step {step}" for step in steps), "validation loss"]
        rows = [
            [
                name,
                *(f"{start[name][depth]:.3g}" for depth in depths),
                *(f"{later[name][step]:.3g}" for step in steps),
                cells[name].shown,
            ]
            for name in RECIPES
        ]
        return Table(["last decoder layer's gradient", *header], rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, lines

        deepest = {name: list(by_depth.values())[-1] for name, by_depth in found["gradients"].items()}
        by_layer = {name: [(index + 1.0, norm) for index, norm in enumerate(norms)] for name, norms in deepest.items()}
        by_depth = {name: [(float(depth), y) for depth, y in each.items()] for name, each in _at_the_start(found).items()}
        by_step = {name: [(float(step), y) for step, y in each.items()] for name, each in _in_training(found).items()}
        return [
            lines(by_layer, "Gradient by layer of the deepest model", "decoder layer", "gradient norm", log=True),
            lines(by_depth, "Gradient of the last layer by depth", "layers per side", "gradient norm", log=True),
            lines(by_step, "Gradient of the last layer in training", "step", "gradient norm", log=True),
            curves({name: runs[0] for name, runs in found["runs"].items()}, "valid", "Validation loss"),
        ]


def _last_layer(folder: Path) -> list[tuple[int, float | None]]:
    """The gradient of the last decoder layer by step."""
    from kilolayer.report.record import read_record

    return [(int(row["step"]), row["gradient"]["decoder"][-1]) for row in read_record(folder).layers]


def _at_the_start(found: Found) -> dict[str, dict[str, float]]:
    return {name: {depth: norms[-1] for depth, norms in each.items()} for name, each in found["gradients"].items()}


def _in_training(found: Found) -> dict[str, dict[int, float]]:
    """The gradient of the last decoder layer by step, averaged over the seeds; only steps at which every seed has one."""
    means: dict[str, dict[int, float]] = {}
    for name, runs in found["runs"].items():
        seeds = [{step: norm for step, norm in run["last_layer"] or () if norm is not None} for run in runs]
        means[name] = {step: fmean(seed[step] for seed in seeds) for step in seeds[0] if all(step in seed for seed in seeds)}
    return means


def _steps(means: dict[str, dict[int, float]]) -> list[int]:
    """The steps of STEPS that both have reached."""
    return [step for step in STEPS if all(step in own for own in means.values())]
