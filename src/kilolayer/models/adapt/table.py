"""Which class supports which recipe, as data: shown in docs/adapt.md and checked by tests."""

from __future__ import annotations

from kilolayer import recipes
from kilolayer.models.adapt.fit import obstacle
from kilolayer.recipes.base import Depths, Recipe, Side

YES = "yes"
WIDTH, LAYERS = 16, 2

POST_LN = ("nn.TransformerEncoder", "nn.TransformerDecoder", "nn.Transformer", "BERT", "RoBERTa", "BART", "Marian")
PRE_LN = (*(f"{title}, norm_first" for title in POST_LN[:3]), "GPT-2", "Llama", "T5", "ViT")
DECODERS = ("GPT-2", "Llama")
PAIRED = ("nn.Transformer", "nn.Transformer, norm_first", "BART", "Marian", "T5")
TORCH_DECODERS = ("nn.TransformerDecoder", "nn.TransformerDecoder, norm_first")


def rows() -> dict[str, Recipe]:
    """The recipes of the table by name; a recipe that fits only with an option is listed with it."""
    found: dict[str, Recipe] = {}
    for name in recipes.names():
        recipe = recipes.get(name)
        if "base_width" in recipe.options():
            found[f"{name}, base_width=dim"] = recipes.get(name, base_width=WIDTH)
        else:
            found[name] = recipe
        if recipe.calibration() is not None:
            found[f'{name}, start="closed"'] = recipes.get(name, start="closed")
    return found


def answer(title: str, recipe: Recipe) -> str:
    """Whether a class supports a recipe: "yes", or the reason why not."""
    depths, sides = _stacks(title)
    hindrance = obstacle(recipe, norm_first=title in PRE_LN, depths=depths, sides=sides, width=WIDTH)
    return YES if hindrance is None else hindrance.reason


def table() -> dict[str, dict[str, str]]:
    """For each recipe, for each class: "yes" or the reason."""
    return {label: {title: answer(title, recipe) for title in (*POST_LN, *PRE_LN)} for label, recipe in rows().items()}


def _stacks(title: str) -> tuple[Depths, tuple[Side, ...]]:
    if title in PAIRED:
        return Depths(LAYERS, LAYERS), ("encoder", "decoder")
    if title in TORCH_DECODERS:
        return Depths(LAYERS, LAYERS), ("decoder",)
    return (Depths(0, LAYERS), ("decoder",)) if title in DECODERS else (Depths(LAYERS, 0), ("encoder",))
