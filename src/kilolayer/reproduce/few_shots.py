"""The common part of DeepNet's Tables 7, 8 and 9: language models of different depths, evaluated with k-shot prompts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from kilolayer.errors import InputError
from kilolayer.files.writing import make_folder, write
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, undecided
from kilolayer.reproduce.cells import Cell, grid_of
from kilolayer.reproduce.stored_run import keep

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

RECIPES = {"pre_ln": "GPT-2 (Pre-LN)", "normformer": "NormFormer", "sub_ln": "DeepNet (Sub-LN)", "deepnorm": "DeepNorm"}
SETS = ("winogrande", "winograd_wsc273", "hellaswag")
OTHERS = ("pre_ln", "normformer")
QUESTIONS = 1500
GONE: dict[str, Any] = {"text": "its folder is gone", "sets": {}}


class FewShots(Reproduction):
    """shots: the number of solved examples before each question."""

    setting = (
        "Language models of books, dim 128, 1,000 steps of 4,096 tokens, learning rate 5e-4 or 1e-3, 12, 24 and 48 layers, one "
        "seed (the paper: GPT-3 Medium's width, 24, 48 and 72 layers); accuracy on the first 1,500 questions of Winogrande, "
        "Winograd and HellaSwag (StoryCloze is not free). The paper's DeepNet is Sub-LN here."
    )
    rule = (
        "Held if at every depth Sub-LN's mean accuracy is above Pre-LN's and NormFormer's, and the difference from Pre-LN "
        "at the greatest depth exceeds two standard errors. Not held if Pre-LN or NormFormer is above by more than two "
        "standard errors at the greatest depth. Otherwise, and where all three are within two standard errors of chance at the "
        "greatest depth, it is undecided."
    )
    shots: ClassVar[int]
    excepted: ClassVar[tuple[tuple[str, int], ...]] = ()
    """Recipes and indices of depths at which the claim does not set Sub-LN above the recipe."""

    def measure(self, lab: Lab) -> Found:
        axes: dict[str, Any] = {"model.recipe": tuple(RECIPES), "layers": (12, 24, 48), "train.lr": (5e-4, 1e-3)}
        if lab.tiny:
            axes = {"model.recipe": ("pre_ln", "normformer", "sub_ln"), "layers": (1,)}
        folder = _questions(lab)
        runs = lab.compare("language-models", lab.language(), axes)
        grid = grid_of(runs, "model.recipe", "layers")
        asked = {
            recipe: {str(layers): self._evaluate(cell, folder, lab) for layers, cell in cells.items()}
            for recipe, cells in grid.items()
        }
        return {"runs": runs, "asked": asked}

    def _evaluate(self, cell: Cell, folder: Path, lab: Lab) -> dict[str, Any]:
        """The accuracies of one run by test set, with standard error and chance level; empty if the run did not survive."""
        if not cell.lives and not (lab.tiny and cell.ended):
            return {"text": cell.shown, "sets": {}}
        return keep(cell.runs[0], f"asked after {self.shots}", lambda run: self._ask(run, folder, lab)) or GONE

    def _ask(self, run: Path, folder: Path, lab: Lab) -> dict[str, Any]:
        sets = SETS[2:] if lab.tiny else SETS
        words = ["--tasks", ",".join(sets), "--shots", str(self.shots), "--examples", str(folder), "--limit", str(QUESTIONS)]
        command = [sys.executable, "-m", "kilolayer", "evaluate", str(run), *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError("a model could not be asked", where=str(run), fix=done.stderr.strip()[-500:])
        first: dict[str, Any] = {}
        for score in json.loads(done.stdout):
            first.setdefault(score["task"], {key: score[key] for key in ("value", "standard_error", "chance", "signature")})
        return {"text": "", "sets": first}

    def judge(self, found: Found) -> Verdict:
        asked = {recipe: [_mean(each) for each in by_depth.values()] for recipe, by_depth in found["asked"].items()}
        ours = asked["sub_ln"]
        others = [asked[recipe] for recipe in OTHERS]
        if any(mean is None for row in (ours, *others) for mean in row):
            return undecided("some model did not live to the end, or not every learning rate has")
        last, rest = ours[-1], [row[-1] for row in others]
        assert last is not None
        gains = [(last[0] - mean[0], math.hypot(last[1], mean[1])) for mean in rest if mean is not None]
        beside = ", ".join(f"{gain:+.1%} ± {error:.1%}" for gain, error in gains)
        why = f"at the greatest depth Sub-LN has {last[0]:.1%}, against Pre-LN and NormFormer {beside}"
        if all(_is_at_chance(list(found["asked"][recipe].values())[-1]) for recipe in ("sub_ln", *OTHERS)):
            return undecided(f"all three are at chance; {why}")
        if any(gain < -2 * error for gain, error in gains):
            return not_held(why)
        above = all(
            mine[0] > other[0]
            for recipe in OTHERS
            for index, (mine, other) in enumerate(zip(ours, asked[recipe], strict=True))
            if mine and other and (recipe, index) not in self.excepted
        )
        against_plain, error = gains[0]
        return held(why) if above and against_plain > 2 * error else undecided(why)

    def numbers(self, found: Found) -> Table:
        sets = next((list(each["sets"]) for row in found["asked"].values() for each in row.values() if each["sets"]), [])
        rows = []
        for recipe, by_depth in found["asked"].items():
            for layers, each in by_depth.items():
                cells = [
                    f"{100 * each['sets'][name]['value']:.1f} ± {100 * each['sets'][name]['standard_error']:.1f}"
                    if name in each["sets"]
                    else each["text"]
                    for name in sets
                ]
                mean = _mean(each)
                rows.append([f"{RECIPES[recipe]}, {layers} layers", *cells, "-" if mean is None else f"{100 * mean[0]:.1f}"])
        chance = next((each["sets"] for row in found["asked"].values() for each in row.values() if each["sets"]), {})
        rows.append(["chance", *(f"{100 * chance[name]['chance']:.1f}" for name in sets), ""])
        return Table([f"accuracy in percent, {self.shots} shots", *sets, "mean"], rows)


def _mean(each: dict[str, Any]) -> tuple[float, float] | None:
    """The mean accuracy over the test sets, and its standard error."""
    scores = list(each["sets"].values())
    if not scores:
        return None
    errors = [score["standard_error"] or 0.0 for score in scores]
    return fmean(score["value"] for score in scores), sum(error**2 for error in errors) ** 0.5 / len(errors)


def _is_at_chance(each: dict[str, Any]) -> bool:
    """Whether the mean accuracy is within two standard errors of what guessing gives."""
    mean, chance = _mean(each), fmean(score["chance"] for score in each["sets"].values())
    return mean is not None and abs(mean[0] - chance) <= 2 * mean[1]


def _questions(lab: Lab) -> Path:
    """The folder of the test sets; for the tiny form, a few sentences of the embedded corpus in HellaSwag's format."""
    from kilolayer.reproduce.texts import known

    if (real := known(lab.data, "nlu/zeroshot")) is not None:
        return real
    folder = lab.folder.parent / "text" / "questions"
    make_folder(folder)
    from kilolayer.data.grammar import pairs

    sentences = [english.split() for english, _ in pairs(200, seed=2, unseen=False)]
    long = [words for words in sentences if len(words) > 4][:40]
    rows = []
    for start in range(0, len(long) - 3, 4):
        endings = [" ".join(words[3:]) for words in long[start : start + 4]]
        begin = " ".join(long[start][:3])
        rows.append({"activity_label": "text", "ctx_a": begin, "ctx_b": "", "endings": endings, "label": "0"})
    write(folder / "hellaswag.val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder
