"""Prints results to stdout: tables on a terminal, plain lines elsewhere, JSON on request."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kilolayer.tasks.registry import Headline, score_digits
from kilolayer.terminal import printable, say


def show_line(text: str = "") -> None:
    """Print a line of results."""
    print(printable(text))


def write_text(text: str) -> None:
    """Print a model's output: unchanged, in UTF-8 whatever the locale; on a terminal, with control characters escaped."""
    if sys.stdout.isatty():
        sys.stdout.write(printable(text))
        return
    if (sys.stdout.encoding or "utf8").lower().replace("-", "") != "utf8":  # an in-memory stream has no encoding
        sys.stdout.reconfigure(encoding="utf-8")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout.write(text)


def show_table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print a titled table; the first column is left-aligned, the others right-aligned."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(printable(title)), title_justify="left", show_header=bool(header), box=None, pad_edge=False)
        for index in range(max(map(len, [header, *rows]))):
            table.add_column(Text(printable(header[index])) if header else "", justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        Console(highlight=False).print(table, "")
        return
    lines = [list(map(str, row)) for row in ([header] if header else []) + list(rows)]
    widths = [max(len(line[index]) for line in lines if index < len(line)) for index in range(max(map(len, lines)))]
    show_line(title)
    for line in lines:
        cells = [cell.ljust(widths[0]) if index == 0 else cell.rjust(widths[index]) for index, cell in enumerate(line)]
        show_line("  " + "  ".join(cells).rstrip())
    show_line()


def tables_of_tests(scores: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The scores of each test set from scores.json, or those of the validation set if they are there instead."""
    return {name: entry for name, entry in scores.items() if name.startswith("test") or name == "validation"}


def show_scores(scores: dict[str, Any], headline: Headline | None = None) -> None:
    """Print the scores of each test set, with their signatures, and why a score is unavailable.

    scores: as in scores.json. headline: the task's main score, which may have more decimals.
    """
    tests = tables_of_tests(scores)
    if len(tests) > 1:
        _show_directions(tests, scores.get("averages", {}), headline)
    else:
        for name, entry in tests.items():
            rows = [(each["name"], shown_score(key, each, headline), _signature_or_reason(each)) for key, each in entry.items()]
            show_table(name, rows)
    if tests:
        _show_weights(scores.get("weights"))
    else:
        say("there are no scores: the run has no test set")


def _show_directions(
    tests: dict[str, dict[str, Any]], averages: dict[str, dict[str, float]], headline: Headline | None
) -> None:
    """Print a row per test set and direction, then the averages; how each score is computed is printed once."""
    names = {key: each["name"] for entry in tests.values() for key, each in entry.items()}
    rows = [[part, *(shown_score(key, entry.get(key, {}), headline) for key in names)] for part, entry in tests.items()]
    for side, values in averages.items():
        means = [{"value": values[key]} if key in values else {} for key in names]
        rows.append([f"average {side}", *(shown_score(key, mean, headline) for key, mean in zip(names, means, strict=True))])
    show_table("scores by test set", rows, ["", *names.values()])
    for line in dict.fromkeys(
        f"{each['name']}: {_signature_or_reason(each)}" for entry in tests.values() for each in entry.values()
    ):
        show_line(line)
    show_line()


def _show_weights(weights: Any) -> None:
    """Print which checkpoints were scored."""
    match weights:
        case {"chosen": str(chosen), "steps": list(steps), "passed_over": list(others)}:
            fault = f"; damaged or missing: step {', '.join(map(str, others))}" if others else ""
            show_line(f"weights: {chosen}, step {', '.join(map(str, steps))}{fault}\n")


def shown_score(key: str, score: dict[str, Any], headline: Headline | None) -> str:
    """The value of an entry of scores.json, with as many decimals as it or the task specifies; a dash if there is none."""
    return f"{score['value']:.{score.get('digits', score_digits(key, headline))}f}" if "value" in score else "-"


def show_samples(samples: Sequence[dict[str, str]], line: str | None = None) -> None:
    """Print a model's output on a few texts, as in samples.json; line: the task's format of a sample, if it has one."""
    for sample in samples:
        if line is None:
            show_line("".join(f"{part}: {text}\n" for part, text in sample.items()))
        else:
            shown = line.format_map(defaultdict(str, sample))
            show_line("\n".join(each.rstrip() for each in shown.split("\n")))  # the last part of a line may be empty
    if samples:
        show_line()


def show_scores_json(scores: dict[str, Any]) -> None:
    """Print the scores of all test sets, and which weights they belong to, as one JSON document."""
    show_json({"scores": tables_of_tests(scores), **{name: scores[name] for name in ("weights",) if name in scores}})


def _signature_or_reason(score: dict[str, Any]) -> str:
    return score["signature"] if "value" in score else f"not available: {score['reason']}"


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


def show_json(result: Any) -> None:
    """Print one JSON document."""
    print(json.dumps(result, indent=2))


def human_count(number: float) -> str:
    """Format a number: 12345678 as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"
