from collections.abc import Iterator

import pytest
import torch

from kilolayer.speed.int8_product import why_not_int8


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)  # the models are too small for more, and the tests themselves run side by side


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILOLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {"gpu": None if torch.cuda.is_available() else "needs CUDA", "int8": why_not_int8()}
    for item in items:
        for name, reason in missing.items():
            if reason is not None and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Without bf16 in the processor torch leaves oneDNN for the rest of a process after the first such product; others, whose
    # numbers are compared, do not.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
