"""Matrix products with few rows on the CPU, with weights packed once in MKL's layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FEWEST_ROWS = 8  # with fewer rows, packing gains nothing
NOMINAL_ROWS = 64  # MKL asks for a number of rows when it packs, but the packed matrix works for any


class PackedProduct:
    """x W^T + b: [rows, inputs] to [rows, outputs].

    With at least `fewest_rows` rows, a copy of the matrix in MKL's layout is used, which is made once. An ordinary call packs
    the matrix each time, which with 16 to 40 rows takes as long as the product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, fewest_rows: int = FEWEST_ROWS) -> None:
        self.weight, self.bias = weight, bias
        self.fewest_rows = fewest_rows if _packs(weight) else None
        self.packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.fewest_rows is None or rows < self.fewest_rows:
            return F.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight.default(self.weight, NOMINAL_ROWS)
        return torch.ops.mkl._mkl_linear.default(x, self.packed, self.weight, self.bias, rows)


def _packs(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
