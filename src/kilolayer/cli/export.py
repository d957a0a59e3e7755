"""kilolayer export: write a trained run as a folder for Transformers or CTranslate2."""

from __future__ import annotations

import argparse
from pathlib import Path

from kilolayer.cli.output import show_json, show_line
from kilolayer.errors import unknown
from kilolayer.terminal import say


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--to", choices=("huggingface", "ctranslate2"), required=True, help="the library that will load the model"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Write the folder, and say which class was chosen and why."""
    if typed:
        raise unknown(typed[0].partition("=")[0], ["--to", "--out", "--json"])
    from kilolayer.runs.export import export

    found = export(options.run, to=options.to, out=options.out)
    if not found.finished:
        say(f"the run is not finished: these are its weights so far, of {found.weights}")
    if options.json:
        show_json(
            {
                "folder": str(found.folder),
                "architecture": found.architecture,
                "why": found.why,
                "weights": found.weights,
                "finished": found.finished,
            }
        )
        return 0
    show_line(f"{found.architecture}: {found.why}")
    show_line(f"{found.folder} holds the weights of {found.weights}; its README.md says how to use them")
    return 0
