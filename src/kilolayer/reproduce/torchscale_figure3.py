"""TorchScale, Figure 3: SparseClip against plain clipping."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from kilolayer.config import merge
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import MARGIN, Cell, cell_of, grid_of, is_lower

if TYPE_CHECKING:
    from kilolayer.report.panel import Panel
    from kilolayer.reproduce.lab import Lab

EXPERTS, LAYERS, CLIP, TOKENS = (16, 64, 256), 6, 1.0, 32_768
NO_GAIN = "experts do not help at this size"
CONDITION = f"undecided if the model with SparseClip is not clearly lower than the dense one, because then {NO_GAIN}."


def clippings(lab: Lab) -> Found:
    """Train sparse Magneto with both kinds of clipping, and its dense counterpart; Figure 4 uses the same runs."""
    layers, experts, seeds = (2, (2,), (1,)) if lab.tiny else (LAYERS, EXPERTS, (1, 2))
    config = lab.multilingual(model={"recipe": "sub_ln"}, batches={"tokens": TOKENS}, train={"clip_norm": CLIP})
    config = merge(config, {"model": {"encoder_layers": layers, "decoder_layers": layers}})
    dense: list[dict[str, Any]] = [{"train.seed": seed} for seed in seeds]
    sparse = [
        {"model.moe.experts": count, "model.moe.every": 2, "train.clip": clip, **each}
        for count, clip, each in product(experts, ("plain", "sparse"), dense)
    ]
    runs = lab.compare_settings("clipping", config, [*sparse, *dense])
    return {
        "dense": [run for run in runs if "train.clip" not in run["options"]],
        "sparse": [run for run in runs if "train.clip" in run["options"]],
    }


def cells_of_clippings(found: Found) -> dict[str, Cell]:
    """The cells by name: dense, and each number of experts with each kind of clipping."""
    dense = cell_of(found["dense"])
    assert dense is not None
    grid = grid_of(found["sparse"], "model.moe.experts", "train.clip")
    return {"dense": dense} | {f"{count} experts, {clip}": cell for count, row in grid.items() for clip, cell in row.items()}


def no_gain(cells: dict[str, Cell]) -> str | None:
    """Why clipping cannot be judged, if the claim's own condition is not met: that experts help with SparseClip."""
    dense, sparse = cells["dense"], list(cells.values())[-1]
    if is_lower(sparse, dense):
        return None
    return NO_GAIN if dense.ended and sparse.ended else "some runs have no result"


@register
class Figure3(Reproduction):
    """Training with 256 experts, plain clipping, SparseClip, and the dense model."""

    name = "torchscale-figure3"
    claim = "With plain clipping a model of 256 experts is no better than the dense one; with SparseClip it is clearly better."
    setting = (
        "31 languages to and from English, Tatoeba, Sub-LN 6L-6L, dim 128, 16, 64 and 256 experts in every second layer, "
        "top-2, clip norm 1.0, learning rate 1e-3, 1,000 steps of 32,768 tokens, 400 of them for warm-up, two seeds. At 256 "
        "experts a step has at most about 130 choices per expert on each side (the paper, with 262k tokens: about 2,000)."
    )
    rule = (
        f"At the largest number of experts: {CONDITION} Else held if SparseClip is clearly lower in validation loss (two "
        "standard errors and 0.02 nats) than plain clipping, and that not clearly lower than the dense model. Not held if "
        "plain clipping is clearly lower than SparseClip, or both are within 0.02 nats in the mean of two seeds. Otherwise it "
        "is undecided."
    )

    def measure(self, lab: Lab) -> Found:
        return clippings(lab)

    def judge(self, found: Found) -> Verdict:
        cells = cells_of_clippings(found)
        plain, sparse = list(cells.values())[-2:]
        why = "; ".join(f"{name} {cell.shown}" for name, cell in cells.items())
        if reason := no_gain(cells):
            return undecided(f"{reason}; {why}")
        if is_lower(sparse, plain):
            return undecided(why) if is_lower(plain, cells["dense"]) else held(why)
        lower = is_lower(plain, sparse)
        same = lower is not None and abs(plain.loss - sparse.loss) < MARGIN
        return not_held(why) if lower or same else undecided(why)

    def numbers(self, found: Found) -> Table:
        return Table(["", "validation loss"], [[name, cell.shown] for name, cell in cells_of_clippings(found).items()])

    def panels(self, found: Found) -> list[Panel]:
        from kilolayer.reproduce.pictures import curves, first_by

        most = max(run["options"]["model.moe.experts"] for run in found["sparse"])
        runs = first_by([run for run in found["sparse"] if run["options"]["model.moe.experts"] == most], "train.clip")
        return [curves({"dense": found["dense"][0], **runs}, "train", f"Training loss, {most} experts")]
