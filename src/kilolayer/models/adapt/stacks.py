"""Find the stacks of a model: its layers of known classes, in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from kilolayer.errors import InputError, shown
from kilolayer.models.adapt.layouts import KNOWN, Layout, layout_of
from kilolayer.models.adapt.sublayers import ForeignSublayer
from kilolayer.models.sharded import plain_class
from kilolayer.recipes.base import Depths, Kind, Side

NUMBERED = re.compile(r"(?:(?P<list>.*)\.)?\d+(?P<rest>(?:\.[^\d.][^.]*)*)")
"""The name of a layer in a list, or in a block of a list."""
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Where torch's checkpoint_wrapper and torch.compile hold the module that they wrap."""


@dataclass(frozen=True)
class ForeignStack:
    """The layers of one encoder or decoder.

    name: of the list in the model that holds them, or the blocks around them.
    holder: the module that owns that list.
    in_blocks: whether that list holds blocks around the layers, which may compute something between them.
    embedding_norm: the norm whose output enters the first layer, if there is one.
    """

    name: str
    layout: Layout
    side: Side
    layers: tuple[nn.Module, ...]
    holder: nn.Module
    in_blocks: bool
    embedding_norm: nn.Module | None

    @property
    def norm_first(self) -> bool:
        """Whether it is a Pre-LN stack."""
        return self.layout.norm_first(self.layers[0])

    @property
    def lacks_final_norm(self) -> bool:
        """Whether nothing normalizes the output of the last layer, as far as the class shows."""
        torch_stack = isinstance(self.holder, nn.TransformerEncoder | nn.TransformerDecoder)
        return torch_stack and getattr(self.holder, "norm", None) is None

    def sublayers(self) -> Iterator[tuple[int, nn.Module, ForeignSublayer]]:
        """Every sublayer in forward order, with the number of its layer, from 1, and that layer's module."""
        for number, layer in enumerate(self.layers, 1):
            for sublayer in self.layout.read(layer):
                yield number, layer, sublayer


@dataclass(frozen=True)
class ForeignModel:
    """The stacks that `find` found in a model."""

    title: str
    stacks: tuple[ForeignStack, ...]
    depths: Depths

    @property
    def width(self) -> int:
        """Width of the residual stream of the first stack."""
        return next(self.stacks[0].sublayers())[2].width


