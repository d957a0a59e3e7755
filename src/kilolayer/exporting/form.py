"""Which class of Transformers computes what a model computes, if there is one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kilolayer.convert.fold import AnyModel, fold
from kilolayer.convert.huggingface.foreign_class import ForeignClass, is_plain
from kilolayer.convert.huggingface.marian import Marian
from kilolayer.convert.huggingface.opt import OPT
from kilolayer.convert.huggingface.pegasus import Pegasus
from kilolayer.convert.spelled_out import spell_out
from kilolayer.errors import FoldError
from kilolayer.recipes.base import Plan

CLASSES: dict[str, tuple[ForeignClass, ...]] = {
    "encoder_decoder": (Marian(), Pegasus()),
    "decoder": (OPT(),),
    "encoder": (),
}
"""By the shape of the model; the first that fits is taken."""


@dataclass(frozen=True)
class PlainForm:
    """foreign: the class; model: as it fits there; why: this class."""

    foreign: ForeignClass
    model: AnyModel
    why: str


@dataclass(frozen=True)
class NoPlainForm:
    """why: no class of Transformers computes what the model computes."""

    why: str


def find_form(model: AnyModel, positions: int) -> PlainForm | NoPlainForm:
    """The class for a model, which is folded where it can be; positions: of the table where the class needs one."""
    plain = folded(model, positions)
    kind = "its layers are Pre-LN" if plain is model else "it has a plain Post-LN form"
    if model.config.shape == "decoder" and is_plain_stack(plain) and plain.config.positions in ("sinusoidal", "learned"):
        plain = spell_out(plain, positions)
    misfits = {foreign: list(foreign.misfits(plain.config)) for foreign in CLASSES[model.config.shape]}
    for foreign, reasons in misfits.items():
        if not reasons:
            return PlainForm(foreign, plain, f"the recipe is {model.config.recipe.title}: {kind}")
    # The class whose layers are the model's is the nearest one.
    nearest = min(
        misfits.values(), key=lambda reasons: (any("layers are" in each for each in reasons), len(reasons)), default=[]
    )
    return NoPlainForm("; ".join(nearest) or "it is an encoder alone")


def is_plain_stack(model: AnyModel) -> bool:
    """Whether the layers are Post-LN or Pre-LN and nothing else."""
    return any(is_plain(model.config, plan) for plan in (Plan(out_norm=True), Plan(pre_norm=True)))


def folded(model: AnyModel, positions: int) -> AnyModel:
    """The plain Post-LN form where there is one, else the model itself."""
    for options in ({}, {"max_length": positions}):
        with suppress(FoldError):
            return fold(model, **options)
    return model
