"""kilolayer evaluate: a run's test scores with their signatures, and what its task adds."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.output import show_scores, show_scores_json
from kilolayer.errors import OptionError, unknown
from kilolayer.files.paths import kind_of
from kilolayer.tasks import registry

if TYPE_CHECKING:
    from kilolayer.training.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags, and those of each task."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs [auto]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    owners: dict[str, str] = {}
    for task in registry.all_of():
        if task.evaluation is not None:
            group = parser.add_argument_group(f"of {task.title}")
            importlib.import_module(task.evaluation).add_flags(group)
            owners |= {action.option_strings[0]: task.name for action in group._group_actions}
    parser.set_defaults(owners=owners, untyped={action.dest: action.default for action in parser._actions})


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print the scores."""
    from kilolayer.training.run import Run

    if typed:
        raise unknown(typed[0], ["--device", "--json", *options.owners])
    opened = Run.open(options.run)
    task = opened.registration
    for flag, owner in options.owners.items():
        name = flag.removeprefix("--").replace("-", "_")
        if owner != task.name and getattr(options, name) != options.untyped[name]:
            fix = f"remove it: it is for {registry.get(owner).title}"
            raise OptionError(f"{flag} has no effect on {task.title}", where=str(options.run), fix=fix)
    if task.evaluation is not None:
        return importlib.import_module(task.evaluation).evaluate(opened, options)
    scores = _scores(opened, options.device)
    if options.json:
        show_scores_json(scores)
    else:
        show_scores(scores)
    return 0


def _scores(run: Run, device: str) -> dict[str, Any]:
    """What the run keeps; scored now where it has not been."""
    from kilolayer.tasks.results import read_scores
    from kilolayer.training.run import cache_folder, choose_device

    if kind_of(run.folder / "scores.json") is None:
        run.score(run.task(cache_folder()), choose_device(device))
    return read_scores(run.folder)
