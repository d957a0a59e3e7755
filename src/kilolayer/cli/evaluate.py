"""kilolayer evaluate: a run's test scores with their signatures and where its errors lie; with others, whether the differences
are significant."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli import evaluate_shots
from kilolayer.cli.configuration import whole
from kilolayer.cli.output import show_errors, show_json, show_line, show_scores, show_table, tables_of_tests
from kilolayer.errors import InputError, OptionError, unknown
from kilolayer.files.paths import kind_of, resolve

if TYPE_CHECKING:
    from kilolayer.data.parallel import Direction
    from kilolayer.evaluate.scores import Metric
    from kilolayer.evaluate.significance import Comparison
    from kilolayer.training.run import Run


SAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Translated:
    """The test part of a direction, as a run has translated it."""

    references: list[str]
    hypotheses: list[str]


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="RUN", help="other runs on the same test part")
    parser.add_argument("--samples", type=whole(1, 100_000), default=SAMPLES, help=f"of the bootstrap [{SAMPLES}]")
    parser.add_argument("--spbleu", type=Path, metavar="MODEL", help="add spBLEU on the pieces of a SentencePiece model")
    parser.add_argument("--meteor", action="store_true", help="add METEOR; needs nltk and its WordNet data")
    parser.add_argument(
        "--stride", type=whole(1, 2**24), metavar="N", help="of a language model: tokens from window to window [text.stride]"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model runs [auto]")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    evaluate_shots.add_flags(parser)


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print scores, error analysis and comparisons."""
    from kilolayer.evaluate.scores import score_all
    from kilolayer.tasks.results import read_scores
    from kilolayer.tasks.translation_scores import add_scores
    from kilolayer.training.run import Run

    if typed:
        flags = ["--against", "--device", "--json", "--meteor", "--samples", "--spbleu", "--stride"]
        raise unknown(typed[0], [*flags, "--tasks", *(f"--{name}" for name in evaluate_shots.OWN_FLAGS)])
    if options.tasks is None:
        evaluate_shots.refuse_flags(options)
    opened = Run.open(options.run)
    if options.tasks is not None:
        _refuse_test_flags(options)
        return evaluate_shots.evaluate(opened, options)
    if opened.config.task == "causal_lm":
        return _evaluate_text(opened, options)
    if options.stride is not None:
        raise OptionError("--stride has no effect on a translator", where=str(options.run), fix="remove it")
    if resolve(options.run) in [resolve(path) for path in options.against]:
        raise OptionError("a run is compared with itself", where=str(options.run), fix="name other runs after --against")
    metrics = _metrics(options)
    runs = {str(path): _translated(path, options.device) for path in [options.run, *options.against]}
    own = runs[str(options.run)]
    more = {direction: score_all(each.hypotheses, each.references, metrics) for direction, each in own.items()}
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


def _refuse_test_flags(options: argparse.Namespace) -> None:
    """Refuse flags that are for the test part alone."""
    given = {"--against": options.against, "--samples": options.samples != SAMPLES, "--spbleu": options.spbleu}
    given |= {"--meteor": options.meteor, "--stride": options.stride}
    if flag := next((flag for flag, value in given.items() if value), None):
        raise OptionError(f"{flag} has no effect with --tasks", where="in the typed options", fix="remove one of them")


def _evaluate_text(run: Run, options: argparse.Namespace) -> int:
    """Print a language model's scores."""
    where, length = str(run.folder), run.config.text.length
    if options.against or options.samples != SAMPLES:
        fix = "evaluate each run, and compare bits per byte on the same text"
        raise OptionError("language models are not compared by bootstrap", where=where, fix=fix)
    if options.spbleu or options.meteor:
        raise OptionError("--spbleu and --meteor score translations", where=where, fix="remove them")
    if options.stride is not None and options.stride > length:
        raise OptionError(f"--stride is {options.stride}", where=where, fix=f"allowed: 1 to text.length, {length}")
    if not run.config.text.test and not run.config.text.test_share:
        raise InputError("the run has no test part", where=where, fix="set text.test or text.test_share, and train again")
    scores = _text_scores(run, options.stride, options.device)
    if options.json:
        kept = {name: scores[name] for name in ("weights",) if name in scores}
        show_json({"scores": tables_of_tests(scores), **kept})
    else:
        show_scores(scores)
    return 0


def _text_scores(run: Run, stride: int | None, device: str) -> dict[str, Any]:
    """What the run keeps, or with a stride of its own what that gives."""
    from kilolayer.models.decoder import Decoder
    from kilolayer.tasks.causal_lm import CausalLMTask
    from kilolayer.tasks.results import read_scores
    from kilolayer.training.run import cache_folder, choose_device

    path = run.folder / "scores.json"
    if stride is None and kind_of(path) is not None:
        return read_scores(run.folder)
    task = run.task(cache_folder())
    assert isinstance(task, CausalLMTask)
    if stride is None:
        run.score(task, choose_device(device))
        return read_scores(run.folder)
    model = run.load_reader(choose_device(device))
    assert isinstance(model, Decoder)
    return {"test": {key: dataclasses.asdict(score) for key, score in task.test_scores(model, stride).items()}}


def _metrics(options: argparse.Namespace) -> list[Metric]:
    """The scores that were asked for beyond those that a run has."""
    from kilolayer.evaluate.scores import Meteor, SpBleu

    return [*([SpBleu(options.spbleu)] if options.spbleu else []), *([Meteor()] if options.meteor else [])]


def _translated(folder: Path, device: str) -> dict[Direction, Translated]:
    """The test part of each direction of a run; translated now where it has not been."""
    from kilolayer.data.text import read_lines
    from kilolayer.tasks.translation import TranslationTask
    from kilolayer.tasks.translation_scores import hypotheses_path
    from kilolayer.training.run import Run, cache_folder, choose_device

    run = Run.open(folder)
    task = run.task(cache_folder())
    assert isinstance(task, TranslationTask)
    if not task.corpora.test:
        raise InputError("the run has no test part", where=str(folder), fix="set data.test and train again")
    if kind_of(folder / "scores.json") is None:
        run.score(task, choose_device(device))
    return {
        direction: Translated([target for _, target in pairs], list(read_lines(hypotheses_path(folder, direction))))
        for direction in task.corpora.directions
        if (pairs := task.corpora.test_of(direction))
    }


def _lines(runs: dict[str, dict[Direction, Translated]]) -> tuple[list[str], dict[str, list[str]]]:
    """The references of all directions, one behind the other, and the hypotheses of each run in the same order."""
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
