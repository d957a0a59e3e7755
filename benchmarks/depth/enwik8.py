"""The best bits per byte on enwik8 within twenty minutes of one GPU: two commands of ten minutes, stopped and resumed.

    python benchmarks/depth/enwik8.py select OUT --seconds 240            # short runs in parallel: depth, recipe, learning rate
    python benchmarks/depth/enwik8.py speed OUT                           # the step time of each, alone on the GPU
    python benchmarks/depth/enwik8.py train OUT --config NAME             # measures the speed, plans the steps, starts
    python benchmarks/depth/enwik8.py train OUT --config NAME             # the same command again continues to the end
    python benchmarks/depth/enwik8.py score OUT --config NAME             # the test set, with overlapping windows
    python benchmarks/depth/enwik8.py table OUT                           # OUT/enwik8.md, with published models

A NAME such as 24L-75M-sub_ln-lr0.001 gives layers, parameters, recipe and learning rate. KILOLAYER_DATA is the folder with
enwik8/enwik8.xz. Runs are stored in --work, and each stage adds to OUT/enwik8.json. Options of `kilolayer train` (--text.length
1024) apply to all runs of a command.

The choices and their reasons. `select` tries depth, recipe and learning rate; everything else is estimated, not tuned.
- Parameters: two commands have about 16 minutes of training steps. At 400 TFLOP/s these are 4e17 FLOPs or, with 6 per parameter
  and byte, 0.9 billion bytes for 75 million parameters: the text ten times, and 12 bytes per parameter, not far below the
  compute-optimal 20 tokens per parameter (Hoffmann et al. 2022, for text that is not repeated). 38 million parameters would see
  the text 20 times. Short runs favour small models, so `select` compares models of equal size and does not choose the size.
- Batches of 32,768 bytes. Larger ones use the GPU hardly better and leave fewer steps. Windows have 512 bytes, as is usual; the
  long runs in enwik8.json have 1,024 (--text.length 1024), because the gain from context outweighs the steps that attention
  costs. `score` tries longer windows than those of training, on the validation set.
- Dropout 0.05: Transformer-XL with 12 layers has 0.1 and sees the text 50 times.
- A cosine schedule to 0 over the steps that the measured speed allows: a run that is cut off before its learning rate has
  fallen loses much more than one that ends a little early.
- AdamW with weight decay 0.1, beta2 0.98, clipping at 1.0, as in configs/enwik8.toml: at a learning rate of 1e-3 weights decay
  within 10,000 steps, a third of the run, and the second moment within 50, so it soon follows a change of the gradients.
- Scoring with windows that overlap by seven eighths: with 1,024 bytes, each byte but the first ones has at least 896 bytes of
  context.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from single_runs import hardware, row_of, train_all, words_of  # noqa: E402
from step_time import step_times  # noqa: E402

from kilolayer.compare.comparison import Comparison  # noqa: E402

LAYERS = (12, 24, 48, 96)
WIDTHS = {  # dim and FFN width by number of weights and layers; 64 per head
    "38M": {12: (512, 2048), 24: (384, 1280), 48: (256, 1024), 96: (192, 640)},
    "75M": {12: (768, 2560), 24: (512, 2048), 48: (384, 1280), 96: (256, 1024)},
}
NAME = re.compile(r"(?P<layers>\d+)L-(?P<size>\w+)-(?P<recipe>\w+)-lr(?P<rate>[\d.e-]+)")
CONFIG = HERE / "enwik8.toml"
WARMUP, POINTS = 0.03, 40
SPARE = 0.97  # fraction of the time to plan for, leaving room for validation and a slightly slower GPU
SCORING = 40  # seconds to reserve for the end of a run
PUBLISHED = (
    ("character Transformer, 12 layers", "44 M", 1.11, "Al-Rfou et al. 2018, arXiv:1808.04444"),
    ("character Transformer, 64 layers", "235 M", 1.06, "Al-Rfou et al. 2018"),
    ("Transformer-XL, 12 layers", "41 M", 1.06, "Dai et al. 2019, arXiv:1901.02860"),
    ("Transformer-XL, 24 layers", "277 M", 0.99, "Dai et al. 2019"),
)


@dataclass(frozen=True)
class Wanted:
    """A model and its learning rate."""

    layers: int
    size: str
    recipe: str
    rate: float

    @classmethod
    def of(cls, name: str) -> Wanted:
        found = NAME.fullmatch(name)
        if found is None or found["size"] not in WIDTHS or int(found["layers"]) not in LAYERS:
            raise SystemExit(f"{name} is no configuration: write it as 24L-75M-sub_ln-lr0.001")
        return cls(int(found["layers"]), found["size"], found["recipe"], float(found["rate"]))

    @property
    def model(self) -> str:
        return f"{self.layers}L-{self.size}-{self.recipe}"

    @property
    def name(self) -> str:
        return f"{self.model}-lr{self.rate:g}"

    @property
    def setting(self) -> dict[str, Any]:
        dim, ffn_dim = WIDTHS[self.size][self.layers]
        width = {"model.dim": dim, "model.ffn_dim": ffn_dim, "model.heads": dim // 64}
        return {"model.recipe": self.recipe, "layers": self.layers, **width, "train.lr": self.rate}


def shared_options(steps: int, tokens: int, points: int) -> dict[str, Any]:
    """Options shared by all runs of a stage. points: validations per run."""
    options: dict[str, Any] = {"text.train": str(Path(os.environ["KILOLAYER_DATA"]) / "enwik8" / "enwik8.xz")}
    options |= {"batches.tokens": tokens, "train.steps": steps, "train.warmup_steps": round(WARMUP * steps)}
    return {**options, "train.valid_every": max(1, steps // points)}


def select(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Train every depth, recipe and learning rate for a few steps; the deepest first, because they take longest."""
    depths = sorted(chosen.layers, reverse=True)
    wanted = [
        Wanted(layers, chosen.size, recipe, rate) for layers in depths for recipe in chosen.recipes for rate in chosen.rates
    ]
    tokens = chosen.tokens or 16_384
    settings, options = {each.name: each.setting for each in wanted}, shared_options(chosen.steps, tokens, 5)
    results = train_all(chosen.work / "select", CONFIG, settings, chosen.seconds, chosen.parallel, options, others)
    for each in wanted:
        result = results[each.name]
        known = {"model": each.model, "tokens": tokens, "wanted_steps": chosen.steps}
        run = document["select"][each.name] = {**known, **row_of(result)}
        print(each.name, run["outcome"], "valid bits per byte", last_bits(run), flush=True)


