"""Very Deep Transformers, Table 4: deep models with back-translation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.data.text import read_lines
from kilolayer.errors import InputError
from kilolayer.files.writing import write
from kilolayer.report.table import Table
from kilolayer.reproduce.admin_table3 import ADMIN, DEFAULT, SETTING, training
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.cells import is_lower, named_cells
from kilolayer.reproduce.stored_run import died, folder_of

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

MONOLINGUAL = 40_000
"""Number of French sentences whose English side is back-translated."""


@register
class Table4(Reproduction):
    """6L-6L and 24L-12L, without and with back-translated sentences."""

    name = "admin-table4"
    claim = "Back-translation gains for a deep Admin model too, and the deep model stays ahead of the shallow one."
    setting = (
        f"{SETTING}. A quarter of the pairs is the text, of the others the French side alone is known, and a 6L-6L model of "
        "French to English, trained on the quarter, translates 40,000 of them, spread over all lengths, by sampling, as in the "
        "cited Edunov et al. 2018. "
        "Admin at 24L-12L (for 60L-12L) and Post-LN at 6L-6L; synthetic sources carry the tag <bt>."
    )
    rule = (
        "Undecided if the model that translates back dies or does not read its source. Else held if with back-translation the "
        "deep model is clearly lower in validation loss (two standard errors and 0.02 nats) than without, and than the shallow "
        "one with it. Not held if back-translation makes it clearly higher, or the shallow one with it is clearly lower. "
        "Otherwise it is undecided."
    )
    published = Table(
        ["WMT-14 En-Fr", "BLEU"],
        [
            ["36L-12L, dim 768, Admin, back-translation", "46.4"],
            ["60L-12L Admin, back-translation", "46.0"],
            ["big 6L-6L, back-translation (Edunov et al. 2018)", "45.6"],
            ["60L-12L Admin", "43.8"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        text = self._text(lab)
        back = lab.translation("fra", model={"recipe": DEFAULT}, train=training(lab))
        back["data"] |= {"folder": str(text), "train": ["quarter"]}
        back["data"].pop("test")
        layers, deep, seeds = (1, "2-1", (1,)) if lab.tiny else (6, "24-12", (1, 2))
        (backward,) = lab.compare("back-translator", back, {"layers": (layers,), "train.seed": (1,)})
        if backward["outcome"] in ("waiting", "unfinished"):
            raise InputError(
                "the time ran out before the back-translation model was trained",
                where=str(folder_of(backward)),
                fix="run the same command again to continue",
            )
        found: Found = {"backward": backward, "forward": {}}
        if died(backward):
            return found
        if folder_of(backward).is_dir():
            self._translate(text, folder_of(backward), 60 if lab.tiny else MONOLINGUAL)
        for name, (recipe, depth) in {"shallow": (DEFAULT, f"{layers}-{layers}"), "deep": (ADMIN, deep)}.items():
            for synthetic in (False, True):
                config = self._forward(lab, text, synthetic)
                config["model"] |= {"recipe": recipe}
                folder = f"back-translation-{name}{'-bt' if synthetic else ''}"
                key = f"{name}, {'with' if synthetic else 'without'} back-translation"
                found["forward"][key] = lab.compare(folder, config, {"layers": (depth,), "train.seed": seeds})
        return found

    def _text(self, lab: Lab) -> Path:
        """The folder of the text, with a quarter of the pairs and the monolingual French side."""
        lab.translation("fra")  # writes the whole corpus
        folder = (lab.folder.parent / "text" / "fra").resolve()
        sides = {name: list(read_lines(folder / f"train.{name}")) for name in ("eng", "fra")}
        if not (folder / "lonely.fra").exists():  # the file that is written last
            for name, lines in sides.items():
                write(folder / f"quarter.{name}", "".join(f"{line}\n" for line in lines[::4]))
            others = [line for index, line in enumerate(sides["fra"]) if index % 4]
            write(folder / "lonely.fra", "".join(f"{line}\n" for line in others))
        return folder

    def _translate(self, text: Path, run: Path, most: int) -> None:
        """Sample sampled.eng, the source of sampled.fra, unless they exist."""
        if (text / "sampled.eng").exists():
            return
        every = list(read_lines(text / "lonely.fra"))
        count = min(most, len(every))
        lines = [every[index * len(every) // count] for index in range(count)]  # the corpus is sorted by length
        source = "".join(f"{line}\n" for line in lines)
        command = [sys.executable, "-m", "kilolayer", "translate", str(run), "--temperature", "1"]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError("the French sentences could not be translated", where=str(run), fix=done.stderr.strip()[-500:])
        write(text / "sampled.fra", source)
        write(text / "sampled.eng", done.stdout)

    def _forward(self, lab: Lab, text: Path, synthetic: bool) -> dict[str, Any]:
        config = lab.translation("fra", into_english=False, train=training(lab))
        config["data"] |= {"folder": str(text), "train": ["quarter"], **({"synthetic": ["sampled"]} if synthetic else {})}
        return config

    def judge(self, found: Found) -> Verdict:
        if died(found["backward"]):
            return undecided(f"the model that translates back: {found['backward']['text']}")
        cells = named_cells(found["forward"])
        shallow_bt, deep, deep_bt = list(cells.values())[1:]
        why = "; ".join(f"{name} {cell.shown}" for name, cell in cells.items())
        if is_lower(deep, deep_bt) or is_lower(shallow_bt, deep_bt):
            return not_held(why)
        return held(why) if is_lower(deep_bt, deep) and is_lower(deep_bt, shallow_bt) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = [[name, cell.shown] for name, cell in named_cells(found["forward"]).items()]
        return Table(["", "validation loss (BLEU)"], rows)
