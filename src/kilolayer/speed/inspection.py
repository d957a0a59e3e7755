"""Checks whether the fast form of a layer may be used: it does not call the layer's modules, so their hooks would not run."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.block import Block, CrossBlock, MultiwayBlock
from kilolayer.layers.feedforward import FeedForward, SwiGLU
from kilolayer.layers.modules import modules_of
from kilolayer.layers.multiway import Multiway
from kilolayer.layers.norms.base import Norm
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import Constant, HeadScale, LayerConstant, LearnedScale, Shift
from kilolayer.layers.sublayer import DropPath, ExtendedSublayer, Sublayer
from kilolayer.models.sharded import HOME, is_unit, plain_class
from kilolayer.moe.experts import ExpertNorm, ExpertProjection, Experts, Unnormed
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.moe.router import Router
from kilolayer.speed.shared_experts import shares_experts

LAYERS: set[type[nn.Module]] = {Block, CrossBlock, MultiwayBlock}
PARTS: set[type[nn.Module]] = LAYERS | {
    *(Sublayer, ExtendedSublayer, SelfAttention, CrossAttention, FeedForward, SparseFeedForward),
    *(Experts, ExpertProjection, ExpertNorm, Unnormed, Projection, Multiway),
    *(Constant, LayerConstant, LearnedScale, HeadScale, Shift, DropPath, SwiGLU),
    *(nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU),
}


class Inspection:
    """What prevents the fast form of a layer. Cheap enough for every forward pass, because hooks can be added at any time."""

    def __init__(self, layer: nn.Module) -> None:
        modules = dict(layer.named_modules())
        self.layer = layer
        units_first = sorted(modules, key=lambda name: not is_unit(modules[name]))
        self.names = [f"{plain_class(layer).__name__}{'.' * bool(name)}{name}" for name in units_first for _ in range(4)]
        self.hooks = [hooks for name in units_first for hooks in _hooks(modules[name])]
        self.hooks_of_units = 4 * sum(map(is_unit, modules.values()))
        self.children = [(module._modules, tuple(module._modules.values())) for module in modules.values() if module._modules]
        self.attributes = [vars(module) for module in modules.values()]
        self.drops = [module for module in modules.values() if isinstance(module, nn.Dropout | Attention)]
        self.replaced = sum("forward" in attributes for attributes in self.attributes)
        self.foreign = _foreign_part(layer, modules)

    @property
    def is_current(self) -> bool:
        """Whether the layer still has the modules that were inspected, with the same forward methods."""
        if sum("forward" in attributes for attributes in self.attributes) != self.replaced:
            return False
        return all(tuple(modules.values()) == seen for modules, seen in self.children)

    def reason(self) -> str | None:
        """Why the layer must run as a plain module; None if its fast form may be used."""
        if self.foreign is not None:
            return self.foreign
        if not any(self.hooks[self.hooks_of_units :]) and all(map(_gathers, self.hooks[: self.hooks_of_units])):
            return None
        found = (name for name, hooks in zip(self.names, self.hooks, strict=True) if hooks and not _gathers(hooks))
        return f"a hook is registered on {next(found)}"


def global_hook() -> str | None:
    """Why all modules must run as plain modules: a global hook is registered; None if there is none."""
    hooks = (
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )
    return "a hook is registered on all modules" if any(hooks) else None


def has_hooks(model: nn.Module) -> bool:
    """Whether a hook is registered on any module of the model."""
    # Not by _hooks: a search checks a thousand modules, and this takes half the time.
    return global_hook() is not None or any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        for module in modules_of(model)
    )


def _gathers(hooks: dict[int, Any]) -> bool:
    """Whether all hooks are those by which FSDP2 gathers a layer's matrices, which its fast form calls too."""
    return all(hook.__module__.startswith(HOME) for hook in hooks.values())


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def is_known_part(kind: type[nn.Module]) -> bool:
    """Whether modules of a class inside a layer are computed by the fast form, or are norms or routers, which it may call."""
    return kind in PARTS or issubclass(kind, Norm | Router)


def _foreign_part(layer: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    shared = isinstance(layer, Block) and shares_experts(layer)
    for name, module in modules.items():
        kind = plain_class(module)
        if name and is_unit(module) and not (shared and issubclass(kind, Experts | ExpertNorm)):
            return f"{name} is gathered by itself"
        if not (is_known_part(kind) if name else kind in LAYERS):
            return f"{name or 'a layer'} is a {kind.__name__}"
        if "forward" in vars(module):
            return f"the forward of {name or 'a layer'} was replaced"
    return None
