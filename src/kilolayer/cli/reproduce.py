"""kilolayer reproduce: reproduce a figure or a table of a paper at a feasible size, with a verdict."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from kilolayer.cli.compare import MOST_PARALLEL
from kilolayer.cli.configuration import int_between
from kilolayer.cli.output import show_json, show_line, show_table
from kilolayer.errors import InputError, OptionError, shown, unknown
from kilolayer.files.paths import kind_of
from kilolayer.reproduce.base import all_of, get

DATA = "KILOLAYER_DATA"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as deepnet-figure4; without it, all are listed")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder for runs and results [runs/reproduce]")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny version that takes seconds on a CPU; its verdict means nothing"
    )
    parser.add_argument(
        "--parallel",
        type=int_between(1, MOST_PARALLEL),
        metavar="N",
        help="maximum number of runs at once [as many as memory and cores allow]",
    )
    parser.add_argument(
        "--seconds", type=int_between(1, 10**9), help="stop after this many seconds; the same command continues"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        metavar="FILE",
        help="a found.json of another session, whose runs with the same configuration are not trained again",
    )
    parser.add_argument("--json", action="store_true", help="print all measurements as one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """List the reproductions, or run one and print its verdict."""
    if typed:
        raise unknown(typed[0], ["--out", "--tiny", "--parallel", "--seconds", "--earlier", "--json"])
    if options.name is None:
        if options.tiny or any(value is not None for value in (options.seconds, options.parallel, options.earlier)):
            raise OptionError("no reproduction is named", fix="kilolayer reproduce lists their names")
        _list(options)
        return 0
    from kilolayer.reproduce.lab import Lab, earlier_runs
    from kilolayer.reproduce.page import plain, save

    reproduction = get(options.name)
    flags = {"--seconds": options.seconds, "--parallel": options.parallel, "--earlier": options.earlier}
    for flag, value in flags.items():
        if value is not None and not reproduction.trains_runs:
            what = f"{flag} has no effect on {reproduction.name}, which takes a few steps in memory and trains no runs"
            raise OptionError(what, fix="remove it")
    out = options.out / "tiny" if options.tiny else options.out
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    earlier = () if options.earlier is None else earlier_runs(options.earlier)
    data = None if options.tiny else _data()
    lab = Lab(out / reproduction.name, options.tiny, data, options.parallel, deadline, earlier)
    found = reproduction.measure(lab)
    verdict = save(lab.folder, reproduction, found, options.tiny)
    if options.json:
        show_json({"name": reproduction.name, "verdict": verdict.word, "why": verdict.why, "found": plain(found)})
        return 0
    show_line(f"{reproduction.name}: {reproduction.source}")
    for title, text in (("claim", reproduction.claim), ("setting", reproduction.setting), ("rule", reproduction.rule)):
        show_line(f"{title}: {text}")
    show_line()
    measured = reproduction.numbers(found)
    show_table("measured", measured.rows, measured.header)
    if reproduction.published is not None:
        show_table("in the paper", reproduction.published.rows, reproduction.published.header)
    if options.tiny:
        show_line("the tiny version only shows that everything runs; its verdict means nothing")
    show_line(f"{verdict.word}: {verdict.why}")
    show_line(f"page: {lab.folder / 'page.html'}")
    return 0


def _data() -> Path:
    """The data folder that the settings refer to."""
    folder = os.environ.get(DATA)
    if not folder or kind_of(Path(folder)) != "folder":
        raise InputError(
            "a reproduction needs real text",
            where=f"{DATA} is {shown(folder)}" if folder else f"{DATA} is not set",
            fix=f"set {DATA} to the folder that contains it (docs/reproduce.md), or give --tiny",
        )
    return Path(folder)


def _list(options: argparse.Namespace) -> None:
    every = all_of()
    if options.json:
        show_json([{"name": each.name, "source": each.source, "claim": each.claim} for each in every])
        return
    for each in every:
        show_line(f"{each.name}\n    {each.claim}")
