"""A recording must not read a number back from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.aten
READING = {
    ops._local_scalar_dense.default,
    ops.equal.default,
    ops.is_nonzero.default,
    ops.masked_select.default,
    ops.nonzero.default,
    ops.repeat_interleave.Tensor,
    ops._unique2.default,
}


class NothingIsRead(TorchDispatchMode):
    """Refuses operations whose result, or its shape, comes back from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READING, func
        if func is ops.index.Tensor:
            assert all(index is None or index.dtype != torch.bool for index in args[1])
        return func(*args, **(kwargs or {}))
