"""Who listens to a module: what is fused calls no module, and so no hook."""

from __future__ import annotations

from torch import nn


def is_heard(module: nn.Module) -> bool:
    """Whether someone has hooked a function to it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
