"""kilolayer diagnose: what depth does to a model, before training or from a checkpoint, and what to change."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import add_device, int_between
from kilolayer.cli.output import show_json, show_parts
from kilolayer.cli.prepared import started
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import kind_of
from kilolayer.files.writing import check_writable
from kilolayer.tasks import registry
from kilolayer.terminal import say

if TYPE_CHECKING:
    from kilolayer.runs.run import Run
    from kilolayer.tasks.config import RunConfig

MOST_STEPS = 100_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    from kilolayer.cli.train import add_run_options

    add_run_options(parser)
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        default=registry.EMBEDDED,
        metavar="CONFIG.toml|RUN",
        help="a configuration [the embedded default], or a run folder",
    )
    parser.add_argument(
        "--at", type=int_between(1, 10**12), metavar="STEP", help="step of the run's checkpoint to use [the newest]"
    )
    parser.add_argument(
        "--steps",
        type=int_between(1, MOST_STEPS),
        metavar="N",
        help="for a configuration: train N steps in memory, and measure how far they move the output [none]",
    )
    add_device(parser, "auto; for a configuration, its own")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write the page [diagnose.html in a run's folder, else none]"
    )
    parser.add_argument("--json", action="store_true", help="print everything that was measured as one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Measure the model, print the diagnosis, and draw it. The exit code is 0 whatever is found."""
    _check(options, typed)
    page = options.out or (options.source / "diagnose.html" if kind_of(options.source) == "folder" else None)
    if page is not None:
        check_writable(page)

    from kilolayer.probe.diagnose import diagnose
    from kilolayer.probe.diagnosis_page import parts_of, write_diagnosis

    with _opened(options.source, typed) as source:
        found = diagnose(source, steps=options.steps or 0, at=options.at, device=options.device)
    if page is not None:
        write_diagnosis(page, options.source.name or str(options.source), found)
    if options.json:
        show_json(found.table())
    else:
        show_parts(parts_of(found))
    if page is not None:
        say(f"page: {page}")
    return 0


def _check(options: argparse.Namespace, typed: list[str]) -> None:
    """Raise for contradictory arguments, before any work."""
    if kind_of(options.source) is None:
        raise InputError("found neither a run nor a configuration", where=str(options.source), fix="check the path")
    if options.out is not None and kind_of(options.out) == "folder":
        raise InputError("the page must be a file, and this is a folder", where=str(options.out), fix="name a file in it")
    if kind_of(options.source) == "folder":
        if typed or options.steps:
            raise OptionError(
                f"{typed[0] if typed else '--steps'} applies to a configuration, and this is a run",
                where=str(options.source),
                fix=f"diagnose {options.source / 'config.toml'} with it",
            )
    elif options.at is not None:
        raise OptionError("a configuration has no checkpoints", where="--at", fix="name a run, or remove it")


@contextmanager
def _opened(path: Path, typed: list[str]) -> Iterator[Run | RunConfig]:
    if kind_of(path) == "folder":
        from kilolayer.runs.run import Run

        yield Run.open(path)
        return
    with started(path, typed) as (config, _):
        yield config
