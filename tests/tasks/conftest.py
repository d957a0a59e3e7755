from pathlib import Path

import pytest

from kilolayer.data.drawn_images import drawn_images
from tests.fixtures.small_classifiers import write_examples


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn images of 16 pixels with their label images, not to be changed."""
    folder = tmp_path_factory.mktemp("images")
    drawn_images(folder, 16, {"train": 30, "valid": 12, "test": 12})
    return folder
