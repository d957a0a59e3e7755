"""What a recipe is: a plan for each sublayer, according to its place in the model, that makes deep models trainable.

Every sublayer computes

    y = N_out( skip * x + b ),  b = branch * N_post( f( in_scale * N_pre(x) ) )

and a `Plan` says which norms are present, what the scales are, and how each projection inside f is initialized. If the recipe's
stream has a second state z in addition to x, it computes y = N_out( skip * x + b + second_in * z ) and z' = z + second_out * b.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import wraps
from numbers import Integral
from typing import Any, ClassVar, Literal, Self

from kilolayer.config import check, table_of
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.importing import class_path
from kilolayer.recipes.init import INITS, Init, InitName
from kilolayer.recipes.role import Role
from kilolayer.renamed import renamed_fields

Side = Literal["encoder", "decoder"]
DEEPEST = 10_000
"""The most layers that a stack may have."""
RETURN_PLAN = "return a plan from it: return kilolayer.recipes.Plan(pre_norm=kilolayer.recipes.NORM)"
WRITE_PLAN = "write `def plan(self, place)` in it, which returns a kilolayer.recipes.Plan"
WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Part(StrEnum):
    """The kinds of weights that belong to no projection. Norms, biases and scales are those inside layers; `top` is what comes
    after a stack, and the norm before its first layer."""

    NORM = "norm"
    BIAS = "bias"
    SCALE = "scale"
    EMBEDDING = "embedding"
    POSITIONS = "positions"
    TOP = "top"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Rates:
    """Factors on the optimizer's learning rate, on Adam's eps and on the decay of weights that are decayed."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0


class Kind(StrEnum):
    """The function of a sublayer."""

    SELF_ATTENTION = "self_attention"
    CROSS_ATTENTION = "cross_attention"
    FEEDFORWARD = "feedforward"


@dataclass(frozen=True)
class Depths:
    """The number of layers in the encoder (N) and in the decoder (M); 0 if there is none."""

    encoder: int = 0
    decoder: int = 0

    def __post_init__(self) -> None:
        for side, depth in (("encoder", self.encoder), ("decoder", self.decoder)):
            if not isinstance(depth, Integral) or isinstance(depth, bool):
                raise OptionError(f"the number of {side} layers is {shown(depth)}", fix="give a whole number")
        if min(self.encoder, self.decoder) < 0 or max(self.encoder, self.decoder) == 0:
            raise OptionError(
                f"depths are {shown(self.encoder)} encoder and {shown(self.decoder)} decoder layers",
                fix="give at least one layer to each stack of the model",
            )
        if max(self.encoder, self.decoder) > DEEPEST:
            deepest = shown(max(self.encoder, self.decoder))
            raise OptionError(f"a stack of {deepest} layers", fix=f"a stack has at most {DEEPEST:,} layers")

    @property
    def paired(self) -> bool:
        """Whether a decoder reads an encoder."""
        return self.encoder > 0 and self.decoder > 0

    @property
    def sides(self) -> tuple[Side, ...]:
        """The stacks that exist."""
        encoder: tuple[Side, ...] = ("encoder",) if self.encoder else ()
        decoder: tuple[Side, ...] = ("decoder",) if self.decoder else ()
        return encoder + decoder

    @property
    def title(self) -> str:
        """The depths in short form: 18L-18L, or 12L for a single stack."""
        return "-".join(f"{self.of(side)}L" for side in self.sides)

    def of(self, side: Side) -> int:
        """The number of layers in one stack."""
        return self.encoder if side == "encoder" else self.decoder

    def kinds(self, side: Side) -> tuple[Kind, ...]:
        """The sublayers of a layer, in their order: cross-attention only in a decoder that reads an encoder."""
        reads = side == "decoder" and self.paired
        return tuple(kind for kind in Kind if reads or kind is not Kind.CROSS_ATTENTION)

    def sublayers(self, side: Side) -> int:
        """The number of residual sublayers in one stack."""
        return self.of(side) * len(self.kinds(side))


