"""kilolayer classify: give images to a trained run; the run's task decides what comes out.

A task offers it by `verbs={"classify": Verb(..., "kilolayer.cli.classify", part="my_module")}`, with `add_flags(group)` and
`classify(run, options)` in that module. The latter yields an `Answer` for each image.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kilolayer.cli.configuration import add_device, int_between
from kilolayer.cli.output import show_json, write_text
from kilolayer.cli.task_flags import add_task_flags, refuse_foreign_flags
from kilolayer.errors import unknown
from kilolayer.tasks import registry
from kilolayer.terminal import counted, say


@dataclass(frozen=True)
class Answer:
    """What a run says about an image. shares: of each class, the largest first. fault: why the image could not be read.

    shown: texts by their names, which are printed before the shares.
    """

    image: str
    shown: dict[str, str]
    kind: str
    shares: dict[str, float]
    fault: str | None = None

    def table(self, top: int) -> dict[str, Any]:
        """The values for JSON."""
        if self.fault is not None:
            return {"image": self.image, "fault": self.fault}
        return {"image": self.image, **self.shown, self.kind: dict(islice(self.shares.items(), top))}

    def line(self, top: int) -> str:
        """The image, what is shown of it, then the largest shares."""
        shares = (f"{name}={share:.4f}" for name, share in islice(self.shares.items(), top))
        return "\t".join([self.image, *self.shown.values(), *shares])


def parts() -> dict[str, str]:
    """The module of each task that offers this verb."""
    offered = {task.name: task.verbs.get("classify") for task in registry.all_of()}
    return {name: verb.part for name, verb in offered.items() if verb is not None and verb.home == __name__}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags, and those of each task."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a task that reads images")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, folders, or .tar archives of images")
    parser.add_argument("--top", type=int_between(1, 10**6), default=5, metavar="N", help="classes to show for each image [5]")
    add_device(parser)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the matrix products [fp32]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_task_flags(parser, parts())


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Label the images; the exit code is 1 if one could not be read."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--top", "--device", "--precision", "--json", *options.owners])
    from kilolayer.runs.run import Run

    opened = Run.open(options.run, list(parts()))
    refuse_foreign_flags(options, opened.registration)
    part = importlib.import_module(parts()[opened.registration.name])
    faults, tables = [], []
    for answer in part.classify(opened, options):
        if answer.fault is not None:
            faults.append(answer)
        if options.json:
            tables.append(answer.table(options.top))
        elif answer.fault is None:
            write_text(f"{answer.line(options.top)}\n")
    if options.json:
        show_json(tables)
    for each in faults:
        say(f"{each.image}: {each.fault}")
    if faults:
        say(f"{counted(len(faults), 'image')} could not be read")
    return int(bool(faults))
