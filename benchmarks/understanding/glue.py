"""Fine-tune pre-trained runs on GLUE and make the table with its average (DeepNet, Table 6).

    python benchmarks/understanding/glue.py runs/deepnorm runs/post_ln --data $KILOLAYER_DATA/nlu/glue \
        --lrs 2e-5,5e-5,1e-4 --seeds 1,2,3 --out benchmarks/understanding/glue.json

All fine-tuning of a run happens in one process: a model, its optimizer and its recorded steps are created once for each number
of outputs, and the weights are restored before each fine-tuning. The results file is written after each of them, and results
that it already contains are not recomputed: the same command continues where it was stopped, also with further runs, tasks,
learning rates and seeds. Other options need another file.

The score of a fine-tuning is that of its best epoch on the validation set; the learning rate of a table cell is the one with
the best mean over seeds. Both choices are made on the data that is reported, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import kilolayer as kl
from kilolayer.config import build, merge
from kilolayer.data.glue import LAYOUTS, find_glue
from kilolayer.errors import InputError
from kilolayer.files.writing import write
from kilolayer.models.build import build_model
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.runs.chosen_runtime import choose_runtime
from kilolayer.runs.run import Run, cache_folder, check_fit, choose_device, choose_precision, in_steps, prepare
from kilolayer.runtime.recorder import Recorder
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.classify.task import ClassifyTask
from kilolayer.tasks.config import RunConfig
from kilolayer.training.guard import Guard
from kilolayer.training.schedule import learning_rate
from kilolayer.training.step import Stepper
from kilolayer.training.trainer import DTYPES

TASKS = ("CoLA", "SST-2", "MRPC", "STS-B", "RTE")
OF_THE_PAPER = ("MNLI", "MNLI-mm", "QNLI", "QQP", "SST-2", "CoLA", "MRPC", "STS-B")
LARGE = 20_000  # examples; larger sets are trained for fewer epochs
FIXED = ("epochs", "epochs_large", "rows", "length", "weight_decay", "layer_decay", "pool", "dropout")  # per file

Result = dict[str, Any]


class Tuner:
    """A model with a head of `outputs` outputs, which is reset to the pre-trained weights before each fine-tuning."""

    def __init__(self, config: ClassifyConfig, task: ClassifyTask, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.device = choose_device(config.train.device)
        model = self._fresh(task, seed=1)
        dtype = DTYPES.get(config.train.precision)
        precise = None if dtype is None else model.cast_weights(dtype)
        self.model = model.train()
        runtime = choose_runtime()
        self.optimizer = make_optimizer(model, config.train, precise, sums=self.device.type == "cpu", runtime=runtime)
        self.guard = Guard(scaled=False)
        self.stepper = Stepper(
            model, self.optimizer, config.train, self.guard, self.device, _print_stderr, loss=task.loss, runtime=runtime
        )
        self.validation: Recorder = self.stepper.recorder.sharing_pool("validation runs")

    def _fresh(self, task: ClassifyTask, seed: int) -> kl.Encoder:
        """The pre-trained body with a head initialized from the seed."""
        model = build_model(self.config.model, device=self.device, seed=seed)
        assert isinstance(model, kl.Encoder)
        weights = task.adopt(self.weights, model.state_dict())
        check_fit(model.state_dict(), weights, Path("the run to start from"))
        model.load_state_dict(weights)
        return model

    @torch.no_grad()
    def reset(self, task: ClassifyTask, seed: int) -> None:
        """Reset weights, optimizer moments and random state in place, so that recorded steps stay valid."""
        fresh = self._fresh(task, seed).state_dict()
        for tensors in (self.model.state_dict(), self.optimizer.precise()):
            for name, tensor in tensors.items():
                tensor.copy_(fresh[name])
        for tensor in self.optimizer.tensors().values():
            tensor.zero_()
        torch.manual_seed(seed)

    def fine_tune(self, config: ClassifyConfig, task: ClassifyTask) -> list[dict[str, float]]:
        """The validation metrics after each epoch; none after a step whose loss is not finite."""
        train = config.train
        self.reset(task, train.seed)
        batches = task.training_batches(train.seed)
        found = []
        for step in range(1, train.steps + 1):
            result = self.stepper.step([next(batches)], learning_rate(train, step))
            if result.fault is not None:
                break
            if train.validates(step):
                form = self.stepper.form
                assert isinstance(form, kl.Encoder)
                measured = task.validate(form, sys.maxsize, self.validation)
                assert measured is not None
                found.append(measured.metrics())
        return found


class Suite:
    """All fine-tunings of one pre-trained run."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.run, self.options = Run.open(folder), options
        self.vocabulary = self.run.vocabulary()
        self.weights = self.run.weights(self.vocabulary)
        self.tuners: dict[int, Tuner] = {}
        self.tasks: dict[str, tuple[ClassifyConfig, ClassifyTask]] = {}

    def task(self, name: str) -> tuple[ClassifyConfig, ClassifyTask]:
        """A GLUE task in this run's tokens, and the configuration of its fine-tuning except for lr and seed."""
        if name not in self.tasks:
            options = self.options
            large = _rows(find_glue(name, options.data)["train"]) > LARGE  # pyright: ignore[reportArgumentType]
            train = {
                "start_from": str(self.run.folder),
                "epochs": options.epochs_large if large else options.epochs,
                "weight_decay": options.weight_decay,
                "layer_decay": options.layer_decay,
                "device": options.device,
                "threads": options.threads,
            }
            head = {"pool": options.pool, "dropout": options.dropout}
            model: dict[str, Any] = {"head": head}
            if options.dropout is not None:
                model |= {"dropout": options.dropout, "attention_dropout": options.dropout}
            else:
                head.pop("dropout")
            examples = {"glue": name, "folder": str(options.data), "rows": options.rows, "length": options.length}
            table = {"task": "classify", "model": model, "examples": examples, "train": train}
            config = build(RunConfig, merge(ClassifyConfig.from_start(self.run.config.table()), table))
            task = prepare(config, cache_folder(), self.vocabulary)
            config = in_steps(task.resolve(config), task)
            assert isinstance(config, ClassifyConfig)
            assert isinstance(task, ClassifyTask)
            config = replace(config, train=replace(config.train.in_steps(0), precision=choose_precision(config.train)))
            self.tasks[name] = config, task
        return self.tasks[name]

    def fine_tune(self, name: str, lr: float, seed: int) -> Result:
        """One fine-tuning: its validation scores, and the best of them."""
        config, task = self.task(name)
        config = replace(config, train=replace(config.train, lr=lr, seed=seed))
        assert config.model.head is not None
        outputs = config.model.head.outputs
        if outputs not in self.tuners:
            self.tuners[outputs] = Tuner(config, task, self.weights)
        started = time.monotonic()
        epochs = self.tuners[outputs].fine_tune(config, task)
        best = max(range(len(epochs)), key=lambda epoch: epochs[epoch]["metric"], default=None)
        return {
            "run": str(self.run.folder),
            "recipe": config.model.recipe.name,
            "task": name,
            "metric": task.metrics[0],
            "lr": lr,
            "seed": seed,
            "steps": config.train.steps,
            "best_epoch": None if best is None else best + 1,
            "score": 0.0 if best is None else epochs[best]["metric"],
            "diverged": len(epochs) < round(config.train.steps / len(task.training_batches(seed))),
            "epochs": epochs,
            "seconds": round(time.monotonic() - started, 2),
        }


