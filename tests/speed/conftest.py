from __future__ import annotations

from collections.abc import Iterator

import pytest

from kilolayer.speed.operators import kernels

PREDICATES = (
    "fast_layer.can_fuse_residual_norm",
    "product.can_fuse_inner_norm",
    "fast_feedforward.can_fuse_relu_product",
    "fast_feedforward.can_fuse_grouped_norm",
    "fast_stack.can_run_short_attention",
)


@pytest.fixture
def every_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast form runs every operator on the CPU, by its plain formula, in any dtype and at any width."""
    for name in PREDICATES:
        monkeypatch.setattr(f"kilolayer.speed.{name}", lambda *_: True)
    with kernels.assumed("cpu"):
        yield
