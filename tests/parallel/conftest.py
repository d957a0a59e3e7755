from collections.abc import Iterator

import pytest

from tests.fixtures.process_pool import ProcessPool


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Two processes of their own: DDP, FSDP2 and accelerate take all that there are."""
    processes = ProcessPool(tmp_path_factory.mktemp("pair"), sizes=(2,))
    yield processes
    processes.stop()