def find(model: nn.Module) -> ForeignModel:
    """The stacks of `model`; raises if it has no layer of a known class, or more stacks than recipes support."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"this is not a model: {shown(model)}", fix="give a torch module, such as from_pretrained returns")
    stacks = stacks_of(model)
    if not stacks:
        raise InputError(f"{type(model).__name__} has no layer of a supported class", fix=f"supported: {', '.join(KNOWN)}")
    for side in ("encoder", "decoder"):
        names = [stack.name or type(model).__name__ for stack in stacks if stack.side == side]
        if len(names) > 1:
            raise InputError(
                f"{len(names)} {side}s: {', '.join(names)}",
                fix="a recipe's constants depend on the whole depth: put layers that follow each other into one nn.ModuleList, "
                f"and delete those that are never called; only {side}s that do not follow each other are adapted separately",
            )
    for stack in stacks:
        if len({stack.layout.norm_first(layer) for layer in stack.layers}) > 1:
            raise InputError(
                f"some layers of {stack.name or type(model).__name__} are Pre-LN and others Post-LN",
                fix="give all of them the same norm_first",
            )
    _check_uses(model, stacks)
    if len({stack.norm_first for stack in stacks}) > 1:
        raise InputError("one stack is Pre-LN and the other Post-LN", fix="adapt each one separately")
    stacks = tuple(sorted(stacks, key=lambda stack: stack.side == "decoder"))
    return ForeignModel(_title(model, stacks), stacks, _depths(stacks))


def stacks_of(model: nn.Module) -> tuple[ForeignStack, ...]:
    """Every stack of layers of a known class in `model`, however many there are."""
    lists = _lists({name: module for name, module in model.named_modules() if layout_of(module) is not None})
    return tuple(_stack(model, name, list(layers.values()), bool(inner)) for (name, inner), layers in lists.items())


def check_depth(layers: int, most: int) -> None:
    """Raise if a description that was read from a file has more layers than there are weights, before they are built."""
    if layers > most:
        raise InputError(f"a stack has {layers:,} layers, more than there are weights", fix="restore the file")


def _lists(layers: dict[str, nn.Module]) -> dict[tuple[str, str], dict[str, nn.Module]]:
    """Layers by the list that holds them, and by their name in a block of that list if each block has one layer."""
    siblings = Counter(_parent(name) for name in layers)
    lists: dict[tuple[str, str], dict[str, nn.Module]] = {}
    for name, layer in layers.items():
        place = _parent(name), ""
        numbered = NUMBERED.fullmatch(name)
        if numbered is not None and (not numbered["rest"] or siblings[_parent(name)] == 1):
            rest = (part for part in numbered["rest"].split(".") if part not in WRAPPERS)
            place = numbered["list"] or "", ".".join(rest)
        lists.setdefault(place, {})[name] = layer
    return lists


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _check_uses(model: nn.Module, stacks: tuple[ForeignStack, ...]) -> None:
    """Raise if a list holds a layer twice; another list with the same layers is only a second name."""
    known = {layer for stack in stacks for layer in stack.layers}
    uses = {name: module for name, module in model.named_modules(remove_duplicate=False) if module in known}
    for layers in _lists(uses).values():
        first: dict[nn.Module, str] = {}
        for name, layer in layers.items():
            if first.setdefault(layer, name) != name:
                raise InputError(
                    f"{first[layer]} and {name} are one layer, and a recipe needs a layer of its own at each place",
                    fix="build each layer, or copy it: copy.deepcopy(layer)",
                )


def _stack(model: nn.Module, name: str, layers: list[nn.Module], in_blocks: bool) -> ForeignStack:
    layout: Any = layout_of(layers[0])
    sides = {layout.side(layer) for layer in layers}
    holder = model.get_submodule(_parent(name))
    if any(layout_of(layer) is not layout for layer in layers) or len(sides) > 1:
        raise InputError(f"the layers of {name} are of several kinds", fix="adapt stacks of one kind of layer")
    embedding_norm = None if in_blocks else _embedding_norm(model, name, layout)
    return ForeignStack(name, layout, sides.pop(), tuple(layers), holder, in_blocks, embedding_norm)


def _embedding_norm(model: nn.Module, name: str, layout: Layout) -> nn.Module | None:
    """The norm on the embeddings if its output enters the first layer of the list `name` directly."""
    known = layout.embedding_norm
    if known is None or not f".{name}".endswith(f".{known.layers}"):
        return None
    around = model.get_submodule(name.removesuffix(known.layers).removesuffix("."))
    for path, expected in known.classes.items():
        cls = plain_class(around.get_submodule(path))
        if cls.__name__ != expected or not cls.__module__.startswith("transformers.models."):
            return None
    return around.get_submodule(known.norm)


def _title(model: nn.Module, stacks: tuple[ForeignStack, ...]) -> str:
    return "nn.Transformer" if isinstance(model, nn.Transformer) else stacks[0].layout.title


def _depths(stacks: tuple[ForeignStack, ...]) -> Depths:
    layers = {stack.side: len(stack.layers) for stack in stacks}
    decoder = next((stack for stack in stacks if stack.side == "decoder"), None)
    if decoder is None or "encoder" in layers or not _has_cross_attention(decoder):
        return Depths(layers.get("encoder", 0), layers.get("decoder", 0))
    if decoder.layout.title != "nn.TransformerDecoder":
        raise InputError(
            f"a {decoder.layout.title} decoder without its encoder, whose layers hold a cross-attention that reads nothing",
            fix="adapt the whole encoder-decoder, or use GPT-2 or Llama",
        )
    # The decoder attends to an encoder outside this model, whose depth does not affect the decoder's constants.
    return Depths(layers["decoder"], layers["decoder"])


def _has_cross_attention(stack: ForeignStack) -> bool:
    return any(sublayer.kind is Kind.CROSS_ATTENTION for sublayer in stack.layout.read(stack.layers[0]))
