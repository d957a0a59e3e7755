"""Pre-LN image encoders with a class token and learned positions as ViT: the base model, or with a classifier."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from kilolayer import recipes
from kilolayer.errors import InputError, shown
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, layer_misfits
from kilolayer.huggingface.weights import Entry, linear, norm
from kilolayer.models.config import ModelConfig
from kilolayer.models.head import Head
from kilolayer.recipes.base import NORM, Plan

CLASSIFIER = "classifier"


class ImageClass(ForeignClass):
    """What ViT and BEiT share: x + f(LN(x)) in every sublayer, on embedded patches and a class token before them."""

    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dim": ("hidden_size",),
        "heads": ("num_attention_heads",),
        "ffn_dim": ("intermediate_size",),
        "activation": ("hidden_act",),
        "norm_eps": ("layer_norm_eps",),
        "dropout": ("hidden_dropout_prob",),
        "attention_dropout": ("attention_probs_dropout_prob",),
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "image_size": 224,
        "patch_size": 16,
        "num_channels": 3,
    }
    outputs: ClassVar[tuple[str, ...]] = (f"{CLASSIFIER}.",)

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.image is None or not config.image.class_token:
            yield "it reads no images with a class token"
        if config.embedding_norm:
            yield "it has a norm on its embeddings"
        yield from layer_misfits(config)

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        assert config.image is not None
        height, width = config.image.sides
        outputs = 0 if config.head is None else config.head.outputs
        labels = {str(index): f"LABEL_{index}" for index in range(outputs)}
        return {
            **super().foreign_config(config),
            "num_hidden_layers": config.depths.encoder,
            "image_size": height if height == width else [height, width],
            "patch_size": config.image.patch,
            "num_channels": config.image.channels,
            **({"id2label": labels, "label2id": {name: int(at) for at, name in labels.items()}} if labels else {}),
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().own_options(theirs),
            "shape": "encoder",
            "recipe": recipes.PLAIN_PRE,
            "layers": theirs["num_hidden_layers"],
            "vocab_size": None,
            "positions": "learned",
            "image": self.image_options(theirs),
        }

    def image_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """The table [model.image] that a config.json specifies."""
        height, width = _pair(theirs, "image_size")
        patch, other = _pair(theirs, "patch_size")
        if patch != other:
            raise InputError(f"patch_size is {shown(theirs['patch_size'])}", fix="only square patches are supported")
        return {"size": f"{height}x{width}", "patch": patch, "channels": theirs["num_channels"]}

    def head_of(self, tensors: Mapping[str, Tensor], **options: Any) -> Head | None:
        """The head of a file's classifier; None without one."""
        if f"{CLASSIFIER}.weight" not in tensors:
            return None
        outputs, *_ = (*tensors[f"{CLASSIFIER}.weight"].shape, 1)  # one of another rank is refused when all are checked
        return Head(outputs=outputs, dropout=0.0, **options)

    def entries(self, config: ModelConfig) -> list[Entry]:
        image, dim, embeddings = config.image, config.dim, f"{self.prefix}embeddings"
        assert image is not None
        kernel = (dim, image.channels, image.patch, image.patch)
        patches = f"{embeddings}.patch_embeddings.projection"
        found = [
            _shaped("patches.class_token", f"{embeddings}.cls_token", (dim,), (1, 1, dim)),
            _shaped("patches.projection.weight", f"{patches}.weight", (dim, image.pixels), kernel),
            Entry("patches.projection.bias", (f"{patches}.bias",)),
        ]
        if image.mask_token:
            found.append(_shaped("patches.mask_token", f"{embeddings}.mask_token", (dim,), (1, 1, dim)))
        if config.positions == "learned":
            table = (image.length, dim)
            found.append(_shaped("positions.weight", f"{embeddings}.position_embeddings", table, (1, *table)))
        for index in range(config.depths.encoder):
            found += self.layer(f"encoder.blocks.{index}", f"{self.prefix}encoder.layer.{index}")
        return [*found, *self.top(config)]

    def layer(self, ours: str, theirs: str) -> list[Entry]:
        """The weights of one layer."""
        return [
            *self.heads(f"{ours}.self_attention.f.query_key_value", f"{theirs}.attention.attention"),
            *linear(f"{ours}.self_attention.f.output", f"{theirs}.attention.output.dense"),
            *norm(f"{ours}.self_attention.pre_norm", f"{theirs}.layernorm_before"),
            *linear(f"{ours}.feedforward.f.input", f"{theirs}.intermediate.dense"),
            *linear(f"{ours}.feedforward.f.output", f"{theirs}.output.dense"),
            *norm(f"{ours}.feedforward.pre_norm", f"{theirs}.layernorm_after"),
        ]

    def heads(self, ours: str, theirs: str) -> list[Entry]:
        """The weights of queries, keys and values."""
        return linear(ours, *(f"{theirs}.{part}" for part in ("query", "key", "value")))

    @abstractmethod
    def top(self, config: ModelConfig) -> list[Entry]:
        """The weights of the final norm and of the outputs."""

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {}


class ViT(ImageClass):
    """A classifier on the normed state of the class token."""

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"
    required: ClassVar[Mapping[str, Any]] = {"qkv_bias": True}
    readable: ClassVar[tuple[str, ...]] = ("ViTForImageClassification", "ViTModel")
    prefix: ClassVar[str] = "vit."
    unread: ClassVar[str] = r"vit\.pooler\..*|vit\.embeddings\.mask_token"

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        yield from super().misfits(config)
        if not is_plain(config, Plan(pre_norm=NORM)) or config.final_norm is False:
            yield f"its layers are not plain Pre-LN with a final norm: {config.recipe.equation}"
        if config.positions != "learned":
            yield f"its positions are {config.positions}, and ViT's are learned"
        if config.image is not None and config.image.mask_token:
            yield "it has a mask token"
        if config.head is None or (config.head.pool, config.head.pooler) != ("first", "none"):
            yield 'it has no head with pool="first" and pooler="none"'

    def options_of_weights(self, tensors: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {"head": self.head_of(tensors, pooler="none")}

    def top(self, config: ModelConfig) -> list[Entry]:
        final = norm("encoder.top_norm", "vit.layernorm")
        return final if config.head is None else [*final, *linear("head.output", CLASSIFIER)]


def _pair(theirs: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Height and width of an option that is a number, or a list of both."""
    value = theirs[name]
    both = value if isinstance(value, Sequence) else (value, value)
    if len(both) != 2 or not all(isinstance(each, int) for each in both):
        raise InputError(f"{name} is {shown(value)}", fix="give a side in pixels, or height and width")
    return both[0], both[1]


def _shaped(ours: str, theirs: str, our_shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Entry:
    return Entry(ours, (theirs,), our_shape=our_shape, their_shape=their_shape)
