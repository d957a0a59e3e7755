"""kilolayer report: one self-contained page of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from kilolayer.cli.output import show_line
from kilolayer.errors import InputError, unknown
from kilolayer.files.paths import kind_of
from kilolayer.terminal import say


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Write report.html, say where it is, and what is wrong with the model."""
    from kilolayer.report.page import write_report

    if typed:
        raise unknown(typed[0], ["--help"])
    if kind_of(options.run / "config.toml") is None:
        raise InputError("this is not a run", where=str(options.run), fix="name a folder that `kilolayer train` made")
    report = write_report(options.run)
    show_line(str(report.path))
    for warning in report.warnings:
        say(warning)
    return 0
