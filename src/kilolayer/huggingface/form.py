"""Choose the Transformers class that computes the same function as a model, if there is one.

No class supports tokens that are never predicted, which an imported model may have (`first_predicted`). If they are not read
either, they are dropped, and all other ids are reduced by their number. In a translation model this is padding, and the start
token takes its role, as in Marian; in a language model it is padding, unknown and start, and the end token serves as padding,
as in GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from kilolayer.data.tokenizer import END, PAD, START, UNKNOWN
from kilolayer.errors import FoldError
from kilolayer.huggingface.beit import Beit
from kilolayer.huggingface.bert import Bert
from kilolayer.huggingface.foreign_class import ACTIVATIONS, ForeignClass, is_plain
from kilolayer.huggingface.gpt2 import GPT2
from kilolayer.huggingface.marian import Marian
from kilolayer.huggingface.opt import OPT
from kilolayer.huggingface.pegasus import Pegasus
from kilolayer.huggingface.qwen3 import Qwen3
from kilolayer.huggingface.vit import ViT
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.models.fold import AnyModel, fold
from kilolayer.models.spelled_out import spell_out
from kilolayer.models.token_rows import without_first
from kilolayer.recipes.base import NORM, Plan

CLASSES: dict[Shape, tuple[ForeignClass, ...]] = {
    "encoder_decoder": (Marian(), Pegasus()),
    "decoder": (OPT(), GPT2(), Qwen3()),
    "encoder": (Bert(),),
}
"""Candidate classes, by the shape of the model."""
IMAGE_CLASSES: tuple[ForeignClass, ...] = (ViT(), Beit())
"""Candidate classes for an image encoder. All are Pre-LN, so that no fold helps."""
FIRST_READ: dict[Shape, int] = {"encoder_decoder": UNKNOWN, "decoder": END, "encoder": PAD}
"""By the shape of the model: the lowest id that text may contain, apart from padding."""


@dataclass(frozen=True)
class PlainForm:
    """foreign: the class. model: in the form that fits it. why: the reason for this class. left_out: number of first ids
    dropped."""

    foreign: ForeignClass
    model: AnyModel
    why: str
    left_out: int


@dataclass(frozen=True)
class NoPlainForm:
    """why: the reason that no class of Transformers computes what the model computes."""

    why: str


def find_form(model: AnyModel, positions: int, *, word_pieces: bool = False) -> PlainForm | NoPlainForm:
    """The class for a model, which is folded if possible. positions: size of the position table, if the class needs one.

    word_pieces: whether the vocabulary is WordPiece, without which BERT's class is of no use.
    """
    if model.config.image is not None:
        return _image_form(model)
    if model.config.vocab_size is None:
        return NoPlainForm("it has no vocabulary")
    if model.config.shape == "encoder" and not word_pieces:
        return NoPlainForm("it is an encoder whose vocabulary is not BERT's WordPiece")
    plain = folded(model, positions)
    kind = "its layers are Pre-LN" if plain is model else "it has a plain Post-LN form"
    reasons: list[list[str]] = []
    for each in _spellings(without_unused_tokens(plain), positions):
        for foreign in _classes(each.config):
            misfits = list(foreign.misfits(each.config))
            if not misfits:
                left_out = model.config.first_predicted - each.config.first_predicted
                return PlainForm(foreign, each, f"the recipe is {model.config.recipe.title}: {kind}", left_out)
            reasons.append(misfits)
    # Prefer the class that has the model's own layers.
    nearest = min(reasons, key=lambda misfits: (any("layers are" in each for each in misfits), len(misfits)))
    return NoPlainForm("; ".join(nearest))


def _image_form(model: AnyModel) -> PlainForm | NoPlainForm:
    config = model.config
    if config.map_head is not None:
        return NoPlainForm("it has a map head, and those of Transformers have other norms and layers")
    if config.patch_decoder is not None:
        return NoPlainForm("it has a decoder of hidden patches, which is not exported")
    if config.vocab_size is not None and not config.output_bias:
        model = with_output_bias(model)
    reasons = {foreign: list(foreign.misfits(model.config)) for foreign in IMAGE_CLASSES}
    # A head that is only in BEiT's classes says which class is meant.
    of_beit = config.head is not None and config.head.pooler == "norm"
    nearest, misfits = min(reasons.items(), key=lambda each: (of_beit and isinstance(each[0], ViT), len(each[1])))
    if misfits:
        return NoPlainForm("; ".join(misfits))
    return PlainForm(nearest, model, f"the recipe is {model.config.recipe.title}: its layers are Pre-LN", 0)


@torch.no_grad()
def with_output_bias(model: AnyModel) -> AnyModel:
    """The model with biases of 0 on its outputs, which BEiT's always have. All other weights are those of the given model."""
    found = build_model(replace(model.config, output_bias=True), device="meta", seed=model.seed)
    weights = model.state_dict()
    zeros = next(iter(weights.values())).new_zeros(*found.state_dict()["output_bias.weight"].shape)
    found.load_state_dict({**weights, "output_bias.weight": zeros}, assign=True)
    return found.train(model.training)


def without_unused_tokens(model: AnyModel) -> AnyModel:
    """The model without its first tokens if those are neither predicted nor read, else the model itself."""
    config = model.config
    if not 0 < config.first_predicted <= FIRST_READ[config.shape]:
        return model
    pad_id = START - config.first_predicted if config.shape == "encoder_decoder" else None
    return without_first(model, config.first_predicted, pad_id)


def _spellings(plain: AnyModel, positions: int) -> Iterator[AnyModel]:
    """The model and, for a decoder, also the form with plain tables as inputs."""
    yield plain
    if plain.config.shape == "decoder" and is_plain_stack(plain) and plain.config.positions in ("sinusoidal", "learned"):
        yield spell_out(plain, positions)


def _classes(config: ModelConfig) -> list[ForeignClass]:
    """The candidates for the shape, first those whose usual activation is the model's; the first that fits is chosen."""
    usual = ACTIVATIONS.get(config.activation)
    return sorted(CLASSES[config.shape], key=lambda foreign: foreign.defaults.get("activation_function") != usual)


def is_plain_stack(model: AnyModel) -> bool:
    """Whether the layers are plain Post-LN or Pre-LN."""
    return any(is_plain(model.config, plan) for plan in (Plan(out_norm=NORM), Plan(pre_norm=NORM)))


def folded(model: AnyModel, positions: int) -> AnyModel:
    """The plain Post-LN form if there is one, else the model itself."""
    for options in ({}, {"max_length": positions}):
        with suppress(FoldError):
            return fold(model, **options)
    return model