@dataclass(frozen=True)
class Place:
    """Where a sublayer is in the model; `layer` counts from 1 within its own stack."""

    kind: Kind
    side: Side
    layer: int
    depths: Depths

    @property
    def layers(self) -> int:
        """The depth of the stack that contains it."""
        return self.depths.of(self.side)


@renamed_fields(start="init")
@dataclass(frozen=True)
class Learned:
    """A scale stored in the model: a parameter, or, if not trainable, a buffer that is saved in checkpoints.

    rate: a factor on its learning rate, in addition to the one that the recipe's `rates` gives for scales.
    """

    init: float
    shape: Literal["scalar", "vector"]
    trainable: bool = True
    per: Literal["sublayer", "layer"] = "sublayer"
    rate: float = 1.0


@dataclass(frozen=True)
class PerLayer:
    """A fixed number that differs from layer to layer; a plain number is the same for a whole stack."""

    value: float


Scale = float | PerLayer | Learned


@dataclass(frozen=True)
class NormSpec:
    """A norm in a plan. kind: its name or `module:Class`; None: as the model's option `norm`. eps: None: as `norm_eps`."""

    kind: str | None = None
    eps: float | None = None


NORM = NormSpec()
"""The model's own norm."""


def norm_spec(norm: NormSpec | bool | None) -> NormSpec | None:
    """A norm in the forms in which a recipe may give it: True is the model's own norm, False is none."""
    return NORM if norm is True else norm or None


@dataclass(frozen=True)
class Plan:
    """One sublayer: its norms, its scales, and the initialization of its projections."""

    pre_norm: NormSpec | None = None
    inner_norm: NormSpec | None = None  # before the output projection of f
    post_norm: NormSpec | None = None
    out_norm: NormSpec | None = None
    skip: Scale = 1.0
    branch: Scale = 1.0
    in_scale: Scale = 1.0
    head_scale: bool = False  # one learned factor per head
    shifts: bool = False  # learned scalar shifts before each operation of f
    bias: bool = True
    gains: Mapping[Role, float] = field(default_factory=dict)
    init: Init = INITS["xavier"]  # set by `Recipe.sublayer_plan`
    second_in: float = 0.0  # factor on the second state, inside N_out
    second_out: float = 0.0  # factor on the branch where it is added to the second state

    def __post_init__(self) -> None:
        for name in ("pre_norm", "inner_norm", "post_norm", "out_norm"):
            object.__setattr__(self, name, norm_spec(getattr(self, name)))
        for name in ("skip", "in_scale"):
            scale = getattr(self, name)
            if isinstance(scale, Learned) and scale.per == "layer":
                fix = "leave per at 'sublayer'; only branch may be shared by the sublayers of a layer"
                raise OptionError(f"{name} would be one number per sublayer, not per layer", where="recipe", fix=fix)

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """The norms that are present."""
        slots = (self.pre_norm, self.inner_norm, self.post_norm, self.out_norm)
        return tuple(norm for norm in slots if norm is not None)

    def gain(self, role: Role) -> float:
        """The factor on the initial weights that `init` draws."""
        return self.gains.get(role, 1.0)


@dataclass(frozen=True)
class Top:
    """What follows the last layer of a stack."""

    norm: NormSpec | None = None
    shift: bool = False
    scale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", norm_spec(self.norm))


@dataclass(frozen=True)
class Stream:
    """How the state passes from layer to layer, if a layer does not simply read the output of the one below it.

    has_second: whether the sublayers receive a second state in addition to x.
    """

    has_second: ClassVar[bool] = False

    def scales(self) -> dict[str, Learned]:
        """Its learned numbers by name, one of each per layer."""
        return {}


@renamed_fields(normalise="normalize")
@dataclass(frozen=True)
class Combination(Stream):
    """Each layer reads a learned combination of all outputs below it.

    `normalize`: "each" output before it is combined, or the "sum".
    """

    normalize: Literal["each", "sum"]


