"""Does depth help small language models? 12 to 96 layers on the books; Pre-LN, Sub-LN, DeepNorm, each at its best rate.

    python benchmarks/depth/language.py train OUT --family fixed     # every depth, recipe and learning rate at one width
    python benchmarks/depth/language.py train OUT --family equal     # the same with equal parameters: deeper and narrower
    python benchmarks/depth/language.py train OUT --rates best --seeds 2 3
    python benchmarks/depth/language.py speed OUT                    # step times, each model alone on the GPU
    python benchmarks/depth/language.py even OUT --family fixed      # shallower models for the same time as the deepest
    python benchmarks/depth/language.py shots OUT                    # questions after zero, one and four examples
    python benchmarks/depth/language.py table OUT                    # OUT/language.md and OUT/language.svg

KILOLAYER_DATA is the folder with books and nlu/zeroshot. All runs form one comparison in --work, best run under
nvidia-cuda-mps-control; repeating a command continues it. Each stage adds to OUT/language.json. Options of `kilolayer train`
(--model.dim 16) apply to all runs.

Because runs share the GPU, their own times are meaningless: the table's seconds are steps times the step time that `speed`
measures, and its FLOPs are steps times those of `kilolayer plan`. The learning rate rises over the first 5% of the steps, stays
constant, and falls to 0 over the last 20%. Before the decay, losses are about those of a run of any length at that step, so
depths are compared there at equal steps, seconds and FLOPs; final losses are compared at equal steps (`train`) and at equal
seconds (`even`). Divergence is recorded as a result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from single_runs import hardware, row_of, train_all, words_of  # noqa: E402

LAYERS = (12, 24, 48, 96)
WIDTHS = {  # dim and FFN width; 64 per head
    "fixed": dict.fromkeys(LAYERS, (256, 1024)),
    "equal": {12: (512, 2048), 24: (384, 1280), 48: (256, 1024), 96: (192, 640)},  # 38M parameters without embeddings
}
RECIPES = ("pre_ln", "sub_ln", "deepnorm")
RATES = (1e-3, 2e-3, 4e-3)
STEPS, WARMUP, FALL = 800, 0.05, 0.2
POINTS = 20  # validations per run
TASKS = "winogrande,winograd_wsc273,hellaswag,copa,piqa"


@dataclass(frozen=True)
class Wanted:
    """The settings of one run."""

    layers: int
    dim: int
    ffn_dim: int
    recipe: str
    rate: float
    steps: int
    seed: int

    @property
    def model(self) -> str:
        return f"{self.layers}L-d{self.dim}-{self.recipe}"

    @property
    def name(self) -> str:
        return f"{self.model}-lr{self.rate:g}-{self.steps}-seed{self.seed}"

    @property
    def setting(self) -> dict[str, Any]:
        width = {"model.dim": self.dim, "model.ffn_dim": self.ffn_dim, "model.heads": self.dim // 64}
        options: dict[str, Any] = {"model.recipe": self.recipe, "layers": self.layers, **width, "train.lr": self.rate}
        options |= {"train.steps": self.steps, "train.warmup_steps": round(WARMUP * self.steps)}
        options |= {"train.decay_steps": round(FALL * self.steps), "train.valid_every": max(1, self.steps // POINTS)}
        return options | {"train.seed": self.seed}


def wanted_of(run: dict[str, Any]) -> Wanted:
    """The settings of a run in language.json."""
    return Wanted(**{name: run[name] for name in Wanted.__dataclass_fields__})


def final_loss(run: dict[str, Any]) -> float:
    """The loss of the validation after the last step; infinite if a run did not get there."""
    last = run["valid"][-1] if run.get("valid") else {"step": 0, "loss": None}
    return math.inf if last["step"] < run["steps"] or last["loss"] is None else last["loss"]


def state_of(run: dict[str, Any]) -> str:
    """The state of a run: finished, diverged or unfinished."""
    if run["outcome"].startswith("diverged"):
        return "diverged"
    return "finished" if math.isfinite(final_loss(run)) else "unfinished"


def best_runs(runs: dict[str, dict[str, Any]], steps: int | None = None) -> dict[str, dict[str, Any]]:
    """By model, the run with the lowest final loss among those of `steps` steps; by default, of the model's smallest number of
    steps.

    Only first seeds are considered; the others show how far that choice can be trusted.
    """
    best: dict[str, dict[str, Any]] = {}
    for model in dict.fromkeys(run["model"] for run in runs.values()):
        own = [run for run in runs.values() if run["model"] == model]
        length = steps or min(run["steps"] for run in own)
        same = [run for run in own if run["steps"] == length and math.isfinite(final_loss(run))]
        if same:
            first = min(run["seed"] for run in same)
            best[model] = min((run for run in same if run["seed"] == first), key=final_loss)
    return best


def widths(chosen: argparse.Namespace) -> Iterator[tuple[int, int, int]]:
    """Layers, dim and FFN width of the requested models, the deepest first, because it takes longest."""
    for layers in sorted(chosen.layers, reverse=True):
        yield layers, *WIDTHS[chosen.family][layers]


def train(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Train every depth, recipe, learning rate and seed."""
    wanted: list[Wanted] = []
    best = best_runs(document["runs"]) if chosen.rates == ["best"] else {}
    for layers, dim, ffn_dim in widths(chosen):
        for recipe in chosen.recipes:
            first = Wanted(layers, dim, ffn_dim, recipe, 0.0, chosen.steps, chosen.seeds[0])
            found = [best[first.model]["rate"]] if first.model in best else []
            rates = found if chosen.rates == ["best"] else [float(rate) for rate in chosen.rates]
            wanted += [replace(first, rate=rate, seed=seed) for rate in rates for seed in chosen.seeds]
    run_all(wanted, chosen, others, document)


