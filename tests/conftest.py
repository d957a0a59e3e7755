import gc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kilolayer.speed.int8_product import why_not_int8
from kilolayer.speed.operators import kernels
from tests.fixtures.process_pool import ProcessPool
from tests.fixtures.small_runs import write_corpus
from tests.fixtures.undrawn_charts import undrawn_charts

PREDICATES = (
    "fast_layer.can_fuse_residual_norm",
    "product.can_fuse_inner_norm",
    "fast_feedforward.can_fuse_relu_product",
    "fast_feedforward.can_fuse_grouped_norm",
    "fast_stack.can_run_short_attention",
)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KILOLAYER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _undrawn_charts() -> Iterator[None]:
    with undrawn_charts():
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small text for every task, not to be changed."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    processes = ProcessPool(tmp_path_factory.mktemp("processes"))
    yield processes
    processes.stop()


@pytest.fixture
def every_operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast form runs every operator on the CPU, by its plain formula, in any dtype and at any width."""
    for name in PREDICATES:
        monkeypatch.setattr(f"kilolayer.speed.{name}", lambda *_: True)
    with kernels.assumed("cpu"):
        yield


def pytest_configure() -> None:
    gc.disable()  # modules and tests live to the end: to look for garbage among them costs seconds


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_matrices(items)
    missing = {"gpu": None if torch.cuda.is_available() else "needs CUDA", "int8": why_not_int8()}
    for item in items:
        for name, reason in missing.items():
            if reason is not None and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def thin_matrices(items: list[pytest.Item]) -> None:
    """Of each test that is marked as a matrix, all but one in `share` of its cases are slow ones.

    Which ones stay differs from test to test, so that all recipes and shapes are met somewhere; a GPU runs them all.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("matrix") and not item.get_closest_marker("slow") and not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, own in cases.items():
        marker = own[0].get_closest_marker("matrix")
        assert marker is not None
        (share,) = marker.args
        first = zlib.crc32(name.encode()) % min(share, len(own))
        for index, item in enumerate(own):
            if index % share != first:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The models are too small for more, and the tests themselves run side by side. Each time, because CTranslate2 sets it too.
    torch.set_num_threads(1)
    # Without bf16 in the processor torch leaves oneDNN for the rest of a process after the first such product; others, whose
    # numbers are compared, do not.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
