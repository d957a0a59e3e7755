"""Odd values and names, seeded: what people mistype, and what somebody writes into a file to see what happens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kilolayer.config import option_paths
from kilolayer.tasks import registry

BASES = {
    "translation": '[model]\nlayers = 2\ndim = 16\nheads = 2\nffn_dim = 32\n[data]\nfolder = "text"\ndirections = ["en-de"]\n',
    "causal_lm": 'task = "causal_lm"\n[model]\nlayers = 2\ndim = 16\nheads = 2\n[text]\ntrain = ["text"]\nlength = 32\n',
    "classify_image": 'task = "classify_image"\n[model]\nlayers = 2\ndim = 16\nheads = 2\n[images]\ntrain = "photos"\n',
    "segment": 'task = "segment"\n[model]\nlayers = 2\ndim = 16\nheads = 2\n[images]\nsize = 32\n',
    "masked_image": 'task = "masked_image"\n[model]\nlayers = 2\ndim = 16\nheads = 2\n[masking]\nkind = "random"\n',
}
PLACES = sorted({path for task in registry.all_of() for path in option_paths(task.load_config())})
WHOLE = [-1, 0, 1, 2, 3, 7, 60, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 2**70, 10**30]
NUMBERS = [*map(str, WHOLE), "9" * 400, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000, "0b1", "1_000"]
FRACTIONS = [
    "0.5",
    "-0.0",
    "1.0",
    "5e-324",
    "1e-400",
    "1e38",
    "1e300",
    "1e308",
    "1e400",
    "inf",
    "-inf",
    "nan",
    "0." + "1" * 5000,
]
TEXTS = [
    "",
    "none",
    "auto",
    "a" * 300,
    "a/" * 3000,
    "\U0001f600",
    "../../..",
    "x\ty",
    "[/red]",
    "%s%n{0}",
    "\u202e",
    "-",
    "*-*",
]
BROKEN = ['"\\u0000"', '"\\ud800"', '"', "[", "]", "{", "", "''''", "1 2", "=", "\x00", "[" * 3000, "[" * 90 + "]" * 90]
NESTED = ["[" * 15 + "]" * 15, "[" * 900 + "]" * 900, "{a=" * 15 + "1" + "}" * 15, "{a=" * 300 + "1" + "}" * 300]
OTHERS = [
    "true",
    "false",
    "[]",
    "{}",
    "[1]",
    '["en"]',
    "[[]]",
    '["en-de", 1]',
    '{name = "admin"}',
    "{name = 1}",
    "1979-05-27",
    "07:32:00",
]
VALUES = [*NUMBERS, *FRACTIONS, *map(json.dumps, TEXTS), *BROKEN, *NESTED, *OTHERS]


@dataclass(frozen=True)
class Trial:
    """Options with their values, as TOML writes them; `typed` ones on the command line, the others in the file."""

    base: str
    options: tuple[tuple[str, str], ...]
    typed: bool

    def words(self, folder: Path) -> list[str]:
        """What is typed after the verb; its files are written into a folder."""
        (folder / "base.toml").write_text(BASES[self.base], encoding="utf-8")
        if self.typed:
            return [str(folder / "base.toml"), *(f"--{path}={value}" for path, value in self.options if "." in path)]
        lines = ['extends = "base.toml"', *(f"{path} = {value}" for path, value in self.options)]
        (folder / "odd.toml").write_text("\n".join(lines), encoding="utf-8")
        return [str(folder / "odd.toml")]


def trials(count: int, seed: int) -> Iterator[Trial]:
    """Mutations of configurations: other types, magnitudes, nesting and names."""
    dice = random.Random(seed)
    for _ in range(count):
        options = {_mangled(dice, dice.choice(PLACES)): dice.choice(VALUES) for _ in range(dice.choice([1, 1, 1, 2, 4]))}
        yield Trial(dice.choice(list(BASES)), tuple(options.items()), dice.random() < 0.5)


def _mangled(dice: random.Random, path: str) -> str:
    """The name of an option; of seven one is misspelt, one put elsewhere or cut."""
    match dice.randrange(14):
        case 0:
            cut = dice.randrange(len(path))
            return path[:cut] + dice.choice(["x", "..", "\u00e9", '"', " ", "-" * 5000]) + path[cut + 1 :]
        case 1:
            return ".".join([path] * dice.choice([2, 50, 3000]))
        case 2:
            return path.partition(".")[0]
        case 3:
            return path.rpartition(".")[2]
        case _:
            return path


NORMS = {"encoder": [0.1, 0.2], "decoder": [0.3, 0.4]}
SCORE = {"name": "BLEU", "value": 31.5, "signature": "nrefs:1|tok:13a", "digits": 2}
ROUTING = {"layers": ["encoder 2", "decoder 2"], "load": [[0.5, 0.5], [0.9, 0.1]], "tokens": [900, 900], "choices": [900, 900]}
METRICS: list[dict[str, object]] = [
    {
        "kind": "train",
        "step": 1,
        "loss": 5.0,
        "nll": 5.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "epoch": 0.5,
        "seconds": 4.0,
        "clipped": 1,
    },
    {
        "kind": "train",
        "step": 2,
        "loss": 4.0,
        "nll": 4.0,
        "lr": 1e-3,
        "grad_norm": 2.0,
        "tokens_per_second": 9.0,
        "seconds": 8.0,
    },
    {
        "kind": "valid",
        "step": 2,
        "loss": 4.5,
        "bleu": 3.0,
        "bits_per_byte": 2.5,
        "directions": {"en-de": {"loss": 4.5, "bleu": 3.0}},
    },
    {"kind": "layers", "step": 1, "gradient": NORMS, "update": NORMS, "residual": NORMS},
    {"kind": "layers", "step": 2, "gradient": NORMS, "update": NORMS, "residual": NORMS},
    {"kind": "routing", "step": 1, **ROUTING, "entropy": [0.6, 0.5], "dropped": [0.1, 0.2], "temperature": [0.3, 0.3]},
    {"kind": "routing", "step": 2, **ROUTING, "dense_norm": 0.1, "expert_norm": 0.2, "clipped": 1},
    {"kind": "event", "step": 2, "text": "step 2 skipped: gradient is not finite"},
]
SCORES: dict[str, object] = {
    "test": {"bleu": SCORE, "meteor": {"name": "METEOR", "reason": "nltk is not installed"}},
    "test en-de": {"bleu": SCORE},
    "averages": {"xx-en": {"bleu": 30.0}},
    "frequency_buckets": [{"label": "0", "matched": 1, "reference": 2, "hypothesis": 3, "f1": 0.4}],
    "length_buckets": [{"label": "0-9", "sentences": 4, "bleu": 33.1}, {"label": "10+", "sentences": 0, "bleu": None}],
}
SAMPLES: list[object] = [
    {"source": "a", "reference": "b", "hypothesis": "c"},
    {"prompt": "d", "text": "e", "continuation": "f"},
]
JSON_VALUES = [*map(str, WHOLE), "9" * 400, "-" + "9" * 400, "9" * 5000, "1e38", "1e300", "-1e308", "1e999", "5e-324", "NaN"]
JSON_VALUES += [
    "-Infinity",
    "null",
    "true",
    "[]",
    "{}",
    "[[]]",
    '{"a": {}}',
    '""',
    '"x"',
    '"\\ud800"',
    '"\\u0000"',
    '"\\u001b[2J"',
]
JSON_VALUES += [
    "[" * 90 + "]" * 90,
    "[" * 900 + "]" * 900,
    "[" * 5000,
    '{"a":' * 300 + "1" + "}" * 300,
    "[" + "1," * 5000 + "2]",
]


def write_odd_run(folder: Path, seed: int) -> None:
    """A run folder, some values of which are odd ones; some lines and files are cut, or are no text."""
    dice = random.Random(seed)
    odd = dice.choice(["metrics.jsonl", "scores.json", "samples.json", "config.toml"])
    chances = {name: 0.08 if name == odd else 0.0 for name in ("metrics.jsonl", "scores.json", "samples.json")}
    rows = [_odd_json(dice, row, chances["metrics.jsonl"]) for row in METRICS]
    files = {
        "config.toml": BASES["translation"],
        "metrics.jsonl": "".join(f"{row}\n" for row in rows),
        "scores.json": _odd_json(dice, SCORES, chances["scores.json"]),
        "samples.json": _odd_json(dice, SAMPLES, chances["samples.json"]),
        "log.txt": "start\nWARNING \x1b[2J\n",
    }
    if odd == "config.toml":
        paths = dict.fromkeys((_mangled(dice, dice.choice(PLACES)) for _ in range(dice.choice([1, 2]))), dice.choice(VALUES))
        files["config.toml"] = "\n".join([*(f"{path} = {value}" for path, value in paths.items()), "[model]\nlayers = 2"])
    for name, text in files.items():
        data = text.encode("utf-8", "surrogatepass")
        if name == odd and dice.random() < 0.1:
            cut = dice.randrange(len(data) + 1)
            data = data[:cut] + bytes(dice.randrange(256) for _ in range(20)) + data[cut + dice.randrange(20) :]
        (folder / name).write_bytes(data)


def _odd_json(dice: random.Random, value: object, chance: float) -> str:
    """JSON of a value; each part of it is an odd one with this chance."""
    if dice.random() < chance:
        return dice.choice(JSON_VALUES)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_odd_json(dice, each, chance)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_odd_json(dice, each, chance) for each in value) + "]"
    return json.dumps(value)
