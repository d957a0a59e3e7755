"""What an image tokenizer adds to the report: reconstructions, how its codes are used, and whether they have collapsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilolayer.report.figure import Series
from kilolayer.report.panel import Panel, chart_panel, series_of
from kilolayer.report.picture import picture_panel
from kilolayer.report.plots import line_plot
from kilolayer.report.record import Entry, Record, number
from kilolayer.report.task_report import Section, TaskReport
from kilolayer.tasks.image_tokenizer.code_use import collapse_text, perplexity, used_share
from kilolayer.tasks.image_tokenizer.task import CODES, PICTURE

MOST_CODES = 2**20


class ImageTokenizerReport(TaskReport):
    """Originals above their reconstructions, the histogram of the codes, and their perplexity by step."""

    def sections(self, record: Record, prefix: str) -> list[Section]:
        found = [_reconstructions(record.scores), _codes(record, prefix)]
        return [each for each in found if each is not None]

    def faults(self, valid: Sequence[Entry], train: Sequence[Entry]) -> list[str]:
        last = valid[-1] if valid else {}
        if last.get("collapsed") is not True:
            return []
        text = collapse_text(number(last, "code_perplexity"), int(number(last, "codes")) if number(last, "codes") >= 0 else 0)
        return [f"{text[0].upper()}{text[1:]}."]


def _reconstructions(scores: dict[str, Any]) -> Section | None:
    panel = picture_panel(
        scores.get(PICTURE), "Images, and below them what their codes give", "Images above their reconstructions"
    )
    return None if panel is None else Section("Reconstructions", panels=[panel])


def _codes(record: Record, prefix: str) -> Section | None:
    counts = record.scores.get(CODES)
    if not isinstance(counts, list) or not 2 <= len(counts) <= MOST_CODES or not all(_is_count(each) for each in counts):
        return None
    total = max(1, sum(counts))
    shares = [count / total for count in sorted(counts, reverse=True)]
    histogram = line_plot(
        f"{prefix}codes",
        [Series("codes", list(range(1, len(shares) + 1)), [share or float("nan") for share in shares])],
        x_label="code, by use",
        y_label="share of patches",
        description="The share of patches that each code stands for, from the most used code to the least used",
        log=True,
    )
    texts = [f"{used_share(counts):.1%} of {len(counts):,} codes are used, with a perplexity of {perplexity(counts):,.1f}."]
    by_step = chart_panel(
        f"{prefix}code-perplexity",
        "Perplexity of the codes",
        [series_of("validation", record.valid, "code_perplexity")],
        x_label="step",
        y_label="perplexity",
        description="The perplexity of the codes of the validation images, by step",
        from_zero=True,
    )
    return Section("Codes", texts, [Panel(histogram, "Use of the codes"), by_step])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**60