def even(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Train each model at its best learning rate for the time that the deepest model of its recipe takes, alone on the GPU."""
    wanted: list[Wanted] = []
    best, speed = best_runs(document["runs"]), document["speed"]
    for recipe in chosen.recipes:
        models = [Wanted(*width, recipe, 0.0, chosen.steps, 1).model for width in widths(chosen)]
        known = [model for model in models if model in best and "ms" in speed.get(model, {})]
        for model in known[1:]:
            run = best[model]
            steps = round(run["steps"] * speed[known[0]]["ms"] / speed[model]["ms"])
            wanted.append(replace(wanted_of(run), steps=max(steps, run["steps"])))
    run_all(wanted, chosen, others, document)


def texts() -> dict[str, str]:
    """The options that set the books as a run's text."""
    books = Path(os.environ["KILOLAYER_DATA"]) / "books"
    return {f"text.{part}": str(books / f"{part}.jsonl.xz") for part in ("train", "valid", "test")}


def run_all(wanted: list[Wanted], chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    settings, config = {each.name: each.setting for each in wanted}, HERE / "language.toml"
    results = train_all(chosen.work, config, settings, chosen.seconds, chosen.parallel, texts(), others)
    for each in wanted:
        found = row_of(results[each.name])
        found["taken_steps"] = found.pop("steps")
        known = {"model": each.model, "folder": str(results[each.name].folder)}
        run = document["runs"][each.name] = {**known, **asdict(each), **found}
        print(each.name, run["outcome"], "valid", f"{final_loss(run):.4f}", flush=True)


def speed(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Time a step of each model that has a run, with the configuration of its first run."""
    from step_time import step_times

    models: dict[str, list[str]] = {}
    for run in document["runs"].values():
        if "ms" not in document["speed"].get(run["model"], {}):
            words = words_of(HERE / "language.toml", wanted_of(run).setting | texts())
            models.setdefault(run["model"], [*words, *others])
    document["speed"] |= step_times(models, chosen.work, chosen.parallel)
    for model, found in document["speed"].items():
        print(model, found, flush=True)


def shots(chosen: argparse.Namespace, document: dict[str, Any]) -> None:
    """Score questions with each model's best run of the smallest number of steps, among those whose folders exist."""
    end = time.monotonic() + chosen.seconds
    here = {name: run for name, run in document["runs"].items() if "folder" in run and Path(run["folder"]).is_dir()}
    runs = [wanted_of(run).name for run in best_runs(here).values()]
    runs = [name for name in runs if isinstance(document["shots"].get(name, {}), dict)]

    def evaluate_few_shot(name: str) -> list[dict[str, Any]] | dict[str, Any]:
        words = ["--tasks", chosen.tasks, "--shots", chosen.shots, "--json"]
        words += ["--limit", str(chosen.limit)] if chosen.limit else []
        command = [sys.executable, "-m", "kilolayer", "evaluate", document["runs"][name]["folder"], *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return {"told": ["no time was left"]}
        return json.loads(done.stdout) if done.returncode == 0 else {"told": done.stderr.splitlines()[-3:]}

    with ThreadPoolExecutor(chosen.parallel) as pool:
        for name, found in zip(runs, pool.map(evaluate_few_shot, runs), strict=True):
            document["shots"][name] = found
            print(name, found if isinstance(found, dict) else f"{len(found)} scores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Language models by depth and recipe.", allow_abbrev=False)
    parser.add_argument("stage", choices=("train", "speed", "even", "shots", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=WIDTHS, default="fixed")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="learning rates, or best: each model's best so far")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=550)
    parser.add_argument("--parallel", type=int, default=12, help="maximum number of parallel processes")
    parser.add_argument("--work", type=Path, default=Path("runs/depth"))
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--shots", default="0,1,4")
    parser.add_argument("--limit", type=int, default=1500, help="questions per set; 0: all")
    chosen, others = parser.parse_known_args()
    if others and chosen.stage not in ("train", "even", "speed"):
        parser.error(f"{' '.join(others)} has no effect on {chosen.stage}")
    path = chosen.out / "language.json"
    document = json.loads(path.read_text()) if path.exists() else {"commands": [], "runs": {}, "speed": {}, "shots": {}}
    if chosen.stage == "table":
        from language_table import write_table

        write_table(document, chosen.out)
        return
    command = " ".join(
        ["python benchmarks/depth/language.py", *("OUT" if word == str(chosen.out) else word for word in sys.argv[1:])]
    )
    match chosen.stage:
        case "train":
            train(chosen, others, document)
        case "even":
            even(chosen, others, document)
        case "speed":
            speed(chosen, others, document)
        case _:
            shots(chosen, document)
    document["commands"].append(command)
    document["hardware"] = hardware()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
