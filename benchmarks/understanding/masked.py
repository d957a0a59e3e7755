"""Masked language models by recipe and learning rate: the largest rate that each survives, and its loss there.

    python benchmarks/understanding/masked.py sweep OUT     # every recipe at every rate, few steps
    python benchmarks/understanding/masked.py train OUT     # each recipe at its best rate of the sweep, more steps

KILOLAYER_DATA is the folder with the books. Each stage is a comparison in --work, best run under nvidia-cuda-mps-control; it
writes masked-sweep.json or masked-train.json to OUT. The runs of `train`, in --work/train/runs, can be fine-tuned with glue.py.
Options of `kilolayer train` (--model.dim 16) apply to all runs.

    python benchmarks/understanding/masked.py table OUT     # both as masked.md

A run has learned if its loss is finite and 0.5 nats below that of predicting token frequencies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from single_runs import Setting, hardware, row_of, train_all  # noqa: E402

from kilolayer.compare.result import Result  # noqa: E402
from kilolayer.report.record import read_record  # noqa: E402

RECIPES = ("post_ln", "pre_ln", "normformer", "sub_ln", "deepnorm")
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
STEPS = {"sweep": 1500, "train": 6000}
LEARNED = 0.5  # nats
WARMUP = 0.08  # fraction of the steps, as in the authors' release: 10,000 of 125,000


def best_rates(path: Path, recipes: Sequence[str]) -> dict[str, float]:
    """The learning rate of each recipe's lowest validation loss in the sweep, averaged over seeds."""
    runs = json.loads(path.read_text())["runs"].values()
    best: dict[str, float] = {}
    for recipe in recipes:
        rates = {run["rate"] for run in runs if run["recipe"] == recipe}
        means = {rate: fmean(lowest(run) for run in runs if (run["recipe"], run["rate"]) == (recipe, rate)) for rate in rates}
        if not any(map(math.isfinite, means.values())):
            raise SystemExit(f"no run of {recipe} in {path} has a finite loss at every seed: leave it out of --recipes")
        best[recipe] = min(means, key=lambda rate: means[rate])
    return best


def lowest(run: dict[str, Any]) -> float:
    return min((row["loss"] for row in run.get("valid") or [] if row["loss"] is not None), default=math.inf)


def last_loss(run: dict[str, Any]) -> float:
    """The last validation loss; NaN if there is none, or it is not finite."""
    found = run["valid"][-1]["loss"] if run.get("valid") else None
    return math.nan if found is None else found


def unigram_loss(results: Sequence[Result]) -> float:
    """The entropy of the token frequencies in the training text, in nats per token, as recorded by the runs."""
    rows = [row for result in results for row in read_record(result.folder).reference if result.train]
    return rows[0]["frequency_loss"]


def learns(run: dict[str, Any], unigram: float) -> bool:
    """Whether a run has learned more than token frequencies."""
    return last_loss(run) < unigram - LEARNED


def table(out: Path) -> str:
    """Both stages as Markdown."""
    sweep, final = (json.loads((out / f"masked-{stage}.json").read_text()) for stage in STEPS)
    unigram, runs = sweep["unigram_loss"], sweep["runs"].values()
    rates = sorted({run["rate"] for run in runs})
    tried, long = (max(run["steps"] for run in document["runs"].values()) for document in (sweep, final))
    lines = [
        f"Validation loss, nats per masked token, after {tried:,} steps by learning rate, and after {long:,} at the best one.",
        f"Unigram loss: {unigram:.2f}. In brackets: not {LEARNED} below that.",
        "",
        "| recipe | " + " | ".join(f"{rate:g}" for rate in rates) + f" | best, {long:,} steps | accuracy |",
        "|---" * (len(rates) + 3) + "|",
    ]
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        own = [[run for run in runs if (run["recipe"], run["rate"]) == (recipe, rate)] for rate in rates]
        long_runs = [run for run in final["runs"].values() if run["recipe"] == recipe]
        accuracies = [run["valid"][-1]["accuracy"] for run in long_runs if math.isfinite(last_loss(run))]
        cells = [shown(each, unigram) for each in (*own, long_runs)]
        lines.append(f"| {recipe} | {' | '.join(cells)} | {f'{fmean(accuracies):.1f}%' if accuracies else '-'} |")
    return "\n".join([*lines, ""])


def shown(runs: Sequence[dict[str, Any]], unigram: float) -> str:
    """The mean loss over the seeds of one setting, in brackets unless all of them have learned."""
    if not runs:
        return "-"
    loss = fmean(map(last_loss, runs))
    text = f"{loss:.2f}" if math.isfinite(loss) else "diverged or unfinished"
    return text if all(learns(run, unigram) for run in runs) else f"({text})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Masked language models by recipe and learning rate.")
    parser.add_argument("stage", choices=(*STEPS, "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--parallel", type=int, default=13)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--work", type=Path, default=Path("runs/masked"))
    chosen, others = parser.parse_known_args()
    if chosen.stage == "table":
        (chosen.out / "masked.md").write_text(table(chosen.out))
        return
    steps = chosen.steps or STEPS[chosen.stage]
    if chosen.stage == "sweep":
        wanted = [(recipe, rate, seed) for recipe in chosen.recipes for rate in chosen.rates for seed in chosen.seeds]
    else:
        best = best_rates(chosen.out / "masked-sweep.json", chosen.recipes)
        wanted = [(recipe, best[recipe], seed) for recipe in chosen.recipes for seed in chosen.seeds]
    names = {f"{recipe}-lr{rate:g}-seed{seed}": (recipe, rate, seed) for recipe, rate, seed in wanted}
    settings: dict[str, Setting] = {
        name: {"model.recipe": recipe, "train.lr": rate, "train.seed": seed} for name, (recipe, rate, seed) in names.items()
    }
    books = Path(os.environ["KILOLAYER_DATA"]) / "books"
    options: dict[str, Any] = {f"text.{part}": str(books / f"{part}.jsonl.xz") for part in ("train", "valid", "test")}
    options |= {"train.steps": steps, "train.warmup_steps": round(WARMUP * steps)}
    config, work = HERE / "masked.toml", chosen.work / chosen.stage
    results = train_all(work, config, settings, chosen.seconds, chosen.parallel, options, others)
    runs = {
        name: {"recipe": recipe, "rate": rate, "seed": seed, **row_of(results[name])}
        for name, (recipe, rate, seed) in names.items()
    }
    unigram = unigram_loss(list(results.values()))
    document = {
        "command": " ".join(["python benchmarks/understanding/masked.py", *sys.argv[1:]]),
        "hardware": hardware(),
        "text": "books",
        "unigram_loss": unigram,
        "runs": runs,
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"masked-{chosen.stage}.json").write_text(json.dumps(document, indent=1) + "\n")
    for name, run in runs.items():
        print(name, run["outcome"], "valid", f"{lowest(run):.3f}", "learned", learns(run, unigram), flush=True)


if __name__ == "__main__":
    main()
