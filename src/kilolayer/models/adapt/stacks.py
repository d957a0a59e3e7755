"""Find the stacks of a model: its layers of known classes, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from kilolayer.errors import InputError, shown
from kilolayer.models.adapt.layouts import KNOWN, Layout, layout_of
from kilolayer.models.adapt.sublayers import ForeignSublayer
from kilolayer.recipes.base import Depths, Kind, Side


@dataclass(frozen=True)
class ForeignStack:
    """The layers of one encoder or decoder.

    name: of the list in the model that holds them.
    holder: the module that owns that list.
    embedding_norm: the norm directly below the first layer, if the class has one.
    """

    name: str
    layout: Layout
    side: Side
    layers: tuple[nn.Module, ...]
    holder: nn.Module
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
    width: int


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
            raise InputError(f"{len(names)} {side}s: {', '.join(names)}", fix="adapt each one separately")
    if len({stack.norm_first for stack in stacks}) > 1:
        raise InputError("one stack is Pre-LN and the other Post-LN", fix="adapt each one separately")
    stacks = tuple(sorted(stacks, key=lambda stack: stack.side == "decoder"))
    width = next(stacks[0].sublayers())[2].width
    return ForeignModel(_title(model, stacks), stacks, _depths(stacks), width)


def stacks_of(model: nn.Module) -> tuple[ForeignStack, ...]:
    """Every stack of layers of a known class in `model`, however many there are."""
    lists: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if layout_of(module) is not None:
            lists.setdefault(name.rpartition(".")[0], []).append(module)
    return tuple(_stack(model, name, layers) for name, layers in lists.items())


def check_depth(layers: int, most: int) -> None:
    """Raise if a description that was read from a file has more layers than there are weights, before they are built."""
    if layers > most:
        raise InputError(f"a stack has {layers:,} layers, more than there are weights", fix="restore the file")


def _stack(model: nn.Module, name: str, layers: list[nn.Module]) -> ForeignStack:
    layout: Any = layout_of(layers[0])
    sides = {layout.side(layer) for layer in layers}
    holder = model.get_submodule(name.rpartition(".")[0])
    if any(layout_of(layer) is not layout for layer in layers) or len(sides) > 1:
        raise InputError(f"the layers of {name} are of several kinds", fix="adapt stacks of one kind of layer")
    return ForeignStack(name, layout, sides.pop(), tuple(layers), holder, _embedding_norm(model, layout))


def _embedding_norm(model: nn.Module, layout: Layout) -> nn.Module | None:
    if layout.embedding_norm is None:
        return None
    owner, attribute = layout.embedding_norm
    found = [module for module in model.modules() if type(module).__name__ == owner]
    return getattr(found[0], attribute) if len(found) == 1 else None


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
