"""DeepNet, Table 5: deep and narrow against shallow and wide, on several test sets."""

from __future__ import annotations

import lzma
import tarfile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kilolayer.files.reading import read_json
from kilolayer.files.writing import write
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.deepnet_table4 import model_of
from kilolayer.reproduce.texts import known

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

SETS = {"test": "Tatoeba", "flores": "Flores-200"}
COMPARED = ("Post-LN 6L-6L, dim 256", "DeepNorm 24L-24L, dim 128")
FLORES_LINES = 50


@register
class Table5(Reproduction):
    """The models of Table 4, scored on the text that they were trained for and on Flores."""

    name = "deepnet-table5"
    claim = "A deep and narrow model beats a shallow and wide one of four times its size on all of four test sets."
    setting = (
        "31 languages to and from English, Tatoeba; Post-LN 6L-6L of dim 256 beside DeepNorm 24L-24L of dim 128, of equal size "
        "(the paper: 12B against 3.2B weights); 2,000 steps, learning rate 5e-4 after 800, two seeds; mean BLEU of all "
        "directions on Tatoeba and on 50 lines of Flores-200 for each language that both have. WMT's, OPUS's and TED's sets "
        "are not here."
    )
    rule = (
        "Held if the deep model's mean BLEU is higher on both sets in every seed. Not held if the shallow one's is higher "
        "on both in every seed. Otherwise it is undecided."
    )
    published = Table(
        ["BLEU", "layers", "weights", "WMT", "OPUS", "TED", "Flores"],
        [
            ["M2M-100", "48", "12B", "31.9", "18.4", "18.7", "13.6"],
            ["DeepNet", "200", "3.2B", "33.9", "23.0", "20.1", "18.6"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        found: Found = {}
        for name in COMPARED:
            config = lab.multilingual(train=lab.gentle)
            _write_flores(lab, Path(config["data"]["folder"]), config["data"]["languages"])
            config["data"]["test"] = list(SETS)
            config["model"] |= model_of(name, lab.tiny)
            folder = "several-sets-" + "".join(letter if letter.isalnum() else "-" for letter in name)
            runs = lab.compare(folder, config, {"train.seed": (1,) if lab.tiny else (1, 2)})
            found[name] = {key: [_mean_bleu(Path(run["folder"]), key) for run in runs] for key in SETS}
        return found

    def judge(self, found: Found) -> Verdict:
        wide, deep = (found[name] for name in COMPARED)
        pairs = [(a, b) for key in SETS for a, b in zip(wide[key], deep[key], strict=True)]
        why = "; ".join(f"{name}: {', '.join(map(_shown, (found[name][key] for key in SETS)))}" for name in COMPARED)
        if not pairs or any(None in pair for pair in pairs):
            return undecided(f"some model has no scores; {why}")
        if all(b > a for a, b in pairs):
            return held(why)
        return not_held(why) if all(a > b for a, b in pairs) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [[name, *(_shown(found[name][key]) for key in SETS)] for name in COMPARED]
        return Table(["mean BLEU", *SETS.values()], rows)


def _mean_bleu(folder: Path, name: str) -> float | None:
    """The mean BLEU of one test set over all directions."""
    path = folder / "scores.json"
    scores: dict[str, Any] = read_json(path) if path.exists() else {}
    found = [
        entry["bleu"]["value"]
        for part, entry in scores.items()
        if part.startswith(f"test {name}") and "value" in entry.get("bleu", {})
    ]
    return fmean(found) if found else None


def _shown(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return ", ".join(f"{value:.2f}" for value in known) or "-"


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
