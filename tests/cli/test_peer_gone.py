"""A process that has lost another one of its run says so, and does not take the blame."""

from __future__ import annotations

import pytest

from kilolayer.cli import recipes
from kilolayer.cli.main import main

GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44758. This is typically caused by a crash"


@pytest.mark.parametrize("together", [True, False])
def test_a_lost_connection_is_explained_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    def lost(*_: object) -> int:
        raise RuntimeError(GLOO)

    monkeypatch.setattr(recipes, "run", lost)
    if together:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        assert main(["recipes"]) == 2
        assert "another process of this run has ended" in capsys.readouterr().err
    else:
        with pytest.raises(RuntimeError):
            main(["recipes"])
        assert "bug in Kilolayer" in capsys.readouterr().err
