"""Which class of Transformers computes what a model computes, if there is one.

No class has tokens without a probability, as a model that was imported may have (`first_predicted`). Where nothing reads them
either, they are left out, and the ids of all others are lower by their number. In a translator that is padding, whose part the
start then takes, as in Marian; in a language model padding, unknown and start, and the end is then padding, as in GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from kilolayer.convert.fold import AnyModel, fold
from kilolayer.convert.huggingface.bert import Bert
from kilolayer.convert.huggingface.foreign_class import ACTIVATIONS, ForeignClass, is_plain
from kilolayer.convert.huggingface.gpt2 import GPT2
from kilolayer.convert.huggingface.marian import Marian
from kilolayer.convert.huggingface.opt import OPT
from kilolayer.convert.huggingface.pegasus import Pegasus
from kilolayer.convert.spelled_out import spell_out
from kilolayer.convert.token_rows import without_first
from kilolayer.data.tokenizer import END, PAD, START, UNKNOWN
from kilolayer.errors import FoldError
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.recipes.base import Plan

CLASSES: dict[Shape, tuple[ForeignClass, ...]] = {
    "encoder_decoder": (Marian(), Pegasus()),
    "decoder": (OPT(), GPT2()),
    "encoder": (Bert(),),
}
"""By the shape of the model."""
FIRST_READ: dict[Shape, int] = {"encoder_decoder": UNKNOWN, "decoder": END, "encoder": PAD}
"""By the shape of the model: the lowest id that a text may have, padding apart."""


@dataclass(frozen=True)
class PlainForm:
    """foreign: the class; model: as it fits there; why: this class; left_out: how many ids are left out before the first."""

    foreign: ForeignClass
    model: AnyModel
    why: str
    left_out: int


@dataclass(frozen=True)
class NoPlainForm:
    """why: no class of Transformers computes what the model computes."""

    why: str


def find_form(model: AnyModel, positions: int, *, word_pieces: bool = False) -> PlainForm | NoPlainForm:
    """The class for a model, which is folded where it can be; positions: of the table where the class needs one.

    word_pieces: whether the vocabulary is BERT's kind, without which its class is of no use.
    """
    if model.config.shape == "encoder" and not word_pieces:
        return NoPlainForm("it is an encoder whose vocabulary is not BERT's WordPiece")
    plain = folded(model, positions)
    kind = "its layers are Pre-LN" if plain is model else "it has a plain Post-LN form"
    reasons: list[list[str]] = []
    for each in _spellings(without_unread(plain), positions):
        for foreign in _classes(each.config):
            misfits = list(foreign.misfits(each.config))
            if not misfits:
                left_out = model.config.first_predicted - each.config.first_predicted
                return PlainForm(foreign, each, f"the recipe is {model.config.recipe.title}: {kind}", left_out)
            reasons.append(misfits)
    # The class whose layers are the model's is the nearest one.
    nearest = min(reasons, key=lambda misfits: (any("layers are" in each for each in misfits), len(misfits)))
    return NoPlainForm("; ".join(nearest))


def without_unread(model: AnyModel) -> AnyModel:
    """The model without its first tokens where those are neither predicted nor read, else the model itself."""
    config = model.config
    if not 0 < config.first_predicted <= FIRST_READ[config.shape]:
        return model
    pad_id = START - config.first_predicted if config.shape == "encoder_decoder" else None
    return without_first(model, config.first_predicted, pad_id)


def _spellings(plain: AnyModel, positions: int) -> Iterator[AnyModel]:
    """The model, and a decoder with tables alone at its input too."""
    yield plain
    if plain.config.shape == "decoder" and is_plain_stack(plain) and plain.config.positions in ("sinusoidal", "learned"):
        yield spell_out(plain, positions)


def _classes(config: ModelConfig) -> list[ForeignClass]:
    """Of the shape; where several fit, the first is taken, and that is one whose usual activation is the model's."""
    usual = ACTIVATIONS.get(config.activation)
    return sorted(CLASSES[config.shape], key=lambda foreign: foreign.defaults.get("activation_function") != usual)


def is_plain_stack(model: AnyModel) -> bool:
    """Whether the layers are Post-LN or Pre-LN and nothing else."""
    return any(is_plain(model.config, plan) for plan in (Plan(out_norm=True), Plan(pre_norm=True)))


def folded(model: AnyModel, positions: int) -> AnyModel:
    """The plain Post-LN form where there is one, else the model itself."""
    for options in ({}, {"max_length": positions}):
        with suppress(FoldError):
            return fold(model, **options)
    return model
