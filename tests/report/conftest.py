from collections.abc import Iterator

import pytest

from tests.fixtures.undrawn_charts import drawn_charts, undrawn_charts


@pytest.fixture(autouse=True, scope="module")
def _drawn_charts() -> Iterator[None]:
    with drawn_charts():
        yield


@pytest.fixture
def undrawn() -> Iterator[None]:
    """For tests of what stands around the charts."""
    with undrawn_charts():
        yield
