"""TensorBoard's files, read by TensorBoard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kilolayer.errors import OptionError
from kilolayer.runs.metrics import Metrics
from kilolayer.runs.trackers import TensorBoard, summary_writer


def test_a_missing_package_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(OptionError, match="tensorboard is not installed") as caught:
        summary_writer()
    assert "pip install tensorboard" in caught.value.fix


def test_steps_that_a_resumed_run_writes_again_show_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    for resumed_at, loss in ((0, 1.0), (3, 2.0)):
        board = TensorBoard()
        board.start(tmp_path, {}, resumed_at)
        metrics = Metrics(tmp_path, resumed_at, [board])
        for step in range(resumed_at + 1, 6):
            metrics.write("train", step, loss=loss, text="not a number")
        board.finish(None)
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert shown.Tags()["scalars"] == ["train/loss"]
    found = [(event.step, event.value) for event in shown.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
