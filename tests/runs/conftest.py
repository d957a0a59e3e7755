from pathlib import Path

import pytest

from kilolayer.config import dump
from tests.fixtures.small_runs import SMALL
from tests.runs.run_by_command import printed


@pytest.fixture(scope="session")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task, trained by the command; what that printed is in a file beside it."""
    folder = tmp_path_factory.mktemp("runs")
    for task, table in SMALL.items():
        (folder / f"{task}.toml").write_text(dump(table(corpus, train={"steps": 4})))
        said = printed("train", folder / f"{task}.toml", "--run", folder / task)
        (folder / f"{task}.txt").write_text(said)
    return {task: folder / task for task in SMALL}