@dataclass(frozen=True)
class Anchor(Stream):
    """Layer l reads keep_l * x + add_l * x_0, where x_0 is the embedded input."""

    keep: Learned
    add: Learned

    def scales(self) -> dict[str, Learned]:
        return {"keep": self.keep, "add": self.add}


@dataclass(frozen=True)
class LayerInput(Stream):
    """The second state is the layer's input, the same for all its sublayers."""

    has_second: ClassVar[bool] = True


@dataclass(frozen=True)
class RunningSum(Stream):
    """The second state z starts as scale * x_0 and is passed from layer to layer; the output at the top is x + N(z)."""

    has_second: ClassVar[bool] = True

    scale: float


class Constants(dict[str, float]):
    """The numbers that a recipe sets for one stack, by name: `constants.alpha`."""

    def __getattr__(self, name: str) -> float:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this recipe has no {name!r}; it has: {', '.join(self) or 'no constants'}") from None


@dataclass(frozen=True)
class Description:
    """A recipe at a given depth; None for a stack that the model does not have."""

    recipe: Recipe
    depths: Depths
    encoder: Constants | None
    decoder: Constants | None
    notes: tuple[str, ...]


def is_built_in(cls: type[Recipe]) -> bool:
    """Whether a recipe is one of those in this folder."""
    return cls.__module__.startswith(f"{__name__.rpartition('.')[0]}.")


