"""kilolayer compare: train the same task under every combination of options, or compare existing runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer import hints
from kilolayer.cli.configuration import int_between
from kilolayer.cli.output import show_json, show_parts
from kilolayer.cli.train import add_run_options
from kilolayer.config import overrides
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.files.paths import kind_of
from kilolayer.tasks import registry
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.compare.comparison import Comparison
    from kilolayer.compare.grid import Axis

MOST_PARALLEL = 1000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    add_run_options(parser)
    paths = "a configuration [the embedded default], a comparison to continue, or existing runs"
    parser.add_argument("paths", nargs="*", type=Path, metavar="CONFIG.toml|COMPARISON|RUN", help=paths)
    parser.add_argument("--recipes", metavar="NAME,NAME", help="recipes to compare")
    parser.add_argument("--layers", metavar="N,N", help="depths: 6 for each stack, 60-12 for 60 encoder and 12 decoder layers")
    parser.add_argument("--seeds", metavar="N,N", help="seeds; the table shows their spread")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE,VALUE", help="values of any option; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the comparison [runs/compare-NAME]")
    parser.add_argument(
        "--parallel",
        type=int_between(1, MOST_PARALLEL),
        help="maximum number of runs at once [as many as memory and cores allow]",
    )
    parser.add_argument(
        "--seconds",
        type=int_between(1, 10**9),
        help="stop after this many seconds, with checkpoints; the same command continues",
    )
    parser.add_argument("--json", action="store_true", help="print all results as one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Create or open a comparison, train what is left of it, and show the table; 1 if a run of it failed."""
    from kilolayer.compare.documents import as_document, write_documents
    from kilolayer.compare.parts import table_parts
    from kilolayer.compare.queue import run_all
    from kilolayer.compare.result import is_complete

    try:
        comparison = _comparison(options, typed, _axes(options))
    except OptionError as error:
        raise (error if error.where else error.at("on the command line")) from None
    again = hints.call("compare", comparison.folder)
    if comparison.base is not None:
        code = run_all(comparison, options.parallel, options.seconds)
        if code:
            say(f"stopped by a signal; continue with: {again}")
            return code
    table, verdicts = write_documents(comparison)
    # A run that diverged or died is a result; of one that failed, nothing is known.
    code = int(comparison.base is not None and any(result.outcome.kind == "failed" for result in comparison.results()))
    if options.json:
        show_json(as_document(comparison, comparison.results(), table, verdicts))
        return code
    show_parts(table_parts(table, verdicts))
    if comparison.base is not None and not all(map(is_complete, comparison.members)):
        say(f"{summary(comparison)}; continue with: {again}")
    say(f"page: {comparison.folder / 'comparison.html'}")
    return code


def summary(comparison: Comparison) -> str:
    """How many runs had which outcome. A run that died counts as dead, even if it was stopped before its end."""
    outcomes = [result.outcome for result in comparison.results()]
    counts = {
        "finished": sum(outcome.kind == "finished" for outcome in outcomes),
        "died": sum(outcome.died for outcome in outcomes),
        f"failed (their logs: {comparison.folder / 'logs'})": sum(outcome.kind == "failed" for outcome in outcomes),
        "not finished": sum(outcome.kind in ("waiting", "unfinished") for outcome in outcomes),
    }
    return f"{counted(len(outcomes), 'run')}: {', '.join(f'{count:,} {end}' for end, count in counts.items() if count)}"


def _axes(options: argparse.Namespace) -> list[Axis]:
    """The axes given on the command line."""
    from kilolayer.compare.grid import LAYERS, RECIPE, SEED, parse_axis

    axes = [parse_axis(RECIPE, options.recipes)] if options.recipes is not None else []
    axes += [parse_axis(LAYERS, options.layers)] if options.layers is not None else []
    for text in options.set:
        name, equals, values = text.partition("=")
        if not equals:
            raise OptionError(f"--set {shown(text)} has no values", fix="write --set OPTION=VALUE,VALUE")
        axes.append(parse_axis(name, values))
    return axes + ([parse_axis(SEED, options.seeds)] if options.seeds is not None else [])


def _comparison(options: argparse.Namespace, typed: list[str], axes: list[Axis]) -> Comparison:
    """Create or open the comparison, depending on what the paths are: a configuration, a comparison or runs."""
    from kilolayer.compare.comparison import Comparison

    paths: list[Path] = options.paths
    if len(paths) == 1 and kind_of(paths[0] / "comparison.toml") == "file":
        _refuse({"--out has": options.out, "configuration options have": typed or None}, f"the comparison {paths[0]}")
        comparison = Comparison.open(paths[0])
        if axes:
            comparison.extend(axes)
        return comparison
    if len(paths) > 1 or (paths and kind_of(paths[0]) == "folder"):
        return _existing(options, typed, axes)
    config = paths[0] if paths else None
    if config is not None and kind_of(config) is None:
        raise InputError("found no configuration, comparison or run", where=str(config), fix="check the path")
    if not axes:
        raise OptionError(
            "there is nothing to compare", fix="give --recipes, --layers, --set or --seeds, or name existing runs"
        )
    folder = options.out or Path("runs") / f"compare-{(config or registry.EMBEDDED).stem}"
    return Comparison.make_or_extend(folder, config, axes, overrides(typed))


def _existing(options: argparse.Namespace, typed: list[str], axes: list[Axis]) -> Comparison:
    """A comparison of existing runs."""
    from kilolayer.compare.comparison import Comparison

    flags = {
        "--parallel has": options.parallel,
        "--seconds has": options.seconds,
        "configuration options have": typed or None,
    }
    _refuse({**flags, "--recipes, --layers, --set and --seeds have": axes or None}, "existing runs")
    return Comparison.of_runs(options.paths, options.out or Path("runs") / "compared")


def _refuse(given: dict[str, object], of: str) -> None:
    for what, value in given.items():
        if value is not None:
            raise OptionError(f"{what} no effect on {of}", fix="remove it")
