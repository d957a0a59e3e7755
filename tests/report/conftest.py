from collections.abc import Iterator

import pytest
from undrawn_charts import undrawn_charts


@pytest.fixture
def undrawn() -> Iterator[None]:
    """For tests of what stands around the charts."""
    with undrawn_charts():
        yield