def _checked_plan(plan: Callable[[Any, Place], Plan]) -> Callable[[Any, Place], Plan]:
    """The method `plan` of a recipe, which raises if it returns anything but a plan."""

    @wraps(plan)
    def checked(self: Any, place: Place) -> Plan:
        planned = plan(self, place)
        if not isinstance(planned, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = f"the method plan of the recipe {type(self).__name__} returns {shown(planned)}"
            raise InputError(what, where="recipe", fix=RETURN_PLAN)
        return planned

    return checked


@dataclass(frozen=True)
class Recipe:
    """How a Transformer of a given depth is made trainable. The fields of a subclass are its options.

    A recipe of your own needs at least a `plan`; the other methods define what else it changes.
    """

    name: ClassVar[str]  # if not set, derived from the class's name: MyRecipe becomes my_recipe
    title: ClassVar[str]
    equation: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    expect: ClassVar[str] = ""
    extension: ClassVar[str] = ""
    training: ClassVar[str] = ""  # what `rates` and the scales' own rates change, in words

    init: InitName | Literal["derived"] = field(default="derived", kw_only=True)
    """The initial weights that the recipe's gains multiply. "derived": those of the recipe's equation, or of its authors' code
    where the equation leaves them open."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "plan" in vars(cls):
            cls.plan = _checked_plan(cls.plan)  # pyright: ignore[reportAttributeAccessIssue]
        if "name" not in vars(cls):
            cls.name = WORD_START.sub("_", cls.__name__).lower()
        if "title" not in vars(cls):
            cls.title = cls.__name__

    def __new__(cls, *values: Any, **options: Any) -> Self:
        own = (str(kind) for kind in inspect.get_annotations(cls).values())
        if "__dataclass_fields__" not in vars(cls) and any("ClassVar" not in kind for kind in own):
            raise InputError(
                f"the fields of {cls.__name__} are not options yet",
                where="recipe",
                fix="write @kilolayer.recipes.register above the class",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check(self)

    def check_depths(self, depths: Depths) -> None:
        """Raise an error if an option would have no effect on a model of these depths."""

    def check_embeddings(self, scaled: bool) -> None:
        """Raise an error if the recipe does not support embeddings that are (or are not) scaled by sqrt(dim) at the input."""

    def constants(self, side: Side, depths: Depths) -> Constants:
        """The constants of one stack."""
        return Constants()

    def notes(self, depths: Depths) -> tuple[str, ...]:
        """What a user should know besides the constants."""
        return tuple(text for text in (self.init_of(depths).text, self.extension, self.training) if text)

    def plan(self, place: Place) -> Plan:
        """The plan of one sublayer."""
        raise InputError(f"the recipe {type(self).__name__} has no plan method", where="recipe", fix=WRITE_PLAN)

    def default_init(self, depths: Depths) -> InitName:
        """The initial weights of a model of these depths, unless the option `init` names others."""
        return "xavier"

    def init_of(self, depths: Depths) -> Init:
        """How the matrices of a model of these depths are drawn."""
        return INITS[self.default_init(depths) if self.init == "derived" else self.init]

    def sublayer_plan(self, place: Place) -> Plan:
        """The plan of one sublayer, with its initial weights."""
        return replace(self.plan(place), init=self.init_of(place.depths))

    def top(self, side: Side, depths: Depths) -> Top:
        """What follows the last layer."""
        return Top()

    def input_norm(self, side: Side, depths: Depths) -> NormSpec | None:
        """The norm before the first layer, on the sum of embeddings and positions; None if there is none."""
        return None

    def output_factor(self, width: int) -> float:
        """The factor on the states before the output vocabulary scores them, in a model of this width (`dim`)."""
        return 1.0

    def stream(self) -> Stream | None:
        """How the state passes from layer to layer; if None, each layer reads the output of the one below it."""
        return None

    def embedding_gain(self, side: Side, depths: Depths) -> float:
        """The factor on the embedding's standard deviation, d^-1/2; a shared table uses the encoder's."""
        return 1.0

    def vocabulary_gain(self) -> float:
        """The factor on the standard deviation of an untied output table, d^-1/2."""
        return 1.0

    def rates(self, weight: Role | Part, side: Side, depths: Depths, width: int) -> Rates:
        """The factors on a weight's learning rate, eps and decay in a model of this width (`dim`).

        A shared table uses the encoder's. The parts of one matrix, such as query, key and value, must have the same factors.
        """
        return Rates()

    def unusual_rates(self, depths: Depths, width: int) -> dict[str, Rates]:
        """The factors that are not all 1, by stack and weight, such as `decoder ffn_in`; learned scales also by sublayer."""
        by_part = {
            f"{side} {weight}": self.rates(weight, side, depths, width) for side in depths.sides for weight in (*Role, *Part)
        }
        for side in depths.sides:
            usual, stream = self.rates(Part.SCALE, side, depths, width), self.stream()
            scales: dict[str, Scale] = {} if stream is None else dict(stream.scales())
            for kind in depths.kinds(side):
                plan = self.plan(Place(kind, side, 1, depths))
                scales |= {f"{kind} skip": plan.skip, f"{kind} branch": plan.branch, f"{kind} in_scale": plan.in_scale}
            for name, scale in scales.items():
                if isinstance(scale, Learned) and scale.trainable and scale.rate != 1:
                    by_part[f"{side} {name}"] = replace(usual, lr=usual.lr * scale.rate)
        return {name: rates for name, rates in by_part.items() if rates != Rates()}

    def calibration(self) -> Literal["running", "summed"] | None:
        """How the skip scales are set from data before training; None if they are not."""
        return None

    def describe(self, *, encoder_layers: int = 0, decoder_layers: int = 0) -> Description:
        """The constants at this depth."""
        depths = Depths(encoder_layers, decoder_layers)
        self.check_depths(depths)
        encoder, decoder = (self.constants(side, depths) if side in depths.sides else None for side in ("encoder", "decoder"))
        return Description(self, depths, encoder, decoder, self.notes(depths))

    def table(self) -> dict[str, Any]:
        """The recipe as a configuration holds it; one from a module of your own is named `module:Class`."""
        return {"name": self.table_name(), **table_of(self)}

    @classmethod
    def table_name(cls) -> str:
        """The name by which `find` finds it, in other processes too if its module can be imported."""
        return cls.name if is_built_in(cls) else class_path(cls) or cls.name

    def options(self) -> dict[str, Any]:
        """The options with their values, as `get` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
