"""kilolayer report: one self-contained page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from kilolayer.errors import InputError, unknown


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Write report.html and say where it is."""
    from kilolayer.report.page import write_report

    if typed:
        raise unknown(typed[0], ["--help"])
    if not (options.run / "config.toml").is_file():
        raise InputError("this is not a run", where=str(options.run), fix="name a folder that `kilolayer train` made")
    print(write_report(options.run))
    return 0
