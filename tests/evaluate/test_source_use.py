"""The warning that a translator does not read its source."""

from __future__ import annotations

import pytest

from kilolayer.evaluate.source_use import SOURCE_READ, unread_source


@pytest.mark.parametrize(
    ("gain", "epoch", "words"),
    [
        (0.012, 3.0, "lowers the loss by only 0.012 nats per token: the decoder"),
        (-0.0001, 3.0, "does not lower the loss: the decoder models the target language"),
        (-0.4, 3.0, "does not lower the loss: the decoder"),
        (-0.0001, 0.3, "the run is short: it has read only 0.3 of its text"),
        (0.012, None, "does not read the encoder"),
        (SOURCE_READ, 0.3, None),
        (None, 0.3, None),
    ],
)
def test_it_says_whether_the_run_is_short(gain: float | None, epoch: float | None, words: str | None) -> None:
    found = unread_source([{"step": 60, "source_gain": gain}], [] if epoch is None else [{"step": 60, "epoch": epoch}])
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert words in found
        assert "-0" not in found
