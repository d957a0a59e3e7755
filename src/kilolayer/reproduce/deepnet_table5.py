"""DeepNet, Table 5: deep and narrow against shallow and wide, on several test sets."""

from __future__ import annotations

import lzma
import tarfile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kilolayer.files.writing import write
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import named_cells
from kilolayer.reproduce.deepnet_table3 import BASELINE_TRAINS, EIGHT_LANGUAGES, NO_TRANSLATION, eight_languages, untranslated
from kilolayer.reproduce.deepnet_table4 import MODELS, RATES_TEXT, best_of_models
from kilolayer.reproduce.stored_run import Run, keep, scores_of
from kilolayer.reproduce.texts import known

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

SETS = {"test": "Tatoeba", "flores": "Flores-200"}
WIDE, DEEP = "Post-LN 6L-6L, dim 512", "DeepNorm 24L-24L, dim 128"
COMPARED = {WIDE: ("post_ln", 6, 6, 512), DEEP: MODELS[DEEP]}
FLORES_LINES = 50


@register
class Table5(Reproduction):
    """Two models, scored on the text that they were trained for and on Flores."""

    name = "deepnet-table5"
    claim = "A deep and narrow model beats a shallow and wide one of four times its size on all of four test sets."
    setting = (
        f"{EIGHT_LANGUAGES}; Post-LN 6L-6L of dim 512 beside DeepNorm 24L-24L of dim 128, with 44.1 and 11.1 million weights "
        "without the tables, 4.0 times as many (the paper: 12B and 3.2B with them, 3.8 times). "
        f"{RATES_TEXT} Mean BLEU of all directions on Tatoeba and on 50 lines of Flores-200 for each language that both have. "
        "WMT's, OPUS's and TED's sets are not here."
    )
    rule = (
        f"{BASELINE_TRAINS} {NO_TRANSLATION} the deep model's mean BLEU is higher on both sets in every seed. Not held if the "
        "wide one's is higher on both in every seed. Otherwise it is undecided. The BLEU of the first condition is that on "
        "Tatoeba."
    )
    published = Table(
        ["BLEU", "layers", "weights", "WMT", "OPUS", "TED", "Flores"],
        [
            ["M2M-100", "48", "12B", "31.9", "18.4", "18.7", "13.6"],
            ["DeepNet", "200", "3.2B", "33.9", "23.0", "20.1", "18.6"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        config = eight_languages(lab)
        _write_flores(lab, Path(config["data"]["folder"]), config["data"]["languages"])
        config["data"]["test"] = list(SETS)
        found = best_of_models(lab, "several-sets", config, COMPARED)
        for name in COMPARED:
            for run in found[name]:
                keep(run, "sets", _mean_bleu)
        return found

    def judge(self, found: Found) -> Verdict:
        cells = named_cells({name: found[name] for name in COMPARED})
        scores = {name: _scores(found[name]) for name in COMPARED}
        why = "; ".join(f"{name}: {', '.join(map(_shown, each.values()))}" for name, each in scores.items())
        if cells[WIDE].died:
            return undecided(f"the baseline does not train; {why}")
        every = [values for each in scores.values() for values in each.values()]
        if not all(cell.ended for cell in cells.values()) or any(None in values for values in every):
            return undecided(f"some model has no scores; {why}")
        if reason := untranslated(fmean(each["test"]) for each in scores.values()):
            return undecided(f"{reason}; {why}")
        pairs = [pair for key in SETS for pair in zip(scores[WIDE][key], scores[DEEP][key], strict=True)]
        if all(deep > wide for wide, deep in pairs):
            return held(why)
        return not_held(why) if all(wide > deep for wide, deep in pairs) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [[name, *map(_shown, _scores(found[name]).values())] for name in COMPARED]
        return Table(["mean BLEU by seed", *SETS.values()], rows)


def _mean_bleu(folder: Path) -> dict[str, float]:
    """The mean BLEU of each test set over all directions."""
    found: dict[str, list[float]] = {}
    for part, entry in scores_of(folder).items():
        for name in SETS:
            if part.startswith(f"test {name}") and "value" in entry.get("bleu", {}):
                found.setdefault(name, []).append(entry["bleu"]["value"])
    return {name: fmean(values) for name, values in found.items()}


def _scores(runs: list[Run]) -> dict[str, list[Any]]:
    """The mean BLEU on each test set, by seed; None if a run has no scores."""
    return {name: [(run["sets"] or {}).get(name) for run in runs] for name in SETS}


def _shown(values: list[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.2f}" for value in values)


def _write_flores(lab: Lab, folder: Path, languages: list[str]) -> None:
    """Write the devtest set next to the training text, named by language; for the tiny form, the test set again."""
    archive = known(lab.data, "flores200/flores200_devtest.tar.xz")
    texts: dict[str, list[str]] = {}
    if archive is not None:
        with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as files:
            for member in files:
                code = Path(member.name).name.partition("_")[0]
                if member.name.endswith(".devtest") and code in languages and code not in texts:
                    content = files.extractfile(member)
                    assert content is not None
                    texts[code] = content.read().decode().splitlines()[:FLORES_LINES]
    for language in languages[1:]:
        if archive is None:
            for name in ("eng", language):
                write(folder / f"flores.eng-{language}.{name}", (folder / f"test.eng-{language}.{name}").read_bytes())
        elif language in texts:
            for name in ("eng", language):
                write(folder / f"flores.eng-{language}.{name}", "".join(f"{line}\n" for line in texts[name]))
