"""DeepNet, Table 6: masked language models on GLUE."""

from __future__ import annotations

import random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from kilolayer.data.grammar import pairs
from kilolayer.files.writing import make_folder, write
from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.stored_run import Run, died, ended, folder_of
from kilolayer.reproduce.texts import known

if TYPE_CHECKING:
    from kilolayer.reproduce.lab import Lab

RECIPES = {"post_ln": "Transformer (Post-LN)", "sub_ln": "DeepNet (Sub-LN)", "deepnorm": "DeepNorm"}
RATES = (5e-4, 1e-3)
TASKS = ("CoLA", "SST-2", "MRPC", "STS-B", "RTE")


@register
class Table6(Reproduction):
    """Pre-train at the largest learning rate that converges, then fine-tune."""

    name = "deepnet-table6"
    claim = "Post-LN diverges at the learning rate 1e-3, DeepNet (Sub-LN) does not, and is 0.7 points better on GLUE."
    setting = (
        "Masked language models of books, 12 layers, dim 128, 2,000 steps of 4,096 tokens, 800 of them for warm-up, "
        "learning rates 5e-4 and 1e-3; then "
        "CoLA, SST-2, MRPC, STS-B and RTE, three epochs at 1e-4, three seeds (the training sets of MNLI, QNLI and QQP are not "
        "here). Each recipe takes the larger rate that it survives. The paper's DeepNet is Sub-LN here."
    )
    rule = (
        "Held if Post-LN dies at the larger rate, Sub-LN lives there, and its mean over the tasks is above Post-LN's by "
        "more than two standard errors. Not held if Sub-LN dies there, or its mean is below by more than two. Otherwise "
        "it is undecided. A fine-tuning counts with its best score in validation, however it ends; without one of them, "
        "means decide nothing."
    )
    published = Table(
        ["GLUE, dev", "SST", "CoLA", "MRPC", "STS", "mean of 8"],
        [
            ["Transformer, 5e-4", "93.4", "59.8", "86.4", "89.4", "85.7"],
            ["Transformer, 1e-3", "diverged", "diverged", "diverged", "diverged", "diverged"],
            ["DeepNet, 1e-3", "93.7", "60.4", "90.2", "90.1", "86.4"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        """Returns glue: the best validation score of each seed, in percent; open: the number of fine-tunings without one."""
        known(lab.data, "nlu/glue")  # raises before any run if data are missing
        layers, recipes = (2, ("post_ln", "sub_ln")) if lab.tiny else (12, tuple(RECIPES))
        config = lab.language("masked_lm", train=lab.gentle)
        axes = {"model.recipe": recipes, "layers": (layers,), "train.lr": RATES[:1] if lab.tiny else RATES}
        runs = lab.compare("masked-language-models", config, axes)
        found: Found = {"runs": runs, "tuned": {}, "glue": {}, "open": 0}
        ends = ("finished", "no_progress") if lab.tiny else ("finished",)
        tasks: tuple[str | None, ...] = (None,) if lab.data is None else TASKS
        for recipe in recipes:
            alive = [run for run in runs if run["options"]["model.recipe"] == recipe and run["outcome"] in ends]
            if not alive:
                continue
            tuned = self._fine_tune(lab, max(alive, key=lambda run: run["options"]["train.lr"]), tasks)
            found["tuned"][recipe] = tuned
            scored = [run for run in tuned if ended(run) and run["metric"] is not None]
            found["open"] += len(tuned) - len(scored)
            found["glue"][recipe] = {
                task or "language": [run["metric"] for run in scored if run["options"].get("examples.glue") == task]
                for task in tasks
            }
        return found

    def _fine_tune(self, lab: Lab, start: Run, tasks: tuple[str | None, ...]) -> list[Run]:
        """Fine-tune in parallel, one run per task and seed; the task None is that of the tiny form."""
        examples: dict[str, Any] = {"rows": 32, "length": 128}
        if lab.data is None:
            examples = {**_languages(lab), "rows": 8, "length": 24, "first": "text"}
        else:
            examples["folder"] = str(lab.data / "nlu" / "glue")
        train = {"start_from": str(folder_of(start)), "lr": 1e-4, "epochs": 3, "save_best": False, "layers_every": 0}
        settings = [
            {**({} if task is None else {"examples.glue": task}), "train.seed": seed}
            for task in tasks
            for seed in ((1,) if lab.tiny else (1, 2, 3))
        ]
        name = f"glue-{start['options']['model.recipe']}-{start['options']['train.lr']:g}"
        return lab.compare_settings(name, {"task": "classify", "examples": examples, "train": train}, settings)

    def judge(self, found: Found) -> Verdict:
        larger = {
            run["options"]["model.recipe"]: run
            for run in found["runs"]
            if run["options"]["train.lr"] == max(each["options"]["train.lr"] for each in found["runs"])
        }
        plain, ours = larger["post_ln"], larger["sub_ln"]
        why = f"at the larger rate: Post-LN {plain['text']}, Sub-LN {ours['text']}"
        if died(ours):
            return not_held(why)
        mine, theirs = (_mean(found["glue"].get(recipe, {})) for recipe in ("sub_ln", "post_ln"))
        if not (ended(ours) and ended(plain)) or found["open"] or mine is None or theirs is None:
            return undecided(why)
        gain, apart = mine[0] - theirs[0], 2 * (mine[1] ** 2 + theirs[1] ** 2) ** 0.5
        why += f"; GLUE {mine[0]:.1f} ± {mine[1]:.1f} against {theirs[0]:.1f} ± {theirs[1]:.1f}"
        if gain < -apart:
            return not_held(why)
        return held(why) if died(plain) and gain > apart else undecided(why)

    def numbers(self, found: Found) -> Table:
        tasks = list(next(iter(found["glue"].values()), {}))
        rows = []
        for recipe, scores in found["glue"].items():
            mean = _mean(scores)
            cells = [f"{fmean(scores[task]):.1f}" if scores[task] else "-" for task in tasks]
            rows.append([RECIPES[recipe], *cells, "-" if mean is None else f"{mean[0]:.1f}"])
        rows += [
            [f"{RECIPES[run['options']['model.recipe']]} at {run['options']['train.lr']:g}: pre-training {run['text']}"]
            + [""] * (len(tasks) + 1)
            for run in found["runs"]
        ]
        return Table(["validation sets, percent", *tasks, "mean"], rows)


def _mean(scores: dict[str, list[float]]) -> tuple[float, float] | None:
    """The mean over tasks, and its standard error over seeds; None if a task has fewer than two seeds."""
    if not scores or any(len(each) < 2 for each in scores.values()):
        return None
    errors = [stdev(each) / len(each) ** 0.5 for each in scores.values()]
    return fmean(fmean(each) for each in scores.values()), sum(error**2 for error in errors) ** 0.5 / len(errors)


def _languages(lab: Lab) -> dict[str, str]:
    """Sentences of the embedded corpus, each with its language."""
    folder = lab.folder.parent / "text" / "languages"
    make_folder(folder)
    rows = [row for english, german in pairs(80, seed=3, unseen=False) for row in ((english, "en"), (german, "de"))]
    random.Random(1).shuffle(rows)
    for part, chosen in (("train", rows[:100]), ("valid", rows[100:])):
        write(folder / f"{part}.tsv", "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in chosen))
    return {part: str((folder / f"{part}.tsv").resolve()) for part in ("train", "valid")}
