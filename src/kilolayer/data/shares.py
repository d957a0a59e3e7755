"""Shares of the training text that are held out for validation and for the test, in a configuration."""

from __future__ import annotations

from typing import Any

from kilolayer.errors import OptionError, UnusedOptionError


def check_shares(config: Any) -> None:
    """Raise if valid_share or test_share stands beside the set that it would make, or if they leave nothing to train on."""
    for part in ("valid", "test"):
        if getattr(config, f"{part}_share") and getattr(config, part):
            raise UnusedOptionError(
                f"{part} and {part}_share are both given",
                fix="remove one of them",
                unused=f"{part}_share",
                beside=(part,),
                either=True,
            )
    if config.valid_share + config.test_share >= 1:
        raise OptionError("valid_share and test_share leave nothing to train on", fix="lower them: 0.05 each is usual")
