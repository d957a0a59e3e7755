"""kilolayer forecast: from 60 steps, predict the largest learning rate and the shortest warm-up that do not diverge."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.output import show_json, show_parts
from kilolayer.cli.prepared import prepared
from kilolayer.cli.train import add_run_options
from kilolayer.tasks import registry
from kilolayer.terminal import say

if TYPE_CHECKING:
    from kilolayer.probe.forecast import Forecast
    from kilolayer.probe.trial import Measured


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    add_run_options(parser)
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.toml", help="a configuration file [the embedded default]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Take the steps and print the forecast."""
    from kilolayer.probe.critical_rate import SETTLING
    from kilolayer.probe.forecast import STEPS, forecast
    from kilolayer.probe.forecast_parts import parts_of

    with prepared(options.config or registry.EMBEDDED, typed) as (config, task):
        say(f"running {STEPS} steps with a rate that rises until training breaks down, and {SETTLING} with a small one")
        found = forecast(config, task)
    if options.json:
        show_json(as_json(found))
    else:
        show_parts(parts_of(found))
    return 0


def as_json(found: Forecast) -> dict[str, Any]:
    """The forecast as plain values; numbers that are not finite are null."""
    return {
        "lives": found.lives,
        "breaks": found.breaks,
        "largest_lr": found.largest_lr,
        "shortest_warmup": found.shortest_warmup,
        "lr": found.lr,
        "warmup": found.warmup,
        "why": found.why,
        "sure": found.sure,
        "critical": found.measured.critical if math.isfinite(found.measured.critical) else None,
        "steps": [_as_table(step) for step in found.measured.steps],
    }


def _as_table(step: Measured) -> dict[str, float]:
    return {"lr": step.lr, "loss": step.nll, "gradient": step.gradient, "reached": step.reached}
