"""The configuration of a model: the table [model] of a configuration file, and the attribute `.config` of every model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from kilolayer import recipes
from kilolayer.config import bounded, convert_fields, strict_class
from kilolayer.errors import OptionError, UnusedOptionError
from kilolayer.layers.options import LayerOptions
from kilolayer.models.head import Head
from kilolayer.models.image_input import ImageInput
from kilolayer.models.map_head import MapHead
from kilolayer.moe.config import MoE
from kilolayer.recipes.base import DEEPEST, Depths, Place, Recipe, Side

Shape = Literal["encoder", "decoder", "encoder_decoder"]
MOST_PARAMETERS = 10**15
"""A thousand times the largest models; with more, byte counts would overflow."""


AS_ENCODER = ("recipe", "activation", "norm", "norm_eps", "qk_norm", "positions", "embedding_norm", "final_norm")
"""The options that an image encoder's decoder shares with it."""
DEFAULT_LAYERS = 18
"""Number of layers in each stack if the configuration does not set a depth."""


@strict_class
@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerOptions):
    """Shape, depth, vocabulary and recipe of a model, in addition to the options of its layers.

    Each option also accepts the form that it has in TOML, `recipe="admin"`, `moe={"experts": 4}`, `pad_id="none"`, so that
    `ModelConfig(**table)` reads the table [model] of a configuration file.
    """

    replaces: ClassVar = {"layers": ("encoder_layers", "decoder_layers")}

    shape: Shape = "encoder_decoder"
    """Which stacks the model has."""
    layers: int | None = bounded(None, least=1, most=DEEPEST)
    """Number of layers in each stack. Default: 18."""
    encoder_layers: int | None = bounded(None, least=1, most=DEEPEST)
    """Number of encoder layers, if different from `layers`."""
    decoder_layers: int | None = bounded(None, least=1, most=DEEPEST)
    """Number of decoder layers, if different from `layers`."""
    vocab_size: int | None = bounded(32_000, least=1, most=2**24)
    """Vocabulary size; absent for an encoder that only reads embeddings."""
    source_vocab_size: int | None = bounded(None, least=1, most=2**24)
    """Size of the source vocabulary, if the source has its own."""
    recipe: Recipe = field(
        default_factory=lambda: recipes.get(recipes.DEFAULT), metadata={"parse": recipes.parse, "table": Recipe.table}
    )
    """The method that makes the depth trainable: a name, or a table with `name` and its options."""
    pad_id: int | None = bounded(0, least=0, below=2**24)
    """Token id of padding; absent if nothing is padded."""
    tie_embeddings: bool | Literal["output"] | None = None
    """Share one embedding table between input and output: in an encoder-decoder among source, target and output, or with
    "output" between target and output only. Default: true, but false for a decoder-only model, which with a shared table starts
    out repeating its input."""
    scale_embeddings: bool = True
    """Multiply the input embeddings by sqrt(dim)."""
    embedding_norm: bool = False
    """Apply a norm to the embedded input, positions included, as BERT does."""
    token_types: int | None = bounded(None, least=1, most=2**16)
    """Number of token types, each with a learned vector added at the input; BERT has 2, for the two sentences of a pair.
    Default: none."""
    output_transform: bool = False
    """Insert norm(activation(W x + b)) between the encoder and the output logits, as BERT does."""
    output_bias: bool = False
    """Add a learned bias to the output logits."""
    final_norm: bool | None = None
    """False omits the final norm of a recipe that has one. Default: as the recipe specifies."""
    moe: MoE | None = None
    """Experts that replace feed-forward networks: the table [model.moe], see docs/sparse.md. Default: a dense model."""
    head: Head | None = None
    """Scores whole sequences from an encoder's output: the table [model.head]. Default: logits over the vocabulary at each
    position."""
    image: ImageInput | None = None
    """Read images instead of tokens: the table [model.image]. `vocab_size` is then the number of outputs at each patch, and
    positions are those of rows and columns. Default: the model reads tokens."""
    map_head: MapHead | None = None
    """Scores every pixel of an image: the table [model.map_head]. Default: none."""
    first_predicted: int = bounded(0, least=0, below=2**24)
    """Lowest token id that can be predicted. The ids below it, special tokens that an imported model's vocabulary does not
    have, get probability 0."""
    encoder_first_eps: float | None = bounded(None, above=0, most=1e30)
    """eps of the encoder's first norm, where a folded model needs a value of its own."""
    decoder_first_eps: float | None = bounded(None, above=0, most=1e30)
    """eps of the decoder's first norm, where a folded model needs a value of its own."""

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.image is not None and self.pad_id == 0:
            object.__setattr__(self, "pad_id", None)
        if self.tie_embeddings is None:
            object.__setattr__(self, "tie_embeddings", self.shape != "decoder" and self.image is None)
        super().__post_init__()
        self._check_image()
        self._check_depth()
        self._check_vocabulary()
        self._check_final_norm()
        self._check_norm()
        self._check_experts()
        self._check_multiway()
        self._check_input()
        self._check_head()
        self._check_output()
        self._check_size()
        self.recipe.check_depths(self.depths)
        self.recipe.check_embeddings(self.scale_embeddings)
        if self.positions == "xpos" and self.shape == "encoder":
            raise OptionError(
                "xPos decays with the distance into the past, and an encoder also looks ahead",
                fix='choose positions="rotary", or a decoder',
            )

    @classmethod
    def of(cls, shape: Shape, arguments: Mapping[str, Any]) -> Self:
        """The configuration described by a constructor's arguments; arguments that are not options are ignored."""
        names = {each.name for each in dataclasses.fields(cls)}
        options = {name: value for name, value in arguments.items() if name in names}
        return cls(**{**options, "shape": shape})

    @classmethod
    def complete(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table [model] with other defaults if the model reads images: an encoder without outputs at each patch.

        Without a class token, its head takes the mean.
        """
        image, head = table.get("image", "none"), table.get("head")
        if image == "none":
            return table
        table = {"shape": "encoder", "vocab_size": "none", **table}
        tokenless = isinstance(image, Mapping) and image.get("class_token") is False
        return {**table, "head": {"pool": "mean", **head}} if tokenless and isinstance(head, Mapping) else table

    @property
    def depths(self) -> Depths:
        """The number of layers in each stack; 0 for a stack that the shape does not have."""
        layers = DEFAULT_LAYERS if self.layers is None else self.layers
        encoder = layers if self.encoder_layers is None else self.encoder_layers
        decoder = layers if self.decoder_layers is None else self.decoder_layers
        return Depths(0 if self.shape == "decoder" else encoder, 0 if self.shape == "encoder" else decoder)

    @property
    def predicts(self) -> bool:
        """Whether the last stack's states are scored by an output table."""
        return self.vocab_size is not None and self.head is None and self.patch_decoder is None

    @property
    def patch_decoder(self) -> ModelConfig | None:
        """The configuration of an image encoder's decoder; None without one. It has no experts and no dropout."""
        if self.image is None or self.image.decoder is None:
            return None
        own = self.image.decoder
        return ModelConfig(
            shape="encoder",
            dim=own.dim,
            heads=own.heads,
            ffn_dim=4 * own.dim if own.ffn_dim is None else own.ffn_dim,
            layers=own.layers,
            vocab_size=self.vocab_size,
            output_bias=self.output_bias,
            image=dataclasses.replace(self.image, decoder=None),
            **{name: getattr(self, name) for name in AS_ENCODER},
        )

    @property
    def title(self) -> str:
        """Recipe and depth in words, for logs and reports."""
        return f"{self.recipe.title} {self.depths.title}"

    @property
    def widths(self) -> str:
        """The sizes of the layers in words, for logs and reports."""
        experts = f", {self.experts}" if self.experts else ""
        return f"dim {self.dim}, {self.heads} heads, FFN {self.ffn_dim}{experts}"

    @property
    def experts(self) -> str:
        """The experts in words; empty for a dense model."""
        if self.moe is None:
            return ""
        every = self.moe.every
        ending = "th" if every % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(every % 10, "th")
        where = "every layer" if every == 1 else f"every {every}{ending} layer"
        return f"{self.moe.experts} experts, top-{self.moe.top_k}, in {where}"

    def first_eps(self, side: Side) -> float | None:
        """The eps of a stack's first norm, if it differs from `norm_eps`."""
        return self.encoder_first_eps if side == "encoder" else self.decoder_first_eps

    def _check_final_norm(self) -> None:
        if self.final_norm is None or self.recipe.top(self.depths.sides[0], self.depths).norm:
            return
        wish = "contradicts" if self.final_norm else "has no effect on"
        raise UnusedOptionError(
            f"final_norm={self.final_norm} {wish} the recipe {self.recipe.name!r}, which has no final norm",
            fix="remove final_norm, or choose a Pre-LN recipe",
            unused="final_norm",
            beside=("recipe",),
        )

    def _check_norm(self) -> None:
        """Reject options of the norm if the recipe has no norms."""
        default = {each.name: each.default for each in dataclasses.fields(LayerOptions)}
        changed = [name for name in ("norm", "norm_eps") if getattr(self, name) != default[name]]
        depths = self.depths
        plans = [self.recipe.plan(Place(kind, side, 1, depths)) for side in depths.sides for kind in depths.kinds(side)]
        normed = any(plan.norms for plan in plans)
        in_head = self.head is not None and self.head.pooler == "norm"
        in_head = in_head or (self.map_head is not None and self.map_head.kind == "upernet")
        if changed and not normed and not self.embedding_norm and not self.qk_norm and not in_head:
            raise UnusedOptionError(
                f"{changed[0]} has no effect on the recipe {self.recipe.name!r}, which has no norms",
                fix="remove it",
                unused=changed[0],
                beside=("recipe",),
            )

    def _check_experts(self) -> None:
        if self.moe is not None and self.moe.every > (deepest := max(self.depths.encoder, self.depths.decoder)):
            raise OptionError(
                f"experts in one of every {self.moe.every} layers do not fit into {deepest} layers",
                where="moe",
                fix=f"every must be at most {deepest}",
            )

    def _check_multiway(self) -> None:
        if self.multiway is None:
            return
        if self.shape != "encoder":
            raise OptionError(
                f"the shape {self.shape!r} cannot have multiway layers: nothing says of which modality a generated token is",
                fix='remove multiway, or set shape = "encoder"',
            )
        if self.moe is not None:
            raise OptionError(
                "multiway gives each modality a feed-forward network of its own, and experts replace these networks",
                fix="remove multiway or moe",
            )
        if self.image is not None:
            raise OptionError(
                "an image encoder reads one modality, and multiway has weights for two",
                fix="remove multiway, or read patches and tokens in one sequence with kl.Encoder (docs/multiway.md)",
            )

    def _check_head(self) -> None:
        if self.head is not None and self.shape != "encoder":
            raise OptionError(f"the shape {self.shape!r} cannot have a head", where="head", fix='set shape = "encoder"')
        if self.head is not None and not self.tie_embeddings and self.image is None:
            raise OptionError("tie_embeddings has no effect: a head replaces the output table", fix="remove tie_embeddings")

    def _check_input(self) -> None:
        if self.embedding_norm and any(self.recipe.input_norm(side, self.depths) for side in self.depths.sides):
            raise OptionError(
                f"embedding_norm has no effect: the recipe {self.recipe.name!r} already has such a norm", fix="remove it"
            )
        if self.token_types is not None and self.shape != "encoder":
            raise OptionError(f"the shape {self.shape!r} has no token types", fix="remove token_types")

    def _check_positions(self) -> None:
        if self.image is None:
            super()._check_positions()
            return
        if self.positions in ("xpos", "t5"):
            raise OptionError(
                f"{self.positions} positions are those of a text", fix="for images: learned, sinusoidal, rotary or none"
            )
        if self.max_length is not None:
            raise OptionError("max_length has no effect on a model that reads images", fix="remove it")
        width = {"sinusoidal": self.dim, "rotary": self.head_dim}.get(self.positions, 4)
        if width % 4:
            what = "dim" if self.positions == "sinusoidal" else "a head width (dim / heads)"
            raise OptionError(
                f"{self.positions} positions in rows and columns need {what} that 4 divides, not {width}",
                fix="change dim, heads or positions",
            )

    def _check_image(self) -> None:
        """Reject what contradicts images, and the options of tokens, which have no effect on them."""
        image = self.image
        if image is None:
            if self.map_head is not None:
                raise OptionError("a map head scores pixels, and this model reads tokens", where="map_head", fix="set image")
            return
        if self.shape != "encoder":
            raise OptionError(f"the shape {self.shape!r} does not read images", where="image", fix='set shape = "encoder"')
        of_tokens = {
            "pad_id": self.pad_id is not None,
            "tie_embeddings": bool(self.tie_embeddings),
            "scale_embeddings": not self.scale_embeddings,
            "token_types": self.token_types is not None,
            "first_predicted": bool(self.first_predicted),
        }
        for name in (name for name, given in of_tokens.items() if given):
            raise OptionError(f"{name} has no effect on a model that reads images", fix="remove it")
        if image.decoder is not None:
            self._check_decoder()
        if self.head is not None and self.map_head is not None:
            raise OptionError("head has no effect on a model with a map head", fix="remove one of them")
        if self.vocab_size is not None and (self.head is not None or self.map_head is not None):
            raise OptionError(
                f"vocab_size={self.vocab_size}, outputs at each patch, has no effect on a model with a head",
                fix="set vocab_size to none",
            )
        if self.head is not None and self.head.pool == "first" and not image.class_token:
            raise OptionError(
                "a head cannot read the class token of a model without one",
                where="head",
                fix='set pool = "mean", or image.class_token = true',
            )

    def _check_decoder(self) -> None:
        headed = self.head is not None or self.map_head is not None
        if self.vocab_size is None or headed:
            fix = "remove it" if headed else "set vocab_size, or remove the decoder"
            raise OptionError("a decoder predicts each patch: it needs vocab_size, and no head", where="image.decoder", fix=fix)
        if self.output_transform:
            raise OptionError("output_transform has no effect: a decoder gives the outputs", fix="remove it")
        try:
            assert self.patch_decoder is not None
        except OptionError as error:
            raise error.at("image.decoder") from None

    def _check_output(self) -> None:
        given = {name: bool(getattr(self, name)) for name in ("output_transform", "output_bias", "first_predicted")}
        for name in (name for name, there in given.items() if there):
            if self.vocab_size is None or self.head is not None:
                absent = "without a vocabulary" if self.vocab_size is None else "with a head"
                raise OptionError(f"{name} has no effect on a model {absent}", fix="remove it")
        if self.output_transform and self.shape != "encoder":
            raise OptionError(f"output_transform applies to encoders, not to the shape {self.shape!r}", fix="remove it")
        if self.output_transform and self.activation == "swiglu":
            raise OptionError(
                "output_transform cannot be used with swiglu, which needs a gate", fix="remove it, or choose another activation"
            )
        if self.vocab_size is not None and self.first_predicted >= self.vocab_size:
            raise OptionError(f"first_predicted is {self.first_predicted}", fix=f"allowed: 0 to {self.vocab_size - 1}")

    @property
    def about_parameters(self) -> int:
        """Fewer parameters than the model has, but of the same order; found without building it."""
        networks = 1 if self.moe is None else self.moe.experts
        layer = self.dim * (self.dim + self.ffn_dim * networks) * (self.multiway or 1)
        tables = self.dim * ((self.vocab_size or 0) + (self.source_vocab_size or 0) + (self.max_length or 0))
        return tables + layer * (self.depths.encoder + self.depths.decoder)

    def _check_size(self) -> None:
        if self.about_parameters > MOST_PARAMETERS:
            raise OptionError(
                f"the model has more than {self.about_parameters:.0e} parameters",
                fix=f"lower dim, ffn_dim, layers, vocab_size or experts: at most {MOST_PARAMETERS:.0e} are supported",
            )

    def _check_depth(self) -> None:
        open_sides = [side for side in self.depths.sides if getattr(self, f"{side}_layers") is None]
        if self.layers is not None and not open_sides:
            raise UnusedOptionError(
                f"layers={self.layers} has no effect: encoder_layers and decoder_layers set both depths",
                fix="remove layers, or set encoder_layers and decoder_layers instead",
                unused="layers",
                beside=("encoder_layers", "decoder_layers"),
                either=True,
            )
        for side in ("encoder", "decoder"):
            if self.shape not in (side, "encoder_decoder") and getattr(self, f"{side}_layers") is not None:
                raise UnusedOptionError(
                    f"{side}_layers has no effect on the shape {self.shape!r}",
                    fix='remove it, or choose shape="encoder_decoder"',
                    unused=f"{side}_layers",
                    beside=("shape",),
                )

    def _check_vocabulary(self) -> None:
        if self.vocab_size is None and self.shape != "encoder":
            raise OptionError("a decoder needs a vocabulary to predict", fix="set vocab_size")
        if self.vocab_size is None and self.image is None and not (self.tie_embeddings and self.scale_embeddings):
            raise OptionError(
                "tie_embeddings and scale_embeddings have no effect without a vocabulary", fix="remove them, or set vocab_size"
            )
        sizes = [size for size in (self.vocab_size, self.source_vocab_size) if size is not None]
        if self.pad_id is not None and sizes and self.pad_id >= min(sizes):
            raise OptionError(f"pad_id is {self.pad_id}", fix=f"allowed: 0 to {min(sizes) - 1}, or None")
        if self.shape != "encoder_decoder":
            if self.source_vocab_size is not None:
                raise OptionError("source_vocab_size has no effect on a model with a single stack", fix="remove it")
            if self.tie_embeddings == "output":
                raise OptionError('tie_embeddings="output" applies to an encoder-decoder only', fix="use True or False")
        elif self.tie_embeddings is True and self.source_vocab_size not in (None, self.vocab_size):
            raise OptionError(
                f"one table cannot hold {self.source_vocab_size} source and {self.vocab_size} target tokens",
                fix='use tie_embeddings="output" or False with separate vocabularies',
            )
