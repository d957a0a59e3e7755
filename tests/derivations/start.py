"""Gradients and updates at the start of training, and the runs of a thousand layers."""

from __future__ import annotations

import math
import re
from statistics import fmean

from tests.derivations.section import SHOWN, Data, Pieces, read, row, section, share, two_digits, word


def propagation_cells(results: Data, recipe: str) -> dict[str, str]:
    rows = {each["layers"]: each for each in results["rows"] if each["recipe"] == recipe}
    ratios = rows[1000]["gradient_ratios"]
    changes = {f"change {layers}": share(fmean(rows[layers]["updates"])) for layers in (6, 200)}
    return {"gradient": f"{two_digits(min(ratios))} to {two_digits(max(ratios))}", **changes}


@section("DeepNorm's gradient is the same", "propagation/results.json", given=("Adam step of 1e-4", "dim 32"))
def start_of_training(results: Data) -> Pieces:
    yield "the first and the last of 1,000 layers"
    yield f"{word(len(results['seeds']))} seeds"
    yield row("recipe", "gradient, 1,000 layers", "change of the output, 6 layers", "change of the output, 200 layers")
    for recipe in ("deepnorm", "sub_ln", "pre_ln", "post_ln"):
        yield row(SHOWN[recipe], *propagation_cells(results, recipe).values())


def said(run: Data) -> tuple[str, float]:
    """Depth and millions of parameters, as the run printed them: 500L-500L, 923.6."""
    found = re.search(r"(\d+L-\d+L), ([\d.]+) M", run["said"][0])
    assert found is not None
    return found[1], float(found[2])


@section(
    "A thousand layers train",
    "translation/thousand-deepnorm-500L.json",
    "translation/thousand-post_ln-500L.json",
    "translation/thousand-deepnorm-6L.json",
)
def thousand_layers(deep: Data, post_ln: Data, shallow: Data) -> Pieces:
    (depth, millions), losses = said(deep), dict(deep["valid"])
    step, loss = post_ln["train"][-1]
    spread = max(each["spread"]["gradient"]["encoder"] for each in deep["gradients"])
    first = post_ln["gradients"][0]
    yield f"{depth}, dim {read('translation/thousand.toml')['model']['dim']}"
    yield f"{millions:.0f}M parameters"
    yield f"{deep['steps']:,} steps, one seed"
    yield f"a DeepNorm {said(shallow)[0]} reaches {dict(shallow['valid'])[1500]:.2f}"
    heads = ("validation loss at step 700", f"at step {deep['steps']:,}")
    yield row("", *heads, "largest over smallest gradient of the encoder's layers")
    yield row(
        f"DeepNorm {depth}", f"{losses[700]:.2f}", f"{losses[deep['steps']]:.2f}", f"at most {math.ceil(10 * spread) / 10}"
    )
    ended = f"training loss {loss:.2f} at step {step}, where it was stopped"
    at_first = f"{float(format(first['spread']['gradient']['encoder'], '.1g')):,.0f} at step {first['step']}"
    yield row(f"Post-LN {said(post_ln)[0]}", ended, "", at_first)
