from collections.abc import Iterator

import pytest
from process_pool import ProcessPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    processes = ProcessPool(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.stop()
