"""What processes tell each other."""

from __future__ import annotations

import pytest

from tests.fixtures.process_pool import ProcessPool
from tests.parallel import one_or_many


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_and_gradients_are_exchanged(pool: ProcessPool, size: int) -> None:
    pool.run(one_or_many.check_exchange, size)


def test_gradients_are_summed(pool: ProcessPool) -> None:
    pool.run(one_or_many.check_summed_gradients, 2)
