"""kilolayer evaluate for a translator: scores with signatures, error analysis, and significance compared with other runs."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import Flags, int_between
from kilolayer.cli.output import show_json, show_line, show_scores, show_table
from kilolayer.errors import InputError, OptionError
from kilolayer.files.paths import resolve
from kilolayer.tasks.results import tables_of_tests

if TYPE_CHECKING:
    from kilolayer.data.corpora import ScoredPart
    from kilolayer.data.parallel import ParallelText
    from kilolayer.evaluate.scores import Metric
    from kilolayer.evaluate.significance import Comparison
    from kilolayer.runs.run import Run


SAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Translated:
    """The references and a run's hypotheses for one part of the text."""

    references: list[str]
    hypotheses: list[str]


@dataclasses.dataclass(frozen=True)
class System:
    """A run's translations of all parts of the text; scores: as in scores.json."""

    parts: dict[ScoredPart, Translated]
    scores: dict[str, Any]


def add_flags(parser: Flags) -> None:
    """Add the flags that only translators have."""
    parser.add_argument("--source", metavar="FILE", help="score this text instead of the run's test set, one sentence per line")
    parser.add_argument("--reference", metavar="FILE", help="reference translations of --source, line by line")
    parser.add_argument("--direction", metavar="SOURCE-TARGET", help="direction of that text, if the run has several")
    parser.add_argument(
        "--against", type=Path, nargs="+", default=[], metavar="RUN", help="other runs with the same test set, to compare with"
    )
    parser.add_argument("--samples", type=int_between(1, 100_000), default=SAMPLES, help=f"bootstrap samples [{SAMPLES}]")
    parser.add_argument(
        "--spbleu", type=Path, metavar="MODEL", help="add spBLEU, computed on the pieces of this SentencePiece model"
    )
    parser.add_argument("--tokenised", action="store_true", help="add BLEU on text that is already tokenised")
    parser.add_argument("--meteor", action="store_true", help="add METEOR; needs nltk and its WordNet data")


def evaluate(run: Run, options: argparse.Namespace) -> int:
    """Print scores, error analysis and comparisons."""
    from kilolayer.evaluate.scores import score_all
    from kilolayer.tasks.translation.scores import add_scores

    if resolve(options.run) in [resolve(path) for path in options.against]:
        raise OptionError("a run is compared with itself", where=str(options.run), fix="name other runs after --against")
    runs = [run, *(_other(path) for path in options.against)]
    metrics, tests = _metrics(options), _tests(run, options)
    made = {
        str(each.folder): _score_other_text(each, tests, options) if tests else _score_own_test_set(each, options)
        for each in runs
    }
    own = made[str(run.folder)]
    more = {part: score_all(each.hypotheses, each.references, metrics) for part, each in own.parts.items()}
    scores = add_scores(own.scores, more)
    references, systems = _lines({name: each.parts for name, each in made.items()})
    comparisons = _comparisons(references, systems, options.samples)
    if options.json:
        kept = {name: scores[name] for name in ("averages", "frequency_buckets", "length_buckets", "weights") if name in scores}
        against = {name: dataclasses.asdict(each) for name, each in comparisons.items()}
        show_json({"scores": tables_of_tests(scores), **kept, "against": against})
        return 0
    show_scores(scores, run.registration.headline)
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
    """The requested scores beyond those that every run has."""
    from kilolayer.evaluate.scores import Meteor, SpBleu, TokenisedBleu

    return [
        *([TokenisedBleu()] if options.tokenised else []),
        *([SpBleu(options.spbleu)] if options.spbleu else []),
        *([Meteor()] if options.meteor else []),
    ]


def _other(folder: Path) -> Run:
    """Open a run to compare with, which must be a translator too."""
    from kilolayer.runs.run import Run

    other = Run.open(folder)
    if other.registration.name != "translation":
        raise InputError(
            f"a translator cannot be compared with {other.registration.title}",
            where=f"--against {folder}",
            fix="name translators after --against",
        )
    return other


def _tests(run: Run, options: argparse.Namespace) -> list[ParallelText]:
    """The text given instead of the run's test set; empty if none was given."""
    from kilolayer.runs.run import cache_folder
    from kilolayer.tasks.other_text import OtherText
    from kilolayer.tasks.translation.config import TranslationConfig
    from kilolayer.tasks.translation.task import find_tests

    if not options.test and options.source is None and options.reference is None:
        if options.direction is not None:
            raise OptionError("--direction has no effect on the run's own test set", fix="remove it, or name a text: --test")
        return []
    assert isinstance(run.config, TranslationConfig)
    text = OtherText(tuple(options.test), options.source, options.reference, options.direction)
    return find_tests(run.config, text, cache_folder())


