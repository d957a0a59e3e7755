"""DeepNet, Figure 3: the chain from a large update to vanishing gradients."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

STEPS, EVERY = 100, 5
TRAININGS: dict[str, tuple[str, bool]] = {
    "Post-LN without warm-up": ("post_ln", False),
    "Post-LN": ("post_ln", True),
    "Post-LN-init without warm-up": ("post_ln_init", False),
}
PLAIN = "Post-LN without warm-up"


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
        f"{STEPS} steps or none; one seed, the same batches."
    )
    rule = (
        "Without warm-up, Post-LN is compared with both others: the largest update of the first ten steps, the mean input of "
        "the decoder's norms at the end (both larger), and the gradient of the first decoder layer at the end (smaller). Held "
        "if all six comparisons come out so, not held if three or fewer do, otherwise it is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        from kilolayer.probe.norm_inputs import norm_inputs
        from kilolayer.reproduce.early_training import EarlyTraining

        layers, steps = (2, 4) if lab.tiny else (18, STEPS)
        found: Found = {}
        for name, (recipe, warms) in TRAININGS.items():
            model = {"recipe": recipe, "encoder_layers": layers, "decoder_layers": layers}
            config = lab.translation(model=model)
            config["train"] |= {"warmup_steps": steps if warms else 0, "schedule": "constant"}
            training = EarlyTraining(config)
            rows: list[dict[str, Any]] = [{"step": 0, "update": training.model_update(), "loss": None}]
            last: dict[str, tuple[float, ...]] = {}
            for step in range(1, steps + 1):
                measured = training.step()
                last = measured.stacks
                if step <= 10 or step % EVERY == 0:
                    rows.append({"step": step, "loss": measured.nll, "update": training.model_update()})
            inputs = norm_inputs(training.model, training.loss)
            means = {side: {kind: fmean(values) for kind, values in kinds.items()} for side, kinds in inputs.items()}
            found[name] = {"rows": rows, "inputs": means, "gradients": list(last["decoder"])}
        return found

    def judge(self, found: Found) -> Verdict:
        values = {name: _summary(found[name]) for name in TRAININGS}
        plain, others = values[PLAIN], [values[name] for name in TRAININGS if name != PLAIN]
        signs = [plain["update"] > other["update"] for other in others]
        signs += [plain["input"] > other["input"] for other in others]
        signs += [plain["gradient"] < other["gradient"] for other in others]
        why = f"{sum(signs)} of {len(signs)} comparisons as the paper has them"
        if all(signs):
            return held(why)
        return not_held(why) if sum(signs) <= 3 else undecided(why)

    def numbers(self, found: Found) -> Table:
        header = ["", "largest update, 10 steps", "input of the decoder's norms", "gradient of decoder layer 1"]
        rows = [[name, *(f"{value:.3g}" for value in _summary(found[name]).values())] for name in TRAININGS]
        return Table(header, rows)

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import lines

        updates = {name: [(row["step"], row["update"]) for row in found[name]["rows"]] for name in TRAININGS}
        gradients = {name: [(place + 1.0, norm) for place, norm in enumerate(found[name]["gradients"])] for name in TRAININGS}
        return [
            lines(updates, "Model update", "step", "change of the output since the start"),
            lines(gradients, "Gradient by layer at the end", "decoder layer", "gradient norm", log=True),
        ]


def _summary(each: dict[str, Any]) -> dict[str, float]:
    return {
        "update": max(row["update"] for row in each["rows"] if row["step"] <= 10),
        "input": fmean(each["inputs"]["decoder"].values()),
        "gradient": each["gradients"][0],
    }
