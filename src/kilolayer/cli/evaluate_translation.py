"""kilolayer evaluate of a translator: scores with signatures, where the errors lie; with other runs, significance."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from kilolayer.cli.configuration import Flags, whole
from kilolayer.cli.output import show_errors, show_json, show_line, show_scores, show_table, tables_of_tests
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import kind_of, resolve

if TYPE_CHECKING:
    from kilolayer.data.corpora import ScoredPart
    from kilolayer.evaluate.scores import Metric
    from kilolayer.evaluate.significance import Comparison
    from kilolayer.training.run import Run


SAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Translated:
    """A part of the test text, as a run has translated it."""

    references: list[str]
    hypotheses: list[str]


def add_flags(parser: Flags) -> None:
    """Of translators alone."""
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="RUN", help="other runs on the same test part")
    parser.add_argument("--samples", type=whole(1, 100_000), default=SAMPLES, help=f"of the bootstrap [{SAMPLES}]")
    parser.add_argument("--spbleu", type=Path, metavar="MODEL", help="add spBLEU on the pieces of a SentencePiece model")
    parser.add_argument("--tokenised", action="store_true", help="add BLEU on the words of text that is tokenised already")
    parser.add_argument("--meteor", action="store_true", help="add METEOR; needs nltk and its WordNet data")


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Print scores, error analysis and comparisons."""
    from kilolayer.evaluate.scores import score_all
    from kilolayer.tasks.results import read_scores
    from kilolayer.tasks.translation.scores import add_scores

    if resolve(options.run) in [resolve(path) for path in options.against]:
        raise OptionError("a run is compared with itself", where=str(options.run), fix="name other runs after --against")
    metrics = _metrics(options)
    runs = {str(path): _translated(path, options) for path in [options.run, *options.against]}
    own = runs[str(options.run)]
    more = {part: score_all(each.hypotheses, each.references, metrics) for part, each in own.items()}
    scores = add_scores(read_scores(options.run), more)
    references, systems = _lines(runs)
    comparisons = _comparisons(references, systems, options.samples)
    if options.json:
        kept = {name: scores[name] for name in ("averages", "frequency_buckets", "length_buckets", "weights") if name in scores}
        against = {name: dataclasses.asdict(each) for name, each in comparisons.items()}
        show_json({"scores": tables_of_tests(scores), **kept, "against": against})
        return 0
    show_scores(scores)
    show_errors(scores)
    for name, each in comparisons.items():
        show_line(f"against {name}: {each}")
    if len(systems) > 2:
        from kilolayer.evaluate.significance import comparison_matrix

        matrix = comparison_matrix(systems, references, samples=options.samples)
        show_line()
        show_table("+ row better than column, - worse, = no significant difference (p < 0.05)", matrix.rows())
    return 0


def _metrics(options: argparse.Namespace) -> list[Metric]:
    """The scores that were asked for beyond those that a run has."""
    from kilolayer.evaluate.scores import Meteor, SpBleu, TokenisedBleu

    return [
        *([TokenisedBleu()] if options.tokenised else []),
        *([SpBleu(options.spbleu)] if options.spbleu else []),
        *([Meteor()] if options.meteor else []),
    ]


def _translated(folder: Path, options: argparse.Namespace) -> dict[ScoredPart, Translated]:
    """The parts of a run's test text; translated now where they have not been."""
    from kilolayer.data.text import read_lines
    from kilolayer.evaluate.scores import check_tokenised
    from kilolayer.tasks.translation.scores import hypotheses_path
    from kilolayer.tasks.translation.task import TranslationTask
    from kilolayer.training.run import Run, cache_folder, choose_device

    run = Run.open(folder, ["translation"])
    task = run.task(cache_folder())
    assert isinstance(task, TranslationTask)
    if not task.corpora.test:
        raise InputError("the run has no test part", where=str(folder), fix="set data.test and train again")
    references = {part: [target for _, target in task.corpora.test_of(part)] for part in task.corpora.scored_parts}
    if options.tokenised:
        for part, lines in references.items():
            check_tokenised(lines, where=f"{folder}, {part.direction.name}")
    if kind_of(folder / "scores.json") is None:
        run.score(task, choose_device(options.device))
    return {part: Translated(lines, list(read_lines(hypotheses_path(folder, part)))) for part, lines in references.items()}


def _lines(runs: dict[str, dict[ScoredPart, Translated]]) -> tuple[list[str], dict[str, list[str]]]:
    """The references of all parts, one behind the other, and the hypotheses of each run in the same order."""
    references = {name: [line for part in parts.values() for line in part.references] for name, parts in runs.items()}
    first = next(iter(runs))
    for name, lines in references.items():
        if lines != references[first]:
            raise InputError(f"{first} and {name} have different test parts", fix="compare runs on the same data.test")
    return references[first], {
        name: [line for part in parts.values() for line in part.hypotheses] for name, parts in runs.items()
    }


def _comparisons(references: list[str], systems: dict[str, list[str]], samples: int) -> dict[str, Comparison]:
    """The first system against each of the others."""
    from kilolayer.evaluate.significance import paired_bootstrap

    (_, own), *others = systems.items()
    return {name: paired_bootstrap(lines, own, references, samples=samples) for name, lines in others}
