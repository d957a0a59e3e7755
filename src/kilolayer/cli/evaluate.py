"""kilolayer evaluate: a run's test scores with their signatures; with others, whether the differences are significant."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.output import show_json, show_scores, show_table
from kilolayer.errors import InputError

if TYPE_CHECKING:
    from kilolayer.train.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="RUN", help="other runs on the same test part")
    parser.add_argument("--samples", type=int, default=1000, help="of the bootstrap [1000]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to translate [auto]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print scores and comparisons."""
    from kilolayer.errors import unknown
    from kilolayer.evaluate.significance import comparison_matrix, paired_bootstrap

    if typed:
        raise unknown(typed[0], ["--against", "--device", "--json", "--samples"])
    tested = {str(path): _translations(path, options.device) for path in [options.run, *options.against]}
    first, (references, hypotheses) = next(iter(tested.items()))
    for name, (other, _) in tested.items():
        if other != references:
            raise InputError(f"{first} and {name} have different test parts", fix="compare runs on the same data.test")
    scores = json.loads((options.run / "scores.json").read_text(encoding="utf-8"))
    tests = {name: entry for name, entry in scores.items() if name.startswith("test")}
    systems = {name: lines for name, (_, lines) in tested.items()}
    comparisons = [
        (name, paired_bootstrap(lines, hypotheses, references, samples=options.samples))
        for name, lines in systems.items()
        if name != first
    ]
    if options.json:
        show_json({"scores": tests, "against": {name: dataclasses.asdict(each) for name, each in comparisons}})
        return 0
    show_scores(tests)
    for name, each in comparisons:
        print(f"against {name}: {each}")
    if len(systems) > 2:
        matrix = comparison_matrix(systems, references, samples=options.samples)
        print()
        show_table("+ row better than column, - worse, = no significant difference (p < 0.05)", matrix.rows())
    return 0


def _translations(folder: Path, device: str) -> tuple[list[str], list[str]]:
    """References and hypotheses of all test parts of a run; translated now where they have not been."""
    from kilolayer.data.text import read_lines
    from kilolayer.train.run import Run, cache_folder, choose_device
    from kilolayer.train.score import hypotheses_path, score_test, write_results

    run: Run = Run.open(folder)
    task = run.task(cache_folder())
    if not task.corpora.test:
        raise InputError("the run has no test part", where=str(folder), fix="set data.test and train again")
    if not (folder / "scores.json").exists():
        write_results(run, task, score_test(run.load_model(choose_device(device)), task, run.config.search))
    tested = {direction: pairs for direction in task.corpora.directions if (pairs := task.corpora.test_of(direction))}
    references = [target for pairs in tested.values() for _, target in pairs]
    return references, [line for direction in tested for line in read_lines(hypotheses_path(folder, direction))]