def _score_own_test_set(run: Run, options: argparse.Namespace) -> System:
    """The results on the run's own test set, translated now if it has not been yet."""
    from kilolayer.data.text import read_lines
    from kilolayer.runs.run import cache_folder, choose_device
    from kilolayer.tasks.results import read_scores
    from kilolayer.tasks.translation.scores import check_same_test, hypotheses_path

    task = run.task(cache_folder())
    references = _references(task, run, options)
    if not references:
        fix = "name a text: --test, or --source and --reference"
        raise InputError("the run has no test set", where=str(run.folder), fix=fix)
    with run.scored(choose_device(options.device, "device"), task) as folder:
        scores = read_scores(folder)
        check_same_test(scores, task.held_out(), run.folder)
        hypotheses = {part: [*read_lines(hypotheses_path(folder, part))] for part in references}
    return System({part: Translated(lines, hypotheses[part]) for part, lines in references.items()}, scores)


def _score_other_text(run: Run, tests: list[ParallelText], options: argparse.Namespace) -> System:
    """The results on another text, translated now; nothing is written to the run folder."""
    from kilolayer.models.encoder_decoder import EncoderDecoder
    from kilolayer.runs.chosen import choose
    from kilolayer.runs.run import cache_folder, choose_device
    from kilolayer.tasks.translation.config import TranslationConfig
    from kilolayer.tasks.translation.scores import scores_of
    from kilolayer.tasks.translation.task import TranslationTask

    assert isinstance(run.config, TranslationConfig)
    vocabulary = TranslationTask.load_vocabulary(run.config, run.folder)
    try:
        task = TranslationTask.of_tests(run.config, vocabulary, tests, cache_folder())
    except OptionError as error:
        raise error.at(str(run.folder)) from None
    _references(task, run, options)
    chosen = choose(run.checkpoints, run.config)
    model = run.load_reader(choose_device(options.device, "device"), chosen=chosen)
    assert isinstance(model, EncoderDecoder)
    results = task.results(model)
    parts = {result.part: Translated(result.references, result.hypotheses) for result in results}
    return System(parts, {**scores_of(results, []), "weights": chosen.table()})


def _references(task: Any, run: Run, options: argparse.Namespace) -> dict[ScoredPart, list[str]]:
    """The references of each part; with --tokenised, checked to be tokenised."""
    from kilolayer.evaluate.scores import check_tokenised

    references = {part: [target for _, target in task.corpora.test_of(part)] for part in task.corpora.scored_parts}
    if options.tokenised:
        for part, lines in references.items():
            check_tokenised(lines, where=f"{run.folder}, {part.direction.name}")
    return references


def _lines(runs: dict[str, dict[ScoredPart, Translated]]) -> tuple[list[str], dict[str, list[str]]]:
    """The references of all parts, concatenated, and the hypotheses of each run in the same order."""
    references = {name: [line for part in parts.values() for line in part.references] for name, parts in runs.items()}
    first = next(iter(runs))
    for name, lines in references.items():
        if lines != references[first]:
            raise InputError(f"{first} and {name} have different test sets", fix="compare runs on the same data.test")
    return references[first], {
        name: [line for part in parts.values() for line in part.hypotheses] for name, parts in runs.items()
    }


def _comparisons(references: list[str], systems: dict[str, list[str]], samples: int) -> dict[str, Comparison]:
    """Compare the first system with each of the others."""
    from kilolayer.evaluate.significance import paired_bootstrap

    (_, own), *others = systems.items()
    return {name: paired_bootstrap(lines, own, references, samples=samples) for name, lines in others}


def show_errors(scores: dict[str, Any]) -> None:
    """Print the error analysis in scores.json: word accuracy by training frequency, BLEU by sentence length."""
    counts = {"matched": "matched", "reference": "in reference", "hypothesis": "in hypothesis"}
    frequency, length = scores.get("frequency_buckets", []), scores.get("length_buckets", [])
    _show_buckets("word accuracy (F1) by frequency in training", frequency, counts, ("f1", "F1", 3))
    _show_buckets("BLEU by words in the reference", length, {"sentences": "sentences"}, ("bleu", "BLEU", 1))


def _show_buckets(title: str, buckets: Any, counts: dict[str, str], score: tuple[str, str, int]) -> None:
    """Print a row per bucket, with its counts; for several directions, a row per direction and a column per bucket."""
    key, name, digits = score

    def shown(bucket: dict[str, Any]) -> str:
        return "-" if bucket[key] is None else f"{bucket[key]:.{digits}f}"

    if isinstance(buckets, list):
        rows = [[each["label"], *(f"{each[count]:,}" for count in counts), shown(each)] for each in buckets]
        header = ["", *counts.values(), name]
    else:
        rows = [[part, *map(shown, each)] for part, each in buckets.items()]
        header = ["", *(each["label"] for each in next(iter(buckets.values()), []))]
    if rows:
        show_table(title, rows, header)
