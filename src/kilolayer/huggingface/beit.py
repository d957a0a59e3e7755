"""Pre-LN image encoders as BEiT: the base model, with a classifier, or with the scores of visual tokens at each patch.

Its attention has no bias on keys. One of ours adds the same to all scores of a query, and so changes nothing. BEiT's relative
position bias has no counterpart here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from kilolayer import recipes
from kilolayer.huggingface.foreign_class import is_plain, plans_of
from kilolayer.huggingface.vit import CLASSIFIER, ImageClass
from kilolayer.huggingface.weights import Entry, linear, norm
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Learned, Plan
from kilolayer.recipes.layer_scale import LayerScale

MASKED = "lm_head"


class Beit(ImageClass):
    """A classifier on the normed mean of the patches' states or on that of the class token, or outputs at each patch."""

    model_type: ClassVar[str] = "beit"
    architecture: ClassVar[str] = "BeitForImageClassification"
    defaults: ClassVar[Mapping[str, Any]] = {
        **ImageClass.defaults,
        "vocab_size": 8192,
        "use_mask_token": False,
        "use_absolute_position_embeddings": False,
        "layer_scale_init_value": 0.1,
        "drop_path_rate": 0.1,
        "use_mean_pooling": True,
    }
    required: ClassVar[Mapping[str, Any]] = {"use_relative_position_bias": False, "use_shared_relative_position_bias": False}
    readable: ClassVar[tuple[str, ...]] = ("BeitForImageClassification", "BeitForMaskedImageModeling", "BeitModel")
    prefix: ClassVar[str] = "beit."
    outputs: ClassVar[tuple[str, ...]] = (f"{CLASSIFIER}.", f"{MASKED}.", "layernorm.")
    unread: ClassVar[str] = r"beit\.pooler\..*"

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        yield from super().misfits(config)
        if not is_plain(config, Plan(pre_norm=NORM)) and _layer_scale(config) is None:
            yield f"its layers are not plain Pre-LN, nor Pre-LN with LayerScale: {config.recipe.equation}"
        if config.positions not in ("learned", "none"):
            yield f"its positions are {config.positions}, and BEiT's are learned"
        if config.head is None and (config.vocab_size is None or config.output_transform or config.final_norm is False):
            yield "it has no head, nor a final norm and outputs at each patch without output_transform"
        form = None if config.head is None else (config.head.pool, config.head.pooler, config.final_norm is not False)
        if form not in (None, ("first", "none", True), ("mean", "norm", False)):
            yield 'its head is neither pool="first" with pooler="none" nor pool="mean" with pooler="norm" and final_norm=False'

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        assert config.image is not None
        scale = _layer_scale(config)
        outputs = {} if config.vocab_size is None else {"vocab_size": config.vocab_size}
        masked = {"architectures": ["BeitForMaskedImageModeling"]} if config.head is None else {}
        return {
            **super().foreign_config(config),
            **outputs,
            **masked,
            "use_mask_token": config.image.mask_token,
            "use_absolute_position_embeddings": config.positions == "learned",
            "layer_scale_init_value": 0.0 if scale is None else scale.init,
            "drop_path_rate": config.drop_path,
            "use_mean_pooling": config.head is None or config.head.pool == "mean",
            **self.required,
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        start = theirs["layer_scale_init_value"]
        return {
            **super().own_options(theirs),
            "recipe": LayerScale(start=start) if start else recipes.PLAIN_PRE,
            "positions": "learned" if theirs["use_absolute_position_embeddings"] else "none",
            "drop_path": theirs["drop_path_rate"],
        }

    def image_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().image_options(theirs), "mask_token": theirs["use_mask_token"]}

    def options_of_weights(self, tensors: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Any]:
        if f"{MASKED}.weight" in tensors:
            return {"vocab_size": len(tensors[f"{MASKED}.weight"]), "output_bias": True}
        has_final = any(name in tensors for name in ("layernorm.weight", "beit.layernorm.weight"))
        head = self.head_of(tensors, **({"pooler": "none"} if has_final else {"pool": "mean", "pooler": "norm"}))
        return {"head": head, **({} if has_final else {"final_norm": False})}

    def entries(self, config: ModelConfig) -> list[Entry]:
        found = super().entries(config)
        for index in range(0 if _layer_scale(config) is None else config.depths.encoder):
            ours, theirs = f"encoder.blocks.{index}", f"beit.encoder.layer.{index}"
            found.append(Entry(f"{ours}.self_attention.branch.weight", (f"{theirs}.lambda_1",)))
            found.append(Entry(f"{ours}.feedforward.branch.weight", (f"{theirs}.lambda_2",)))
        return found

    def heads(self, ours: str, theirs: str) -> list[Entry]:
        weight, bias = linear(ours, *(f"{theirs}.{part}" for part in ("query", "key", "value")))
        return [weight, replace(bias, theirs=(bias.theirs[0], bias.theirs[2]), absent=1)]

    def top(self, config: ModelConfig) -> list[Entry]:
        if config.head is None and config.vocab_size is not None:
            table = Entry("vocabulary.weight", (f"{MASKED}.weight",))
            return [*norm("encoder.top_norm", "layernorm"), table, Entry("output_bias.weight", (f"{MASKED}.bias",))]
        found = [] if config.final_norm is False else norm("encoder.top_norm", "beit.layernorm")
        if config.head is not None:
            found += norm("head.norm", "beit.pooler.layernorm") if config.head.pooler == "norm" else []
            found += linear("head.output", CLASSIFIER)
        return found

    def copies(self, config: ModelConfig) -> dict[str, str]:
        """The base model's own norm has no prefix in its files, as the norm of the class with outputs at each patch."""
        if config.vocab_size is not None or config.final_norm is False:
            return {}
        return {f"layernorm.{part}": f"beit.layernorm.{part}" for part in ("weight", "bias")}


def _layer_scale(config: ModelConfig) -> Learned | None:
    """The learned vector on the branches of Pre-LN layers; None if the layers are others."""
    branch = next(plans_of(config)).branch
    if not isinstance(branch, Learned) or branch != Learned(branch.init, "vector"):
        return None
    return branch if is_plain(config, Plan(pre_norm=NORM, branch=branch)) else None
