"""kilolayer report: write a self-contained HTML page about one run or several."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kilolayer.cli.output import show_line
from kilolayer.errors import unknown
from kilolayer.files.paths import kind_of, resolve
from kilolayer.terminal import say


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder; several give one page about all of them"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the page [report.html in the run, or in the folder that contains several]",
    )


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Write the page, and print where it is and the warnings about the models."""
    from kilolayer.report.page import write_joint_report, write_report

    if typed:
        raise unknown(typed[0], ["--help"])
    for each in options.runs:
        if kind_of(each / "config.toml") is None:
            from kilolayer.runs.run import not_a_run

            raise not_a_run(each)
    runs = list({resolve(each): each for each in options.runs}.values())
    if len(runs) == 1 and options.out is None:
        report = write_report(runs[0])
    else:
        above = Path(os.path.commonpath([resolve(each).parent for each in runs]))
        report = write_joint_report(runs, options.out or above / "report.html")
    show_line(str(report.path))
    for warning in report.warnings:
        say(warning)
    return 0