def last_bits(run: dict[str, Any]) -> float | None:
    """Bits per byte at the last validation."""
    return run["valid"][-1]["bits_per_byte"] if run.get("valid") else None


def speed(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Time a step of each model of `select`, with the same batches."""
    models: dict[str, list[str]] = {}
    for name, run in document["select"].items():
        options = shared_options(run["wanted_steps"], chosen.tokens or run["tokens"], 5)
        models.setdefault(run["model"], [*words_of(CONFIG, {**options, **Wanted.of(name).setting}), *others])
    document["speed"] |= step_times(models, chosen.work, chosen.parallel)
    for model in models:
        print(model, document["speed"][model], flush=True)


def train(chosen: argparse.Namespace, others: list[str], document: dict[str, Any]) -> None:
    """Start or continue training; the first command measures the speed and plans the steps of all commands."""
    end = time.monotonic() + chosen.seconds
    wanted, work = Wanted.of(chosen.config), chosen.work / "train"
    tokens = chosen.tokens or 32_768
    plan = document["plans"].get(wanted.name)
    if plan is None:
        began = time.monotonic()
        first = {**shared_options(100, tokens, 1), **wanted.setting}
        (found,) = step_times({wanted.name: [*words_of(CONFIG, first), *others]}, work, 1).values()
        if "ms" not in found:
            raise SystemExit("\n".join(found["told"]))
        measuring = time.monotonic() - began
        steps_s = SPARE * (chosen.commands * (chosen.seconds - found["ready_s"]) - measuring - SCORING)
        steps = chosen.steps or max(100, int(steps_s / found["ms"] * 1e3))
        plan = document["plans"][wanted.name] = {**found, "seconds_of_steps": steps_s, "steps": steps, "commands": 0}
        print("planned", plan, flush=True)
    plan["commands"] += not any((work / wanted.name).glob("runs/*/scores.json"))
    settings, options = {wanted.name: wanted.setting}, shared_options(plan["steps"], tokens, POINTS)
    left = end - time.monotonic()
    result = train_all(work / wanted.name, CONFIG, settings, left, 1, options, others)[wanted.name]
    known = {"model": wanted.model, "wanted_steps": plan["steps"]}
    run = document["train"][wanted.name] = {**known, **row_of(result)}
    print(wanted.name, run["outcome"], "valid bits per byte", last_bits(run), flush=True)


def score(chosen: argparse.Namespace, document: dict[str, Any]) -> None:
    """Score the test set with the window length that is best on the first megabyte of the validation set."""
    import torch

    from kilolayer.data.windows import windows_in_order
    from kilolayer.evaluate.likelihood import TextLoss, measure
    from kilolayer.models.decoder import Decoder
    from kilolayer.runs.run import Run, cache_folder, choose_device
    from kilolayer.tasks.causal_lm.task import CausalLMTask

    name = Wanted.of(chosen.config).name
    (member,) = Comparison.open(chosen.work / "train" / name).members
    run = Run.open(member.folder)
    device = choose_device(run.config.train.device)
    precision = "bf16" if device.type == "cuda" else "fp32"
    task, model = run.task(cache_folder()), run.load_reader(device, precision)
    assert isinstance(task, CausalLMTask)
    assert isinstance(model, Decoder)
    assert task.valid is not None
    assert task.test is not None

    def bits(text: Any, length: int, most: int | None) -> TextLoss:
        stride = max(1, length // chosen.overlap)
        windows = None if most is None else max(1, most // stride)
        batches = windows_in_order(text, max(1, chosen.batch // length), length, stride, windows)
        return measure(model, batches, task.vocabulary.byte_lengths)

    lengths = [round(task.length * factor) for factor in chosen.factors]
    valid = {length: bits(task.valid, length, chosen.valid_bytes).bits_per_byte for length in lengths}
    print("validation set by window length", valid, flush=True)
    length = min(valid, key=lambda each: valid[each])
    began = time.monotonic()
    found = bits(task.test, length, chosen.test_bytes)
    document["scores"][name] = {
        "valid_by_length": valid,
        "bits_per_byte": found.bits_per_byte,
        "signature": f"length:{length}, stride:{max(1, length // chosen.overlap)}, bytes:{found.bytes}, {precision}",
        "seconds": round(time.monotonic() - began, 1),
        "trained_length": task.length,
        "torch": torch.__version__,
    }
    print(name, document["scores"][name], flush=True)


def write_table(document: dict[str, Any], out: Path) -> None:
    """Write OUT/enwik8.md."""
    lines = ["| model | weights | bits per byte, test | from |", "|---|---|---|---|"]
    rows = [(about, weights, bits, f"{bits:.2f}", source) for about, weights, bits, source in PUBLISHED]
    for name, found in document["scores"].items():
        plan, run = document["plans"][name], document["train"][name]
        taken = f"{run['steps']:,} of {plan['steps']:,} steps, {run['seconds']:,.0f} s of them"
        about = f"{plan['commands']} commands, {taken}; {found['signature']}"
        rows.append((name, f"{plan['parameters'] / 1e6:.0f} M", found["bits_per_byte"], f"{found['bits_per_byte']:.4f}", about))
    rows.sort(key=lambda row: -row[2])
    lines += [f"| {about} | {weights} | {shown} | {source} |" for about, weights, _, shown, source in rows]
    lines += ["", "Short runs, on the validation set without overlap; seconds: all steps, alone on the GPU:", ""]
    lines += ["| configuration | steps | bits per byte | ms per step | seconds |", "|---|---|---|---|---|"]
    for name, run in sorted(document["select"].items(), key=lambda pair: last_bits(pair[1]) or math.inf):
        ms = document["speed"].get(run["model"], {}).get("ms")
        times = ("-", "-") if ms is None else (f"{ms:.2f}", f"{run['steps'] * ms / 1e3:.1f}")
        bits = last_bits(run)
        shown = run["outcome"] if bits is None else f"{bits:.4f}"
        lines.append(f"| {name} | {run['steps']} of {run['wanted_steps']} | {shown} | {times[0]} | {times[1]} |")
    (out / "enwik8.md").write_text("\n".join(lines) + "\n")
    print(out / "enwik8.md")


def main() -> None:
    parser = argparse.ArgumentParser(description="enwik8 in twenty minutes.", allow_abbrev=False)
    parser.add_argument("stage", choices=("select", "speed", "train", "score", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--parallel", type=int, default=8, help="maximum number of parallel processes")
    parser.add_argument("--work", type=Path, default=Path("runs/enwik8"))
    parser.add_argument("--tokens", type=int, help="bytes per batch [select 16,384, speed: as in select, train 32,768]")
    parser.add_argument("--steps", type=int, help="[select 1,000, train: as many as the time allows]")
    parser.add_argument("--size", choices=WIDTHS, default="38M", help="for select")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--recipes", nargs="+", default=["sub_ln", "pre_ln"])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3])
    parser.add_argument("--config", help="for train and score: 24L-75M-sub_ln-lr0.001")
    parser.add_argument("--commands", type=int, default=2, help="for train: number of commands to plan for")
    parser.add_argument("--overlap", type=int, default=8, help="for score: number of windows that contain a byte")
    parser.add_argument("--batch", type=int, default=65_536, help="for score: bytes per batch")
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 1.5, 2], help="for score: windows relative to training")
    parser.add_argument("--valid-bytes", type=int, default=1_000_000)
    parser.add_argument("--test-bytes", type=int, help="for score: only this many, from the start [all]")
    chosen, others = parser.parse_known_args()
    if others and chosen.stage not in ("select", "speed", "train"):
        parser.error(f"{' '.join(others)} has no effect on {chosen.stage}")
    if chosen.stage in ("train", "score") and chosen.config is None:
        parser.error(f"{chosen.stage} needs --config")
    path = chosen.out / "enwik8.json"
    parts = ("select", "speed", "plans", "train", "scores")
    document = json.loads(path.read_text()) if path.exists() else {"commands": [], **{part: {} for part in parts}}
    if chosen.stage == "table":
        write_table(document, chosen.out)
        return
    match chosen.stage:
        case "select":
            chosen.steps = chosen.steps or 1000
            select(chosen, others, document)
        case "speed":
            speed(chosen, others, document)
        case "train":
            train(chosen, others, document)
        case _:
            score(chosen, document)
    words = ["OUT" if word == str(chosen.out) else word for word in sys.argv[1:]]
    document["commands"].append(" ".join(["python benchmarks/depth/enwik8.py", *words]))
    document["hardware"] = hardware()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
