from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import write_corpus
from undrawn_charts import undrawn_charts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def _undrawn_charts() -> Iterator[None]:
    with undrawn_charts():
        yield
