"""Checks whether the fast form of a layer may be used: it does not call the layer's modules, so their hooks would not run."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

from kilolayer.layers.attention import CrossAttention, SelfAttention
from kilolayer.layers.block import Block, CrossBlock, MultiwayBlock
from kilolayer.layers.feedforward import FeedForward, SwiGLU
from kilolayer.layers.modules import modules_of
from kilolayer.layers.multiway import Multiway
from kilolayer.layers.norms.base import Norm
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import Constant, HeadScale, LayerConstant, LearnedScale, Shift
from kilolayer.layers.sublayer import DropPath, ExtendedSublayer, Sublayer
from kilolayer.moe.experts import ExpertNorm, ExpertProjection, Experts, Unnormed
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.moe.router import Router

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
        self.names = [f"{type(layer).__name__}{'.' * bool(name)}{name}" for name in modules for _ in range(4)]
        self.hooks = [hooks for module in modules.values() for hooks in _hooks(module)]
        self.children = [(module._modules, tuple(module._modules.values())) for module in modules.values() if module._modules]
        self.attributes = [vars(module) for module in modules.values()]
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
        if not any(self.hooks):
            return None
        return f"a hook is registered on {next(name for name, hooks in zip(self.names, self.hooks, strict=True) if hooks)}"


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


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def is_known_part(module: nn.Module) -> bool:
    """Whether a module inside a layer is one that the fast form computes, or a norm or router, which it may call."""
    return type(module) in PARTS or isinstance(module, Norm | Router)


def _foreign_part(layer: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    for name, module in modules.items():
        if not (is_known_part(module) if name else type(module) in LAYERS):
            return f"{name or 'a layer'} is a {type(module).__name__}"
        if "forward" in vars(module):
            return f"the forward of {name or 'a layer'} was replaced"
    return None
