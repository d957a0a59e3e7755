from pathlib import Path

import pytest

from tests.cli.typed_commands import quietly, write_corpus


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    code, out, err = quietly("train", config, "--run", folder, "--train.lr", "8e-3")
    assert code == 0, err
    return folder, out, err