def table_of(results: Sequence[Result], tasks: Sequence[str]) -> str:
    """A row per run, a column per task: the best learning rate's mean over seeds, its standard deviation, and the rate.

    Rates with fewer seeds than another are not chosen. A cell with fewer seeds than the maximum shows their number.
    """
    seeds = len({result["seed"] for result in results})
    runs = list(dict.fromkeys(result["run"] for result in results))
    lines = [f"| run | {' | '.join(tasks)} | average |", "|---" * (len(tasks) + 2) + "|"]
    for run in runs:
        cells, means = [], []
        for task in tasks:
            by_rate: dict[float, list[float]] = {}
            for result in results:
                if (result["run"], result["task"]) == (run, task):
                    by_rate.setdefault(result["lr"], []).append(result["score"])
            if not by_rate:
                cells.append("-")
                continue
            most = max(map(len, by_rate.values()))
            rate = max(
                (rate for rate in by_rate if len(by_rate[rate]) == most), key=lambda rate: statistics.mean(by_rate[rate])
            )
            scores = by_rate[rate]
            means.append(statistics.mean(scores))
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            fewer = f", {most} of {seeds} seeds" if most < seeds else ""
            cells.append(f"{means[-1]:.1f}{spread} ({rate:g}{fewer})")
        average = f"{statistics.mean(means):.1f}" if len(means) == len(tasks) else "-"
        lines.append(f"| {run} | {' | '.join(cells)} | {average} |")
    return "\n".join(lines)


