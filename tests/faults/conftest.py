import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.faults.children import run
from tests.faults.run_forms import FORMS


@pytest.fixture(scope="session")
def configured(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[..., Path]:
    """Writes the configuration file of a form."""

    def write(form: str, **sections: dict[str, Any]) -> Path:
        path = tmp_path_factory.mktemp("configuration") / "small.toml"
        path.write_text(tomli_w.dumps(FORMS[form].table(corpus, **sections)))
        return path

    return write


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, configured: Callable[..., Path]) -> Callable[..., Path]:
    """Finished runs, each made once; not to be changed."""
    made: dict[str, Path] = {}

    def find(form: str, **sections: dict[str, Any]) -> Path:
        key = json.dumps([form, sections], sort_keys=True)
        if key not in made:
            base = tmp_path_factory.mktemp("finished")
            code, _, err = run(["train", configured(form, **sections), "--run", base / "run"], base)
            assert code == 0, err
            made[key] = base / "run"
        return made[key]

    return find
