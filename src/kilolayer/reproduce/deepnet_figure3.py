"""DeepNet, Figure 3: the chain from a large update to vanishing gradients."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

STEPS, EVERY, EARLY, SEEDS = 100, 5, 10, (1, 2, 3)
PLAIN = "Post-LN without warm-up"
# Both begin at Xavier's deviation, as in the paper's section 2, so that Post-LN-init differs by its factors alone.
TRAININGS: dict[str, tuple[Any, bool]] = {
    PLAIN: ({"name": "post_ln", "init": "xavier"}, False),
    "Post-LN with warm-up": ({"name": "post_ln", "init": "xavier"}, True),
    "Post-LN-init without warm-up": ("post_ln_init", False),
}
MEASURES = {
    "update of step 1": -1,
    f"sum of the updates of {EARLY} steps": -1,
    "input of the decoder's norms": -1,
    "gradient of decoder layer 1": 1,
}
"""What is compared, and whether a remedy that helps has a larger or a smaller value."""


@register
class Figure3(Reproduction):
    """Model update, inputs of the norms, and gradients of the decoder's layers over the first steps."""

    name = "deepnet-figure3"
    trains_runs = False
    claim = (
        "Without warm-up or a better start, Post-LN's update explodes at once, the inputs of its norms become large, and the "
        "gradients of its lower layers vanish."
    )
    setting = (
        f"German to English, Tatoeba for IWSLT-14, 18L-18L, dim 128, the first {STEPS} steps of Adam at 1e-3, warm-up "
        f"{STEPS} steps or none; Xavier's start, in Post-LN-init divided by the paper's factors; means of three seeds, each "
        "with the same batches in all trainings."
    )
    rule = (
        "Warm-up and the better start, Post-LN-init, are judged beside Post-LN with neither. A remedy helps if all four come "
        f"out as the paper has them: a smaller update in the first step, a smaller sum of the updates of the first {EARLY} "
        "steps (each the change since the step before), smaller inputs of the decoder's norms at the end, and a larger "
        "gradient of the first decoder layer at the end. Held if both remedies help. Not held if one of them is worse than "
        "Post-LN with neither in three or four of the four. Otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return {
            name: [_train(lab, recipe, warms, seed) for seed in (SEEDS[:1] if lab.tiny else SEEDS)]
            for name, (recipe, warms) in TRAININGS.items()
        }

    def judge(self, found: Found) -> Verdict:
        plain = _means(found[PLAIN])
        gains = {
            name: [sign * (own - other) for own, other, sign in zip(_means(found[name]), plain, MEASURES.values(), strict=True)]
            for name in TRAININGS
            if name != PLAIN
        }
        helps = {name: sum(gain > 0 for gain in each) for name, each in gains.items()}
        why = "; ".join(f"{name}: {count} of {len(MEASURES)} as the paper has them" for name, count in helps.items())
        if all(count == len(MEASURES) for count in helps.values()):
            return held(why)
        return not_held(why) if any(sum(gain < 0 for gain in each) >= 3 for each in gains.values()) else undecided(why)

    def numbers(self, found: Found) -> Table:
        return Table(["", *MEASURES], [[name, *(f"{value:.3g}" for value in _means(found[name]))] for name in TRAININGS])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        updates = {
            name: [
                (rows[0]["step"], fmean(row["update"] for row in rows))
                for rows in zip(*(each["rows"] for each in seeds), strict=True)
            ]
            for name, seeds in found.items()
        }
        gradients = {
            name: [
                (index, fmean(norms)) for index, norms in enumerate(zip(*(each["gradients"] for each in seeds), strict=True), 1)
            ]
            for name, seeds in found.items()
        }
        return [
            lines(updates, "Model update", "step", "change of the output since the start"),
            lines(gradients, "Gradient by layer at the end", "decoder layer", "gradient norm", log=True),
        ]


def _train(lab: Lab, recipe: Any, warms: bool, seed: int) -> dict[str, Any]:
    """The first steps of one training: the updates since the start and since the step before, and what is left at the end."""
    from kilolayer.probe.norm_inputs import norm_inputs
    from kilolayer.reproduce.early_training import EarlyTraining, model_update

    layers, steps = (2, 4) if lab.tiny else (18, STEPS)
    config = lab.translation(model={"recipe": recipe, "encoder_layers": layers, "decoder_layers": layers})
    config["train"] |= {"warmup_steps": steps if warms else 0, "schedule": "constant", "seed": seed}
    training = EarlyTraining(config)
    start = before = training.output()
    rows: list[dict[str, Any]] = [{"step": 0, "update": 0.0, "change": 0.0, "loss": None}]
    last: tuple[float, ...] = ()
    for step in range(1, steps + 1):
        measured = training.step()
        last = measured.stacks["decoder"]
        if step <= EARLY or step % EVERY == 0:
            now = training.output()
            row = {"step": step, "update": model_update(start, now), "loss": measured.nll}
            rows.append(row | ({"change": model_update(before, now)} if step <= EARLY else {}))
            before = now
    inputs = norm_inputs(training.model, training.loss)
    means = {side: {kind: fmean(values) for kind, values in kinds.items()} for side, kinds in inputs.items()}
    return {"rows": rows, "inputs": means, "gradients": list(last)}


def _means(seeds: list[dict[str, Any]]) -> list[float]:
    """The values of MEASURES, averaged over the seeds."""
    values = [
        (
            each["rows"][1]["update"],
            sum(row["change"] for row in each["rows"] if row["step"] <= EARLY),
            fmean(each["inputs"]["decoder"].values()),
            each["gradients"][0],
        )
        for each in seeds
    ]
    return [fmean(each) for each in zip(*values, strict=True)]