def report(results: Sequence[Result], tasks: Sequence[str], absent: Sequence[str]) -> str:
    """The table, and a description of how it was made."""
    metrics = ", ".join(f"{task} {LAYOUTS[task].metrics[0]}" for task in tasks)  # pyright: ignore[reportArgumentType]
    seeds = len({result["seed"] for result in results})
    missing = [task for task in OF_THE_PAPER if task not in tasks]
    notes = [
        f"Validation sets; {metrics}; {seeds} seeds: mean ± standard deviation of the best epochs, and the learning rate.",
        "Epoch and learning rate are chosen on the same set." + (f" Not here: {', '.join(absent)}." if absent else ""),
    ]
    if missing:
        notes.append(f"The average of the paper also has {', '.join(missing)}: it cannot be compared with this one.")
    return "\n".join([table_of(results, tasks), "", *notes, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing fine-tunings, and write results and table."""
    options = _options(arguments)
    named = [task for task in options.tasks.split(",") if task]
    tasks = [task for task in named if _is_there(task, options.data)]
    absent = [task for task in named if task not in tasks]
    before = json.loads(options.out.read_text()) if options.out.exists() else {"settings": {}, "results": []}
    settings, made = _settings(options), before["settings"]
    for name in FIXED:
        if made.get(name, settings[name]) != settings[name]:
            raise SystemExit(f"{options.out} was made with {name} {made[name]}, not {settings[name]}: choose another --out")
    results = {_key(result): result for result in before["results"]}
    deadline = time.monotonic() + options.seconds
    for folder in options.runs:
        suite: Suite | None = None
        for task in tasks:
            for lr, seed in ((lr, seed) for lr in _numbers(options.lrs) for seed in map(int, options.seeds.split(","))):
                if (str(folder), task, lr, seed) in results:
                    continue
                if time.monotonic() > deadline:
                    _print_stderr("out of time: run the same command again to continue")
                    return
                suite = suite or Suite(folder, options)
                result = suite.fine_tune(task, lr, seed)
                result["run"] = str(folder)
                results[_key(result)] = result
                _print_stderr(f"{folder} {task} lr {lr:g} seed {seed}: {result['score']:.2f} in {result['seconds']:.1f} s")
                _keep(options, list(results.values()), tasks, absent)
    sys.stdout.write(report(list(results.values()), tasks, absent))


def _keep(options: argparse.Namespace, results: list[Result], tasks: list[str], absent: list[str]) -> None:
    device = choose_device(options.device)
    document = {
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kilolayer": kl.__version__},
        "settings": _settings(options),
        "absent": absent,
        "results": results,
    }
    write(options.out, json.dumps(document, indent=1))
    write(options.out.with_suffix(".md"), report(results, tasks, absent))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    return settings | {"runs": [str(folder) for folder in options.runs]}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders of masked language models")
    parser.add_argument("--data", type=Path, required=True, help="the folder with GLUE's files")
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"[{','.join(TASKS)}]")
    parser.add_argument("--lrs", default="2e-5,5e-5,1e-4", help="learning rates [2e-5,5e-5,1e-4]")
    parser.add_argument("--seeds", default="1,2,3", help="[1,2,3]")
    parser.add_argument("--epochs", type=float, default=10, help="[10]")
    parser.add_argument("--epochs-large", type=float, default=3, help=f"for sets with more than {LARGE:,} examples [3]")
    parser.add_argument("--rows", type=int, default=32, help="examples per batch [32]")
    parser.add_argument("--length", type=int, default=128, help="maximum number of tokens per example [128]")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="[0.1]")
    parser.add_argument("--layer-decay", type=float, default=1.0, help="[1]")
    parser.add_argument("--pool", choices=("first", "mean"), default="first", help="[first]")
    parser.add_argument("--dropout", type=float, help="also that of the head [the run's; head: 0.1]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[auto]")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads [torch's default]")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no fine-tuning after this many seconds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/understanding/glue.json"), help="results, and FILE.md")
    return parser.parse_args(arguments)


def _is_there(task: str, folder: Path) -> bool:
    try:
        find_glue(task, folder)  # pyright: ignore[reportArgumentType]
    except InputError:
        return False
    return True


def _key(result: Result) -> tuple[str, str, float, int]:
    return result["run"], result["task"], result["lr"], result["seed"]


def _rows(path: Path) -> int:
    from kilolayer.data.text import count_lines

    return count_lines(path)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _print_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
