"""kilolayer reproduce: a figure or a table of the papers at a size that fits, with a verdict."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kilolayer.cli.configuration import whole
from kilolayer.cli.output import show_json, show_line, show_table
from kilolayer.errors import InputError, OptionError, unknown
from kilolayer.files.paths import kind_of
from kilolayer.reproduce.base import all_of, get
from kilolayer.terminal import say

MOST_PARALLEL = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="such as deepnet-figure4; without one, the list")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="where runs and results lie [runs/reproduce]")
    parser.add_argument("--tiny", action="store_true", help="a form that ends in seconds on a processor; it decides nothing")
    parser.add_argument(
        "--parallel", type=whole(1, MOST_PARALLEL), metavar="N", help="runs side by side [as memory and cores allow]"
    )
    parser.add_argument("--seconds", type=whole(1, 10**9), help="stop the runs after this time; the same command goes on")
    parser.add_argument("--json", action="store_true", help="print what was measured as one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """List the reproductions, or run one and tell its verdict."""
    if typed:
        raise unknown(typed[0], ["--help"])
    if options.name is None:
        if options.tiny or options.seconds is not None or options.parallel is not None:
            raise OptionError("no reproduction is named", fix="kilolayer reproduce lists their names")
        _list(options)
        return 0
    from kilolayer.reproduce.lab import Lab
    from kilolayer.reproduce.page import save

    reproduction = get(options.name)
    data = None if options.tiny else _data()
    out = options.out / "tiny" if options.tiny else options.out / "embedded" if data is None else options.out
    if data is None and not options.tiny:
        say("KILOLAYER_DATA is not set: the text is the embedded corpus, which is too simple to decide much")
    lab = Lab(out / reproduction.name, options.tiny, data, options.parallel, options.seconds)
    found = reproduction.measure(lab)
    verdict = save(lab.folder, reproduction, found, options.tiny, embedded=data is None and not options.tiny)
    if options.json:
        show_json({"name": reproduction.name, "verdict": verdict.word, "why": verdict.why, "found": found})
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
        show_line("the tiny form shows that everything runs; its verdict means nothing")
    show_line(f"{verdict.word}: {verdict.why}")
    show_line(f"page: {lab.folder / 'page.html'}")
    return 0


def _data() -> Path | None:
    """The folder of the corpora."""
    named = os.environ.get("KILOLAYER_DATA")
    if named and kind_of(Path(named)) != "folder":
        raise InputError(
            "the folder of the corpora does not exist",
            where=f"KILOLAYER_DATA={named}",
            fix="correct it, or unset it to use the embedded corpus",
        )
    return Path(named) if named else None


def _list(options: argparse.Namespace) -> None:
    every = all_of()
    if options.json:
        show_json([{"name": each.name, "source": each.source, "claim": each.claim} for each in every])
        return
    for each in every:
        show_line(f"{each.name}\n    {each.claim}")
