"""The pages on accelerate and on Hugging Face's Trainer: copies (DDP) and shards (FSDP2) train what one process trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.fixtures.process_pool import ProcessPool
from tests.parallel import page_scripts

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate")
pytest.importorskip("transformers")

# What each page saves, and how far two processes may be from one; the class around a model of ours computes its loss in fp32.
SAVED = {
    "accelerate.md": {"adapted": 1e-11, "native": 1e-11},
    "trainer.md": {"adapted/checkpoint-2": 1e-11, "adapted/last": 1e-11, "adapted/resumed": 1e-11, "native/last": 1e-6},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """What one process saves, by page."""
    processes, folders = ProcessPool(tmp_path_factory.mktemp("one"), sizes=(1,)), dict[str, Path]()
    for page in SAVED:
        folders[page] = tmp_path_factory.mktemp(page)
        processes.run(page_scripts.run_page, 1, page, "none", str(folders[page]))
    yield folders
    processes.stop()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("page", SAVED)
def test_a_page_trains_the_same_on_two_processes(
    pair: ProcessPool, alone: dict[str, Path], page: str, parallel: str, tmp_path: Path
) -> None:
    pair.run(page_scripts.run_page, 2, page, parallel, str(tmp_path))
    for folder, distance in SAVED[page].items():
        found, expected = (
            safetensors.torch.load_file(where / folder / "model.safetensors") for where in (tmp_path, alone[page])
        )
        assert expected.keys() - found.keys() == set()
        for name, tensor in expected.items():
            assert tensor.dtype == torch.float64
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=distance, msg=f"{folder}: {name}")
    if page == "trainer.md":
        last, resumed = (
            safetensors.torch.load_file(tmp_path / "adapted" / each / "model.safetensors") for each in ("last", "resumed")
        )
        assert all(torch.equal(resumed[name], tensor) for name, tensor in last.items())
