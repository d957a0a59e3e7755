"""DeepNet, Table 10: masked image modelling, then classification, robustness and segmentation."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from kilolayer.report.table import Table
from kilolayer.reproduce.base import Found, Reproduction, Verdict, held, not_held, register, undecided
from kilolayer.reproduce.stored_run import Run, ended, folder_of, keep, scores_of

if TYPE_CHECKING:
    from pathlib import Path

    from kilolayer.reproduce.lab import Lab

RECIPES = {"pre_ln": "ViT (Pre-LN)", "sub_ln": "DeepNet (Sub-LN)", "deepnorm": "DeepNorm"}
LAYERS = (12, 24)
RATES, SEEDS = (5e-4, 1e-3, 2e-3), (1, 2, 3)
CORRUPTED = 2000
"""Test images that are corrupted."""
STAGES = {"segmented": ("segmentation",), "classified": ("top-1", "corrupted", "sketch")}
"""What follows the pre-training, and the columns that it gives."""
MEASURES = {
    "segmentation": "CamVid, mean IoU",
    "top-1": "CIFAR-10, top-1",
    "corrupted": "corrupted, top-1",
    "sketch": "sketches, top-1",
}


@register
class Table10(Reproduction):
    """Pre-train on the codes of hidden patches, then fine-tune on labels and on label images."""

    name = "deepnet-table10"
    claim = (
        "After masked image modelling, DeepNet (Sub-LN) is better than ViT at 12 and at 24 layers: in classification, "
        "by more on images of other kinds, and in segmentation."
    )
    setting = (
        "CIFAR-10 for ImageNet, 32 pixels, patches of 4, dim 192: one tokenizer of 1,024 codes; 50 epochs of masked images "
        "(40% in blocks) at the best of three or more learning rates by factors of 2; then 30 epochs of classification, and 60 "
        "epochs of segmentation of CamVid (144 x 192 pixels, UperNet) for ADE20k, each at the best rate on validation images "
        "(5,000 of CIFAR-10's training images), three seeds. For ImageNet-A and -R, fifteen corruptions at five strengths; for "
        "ImageNet-Sketch, drawn edges; 2,000 test images. The paper's DeepNet is Sub-LN here."
    )
    rule = (
        "The mean of a model is that over the four columns, segmentation included, which the paper's mean leaves out. Held if "
        "Sub-LN's is above Pre-LN's by more than two standard errors over seeds at both depths. Not held if it is below by "
        "more than two at either. Otherwise it is undecided."
    )
    published = Table(
        ["", "layers", "ADE20k", "ImageNet", "-A", "-R", "-Sketch", "mean of ImageNet"],
        [
            ["ViT", "12", "51.4", "84.5", "45.9", "55.6", "42.2", "57.1"],
            ["DeepNet", "12", "52.2", "84.9", "48.9", "57.7", "43.9", "58.9"],
            ["ViT", "24", "54.2", "86.2", "60.1", "63.2", "48.5", "64.5"],
            ["DeepNet", "24", "54.6", "86.8", "65.4", "67.5", "52.0", "67.9"],
        ],
    )

    def measure(self, lab: Lab) -> Found:
        """Returns a list of cells: recipe, layers, and the runs of each stage."""
        (tokenizer,) = lab.compare_settings("image-tokenizer", lab.images("image_tokenizer"), [{"train.seed": 1}])
        found: Found = {"tokenizer": tokenizer, "cells": []}
        for layers in (2,) if lab.tiny else LAYERS:
            for recipe in list(RECIPES)[:2] if lab.tiny else RECIPES:
                found["cells"].append(self._cell(lab, recipe, layers, tokenizer))
        return found

    def _cell(self, lab: Lab, recipe: str, layers: int, tokenizer: Run) -> dict[str, Any]:
        from kilolayer.reproduce.sweep import at_best_rate

        own = {"model.recipe": recipe, "layers": layers}
        cell: dict[str, Any] = {"recipe": recipe, "layers": layers}
        masked = lab.images("masked_image", target={"tokenizer": str(folder_of(tokenizer))})
        cell["masked"] = at_best_rate(lab, "masked-images", masked, [own], RATES, SEEDS[:1])
        if not all(map(ended, cell["masked"]["runs"])) or not cell["masked"]["runs"]:
            return cell
        start = {"start_from": str(folder_of(cell["masked"]["runs"][0]))}
        for stage, config in (
            ("classified", lab.images("classify_image", train=start)),
            ("segmented", lab.street_images(train=start)),
        ):
            cell[stage] = at_best_rate(lab, f"{stage}-{recipe}-{layers}", config, [own], RATES, SEEDS)
        for run in cell["classified"]["runs"]:
            _keep_top1(run, 24 if lab.tiny else CORRUPTED)
        for run in cell["segmented"]["runs"]:
            _keep_iou(run)
        return cell

    def judge(self, found: Found) -> Verdict:
        means = {(cell["recipe"], cell["layers"]): _mean(cell) for cell in found["cells"]}
        depths = sorted({cell["layers"] for cell in found["cells"]})
        texts, signs = [], []
        for layers in depths:
            ours, theirs = means[("sub_ln", layers)], means[("pre_ln", layers)]
            if ours is None or theirs is None:
                texts.append(f"{layers}L: a model has no result")
                signs.append(0)
                continue
            texts.append(f"{layers}L: Sub-LN {ours[0]:.1f} ± {ours[1]:.1f}, Pre-LN {theirs[0]:.1f} ± {theirs[1]:.1f}")
            gain, apart = ours[0] - theirs[0], 2 * math.hypot(ours[1], theirs[1])
            signs.append(0 if math.isnan(apart) else (gain > apart) - (gain < -apart))
        why = "mean of the columns, " + "; ".join(texts)
        if min(signs) < 0:
            return not_held(why)
        return held(why) if min(signs) > 0 and set(depths) == set(LAYERS) else undecided(why)

    def numbers(self, found: Found) -> Table:
        rows = []
        for cell in found["cells"]:
            scores, mean = _scores(cell), _mean(cell)
            shown = [f"{fmean(scores[key]):.1f}" if scores.get(key) else "-" for key in MEASURES]
            rows.append([RECIPES[cell["recipe"]], str(cell["layers"]), *shown, "-" if mean is None else f"{mean[0]:.1f}"])
        return Table(["percent", "layers", *MEASURES.values(), "mean"], rows)


def _keep_top1(run: Run, most: int) -> None:
    """Add the accuracies of a classifier to its run, as they are on test images, on corrupted ones and on sketches."""
    keep(run, "top-1", lambda folder: _score(folder, "accuracy"))
    errors = None if run["top-1"] is None else keep(run, "errors", lambda folder: _errors(folder, most))
    if errors is not None:
        run["corrupted"], run["sketch"] = (100 - errors[key] for key in ("mean_corruption_error", "sketch"))


def _errors(folder: Path, most: int) -> dict[str, Any]:
    from kilolayer.runs.load import load

    classifier: Any = load(folder)
    return classifier.corruptions(most=most).table()


def _keep_iou(run: Run) -> None:
    keep(run, "segmentation", lambda folder: _score(folder, "mean_iou"))


def _score(folder: Path, key: str) -> float | None:
    """A score on the test set; None for a run that diverged or has not ended."""
    return scores_of(folder).get("test", {}).get(key, {}).get("value")


def _scores(cell: dict[str, Any]) -> dict[str, list[float]]:
    """By column, the score of each seed of the best rate, in percent; seeds without one are left out."""
    runs = [run for stage in STAGES for run in cell.get(stage, {}).get("runs", ())]
    return {key: [run[key] for run in runs if run.get(key) is not None] for key in MEASURES}


def _mean(cell: dict[str, Any]) -> tuple[float, float] | None:
    """The mean over the columns, and its standard error over seeds; None if a seed has no score yet."""
    total, variance = 0.0, 0.0
    for stage, columns in STAGES.items():
        seeds = [[run.get(key) for key in columns] for run in cell.get(stage, {}).get("runs", ())]
        if not seeds or any(value is None for values in seeds for value in values):
            return None
        # The columns of one classifier move together, so they are summed before seeds are compared.
        sums = [sum(values) for values in seeds]
        total += fmean(sums)
        variance += stdev(sums) ** 2 / len(sums) if len(sums) > 1 else math.nan
    return total / len(MEASURES), math.sqrt(variance) / len(MEASURES)
