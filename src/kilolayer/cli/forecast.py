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
    from kilolayer.probe.forecast import STEPS, forecast
    from kilolayer.report.forecast_parts import parts_of

    with prepared(options.config or registry.EMBEDDED, typed) as (config, task):
        say(f"running {STEPS} steps with a learning rate that rises until training breaks down")
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
        "largest_lr": found.largest_lr,
        "shortest_warmup": found.shortest_warmup,
        "lr": found.lr,
        "warmup": found.warmup,
        "why": found.why,
        "sure": found.sure,
        "turned": found.measured.turned,
        "faded": found.measured.faded,
        "steps": [_plain(step) for step in found.measured.steps],
    }


def _plain(step: Measured) -> dict[str, float | None]:
    values = {"lr": step.lr, "loss": step.nll, "gradient": step.gradient, "reached": step.reached}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
