"""Processes that are started again find each other, and not the dead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from kilolayer.parallel.launch import name_of_start
from kilolayer.runs import lock


def test_every_start_has_a_name_of_its_own_that_all_its_processes_find(tmp_path: Path) -> None:
    def found(rank: int, size: int) -> str:
        store = dist.FileStore(str(tmp_path / "store"), -1)
        store.set_timeout(timedelta(seconds=20))
        return name_of_start(store, rank, size)

    store = dist.FileStore(str(tmp_path / "store"), -1)
    names = []
    for size in (4, 4, 2, 1, 3):
        for rank in range(1, 4):
            store.set(f"arrived {rank}", f"one that died here, of {size}")
        with ThreadPoolExecutor(size) as threads:
            answers = {each.result() for each in [threads.submit(found, rank, size) for rank in reversed(range(size))]}
        assert len(answers) == 1
        names += answers
    assert len(set(names)) == 5


def begun_by(folder: Path, monkeypatch: pytest.MonkeyPatch, agent: str | None) -> bool:
    monkeypatch.setattr(lock, "agent", lambda: agent)
    monkeypatch.setattr(lock, "under_torchrun", lambda: agent is not None)
    return lock.was_begun_by_this_launch(folder)


def test_a_run_is_that_of_all_torchruns_whose_processes_train_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").touch()
    monkeypatch.setattr(lock, "agent", lambda: "job here 1 100")
    with lock.locked(tmp_path):
        monkeypatch.setattr(lock, "agent", lambda: "job there 1 200")
        for _ in range(2):  # two processes of one host
            lock.join_launch(tmp_path)
    assert (tmp_path / "lock").read_text().count("there") == 1
    assert not begun_by(tmp_path, monkeypatch, "job here 1 100")  # by this very process, which is not a restart
    monkeypatch.setattr(lock.os, "getpid", lambda: 0)
    assert begun_by(tmp_path, monkeypatch, "job here 1 100")
    assert begun_by(tmp_path, monkeypatch, "job there 1 200")
    assert not begun_by(tmp_path, monkeypatch, "job there 1 201")
    assert not begun_by(tmp_path, monkeypatch, None)
    (tmp_path / "config.toml").unlink()
    assert not begun_by(tmp_path, monkeypatch, "job here 1 100")
