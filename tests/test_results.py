"""Every number of README.md and docs/results.md, from the files in benchmarks that the pages cite."""

from __future__ import annotations

import json
import math
import re
import runpy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from page_numbers import Derivation, changed, differences, links_of, plain, sections_of, word

import kilolayer as kl
from kilolayer.training.stack_label import DEAD, DYING, LEVELS, as_fraction

ROOT = Path(__file__).parents[1]
README, RESULTS = "README.md", "docs/results.md"
SHOWN = {
    "post_ln": "Post-LN",
    "pre_ln": "Pre-LN",
    "sub_ln": "Sub-LN",
    "deepnorm": "DeepNorm",
    "admin": "Admin",
    "ds_init": "DS-Init",
    "rezero": "ReZero",
    "r_fixup": "R-Fixup",
    "t_fixup": "T-Fixup",
    "dlcl": "DLCL",
    "normformer": "NormFormer",
}
DERIVATIONS: dict[str, list[Derivation]] = {README: [], RESULTS: []}
Pieces = Iterator[str]
Data = dict[str, Any]


def section(
    heading: str, *files: str, given: Sequence[str] = (), page: str = RESULTS
) -> Callable[[Callable[..., Pieces]], Callable[..., Pieces]]:
    """Register a derivation, which is called with the content of its files."""

    def register(pieces: Callable[..., Pieces]) -> Callable[..., Pieces]:
        DERIVATIONS[page].append(Derivation(heading, files, given, pieces))
        return pieces

    return register


@cache
def read(file: str) -> Any:
    return json.loads((ROOT / "benchmarks" / file).read_text())


@cache
def sections(page: str) -> dict[str, str]:
    return sections_of((ROOT / page).read_text())


# How the pages write numbers and rows.


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def rate(value: float) -> str:
    """0.0025 is 2.5e-3."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def two_digits(value: float) -> str:
    """0.0109 is 0.011, and 0.00000251 is 2.5e-6."""
    return re.sub(r"e([+-])0+", r"e\1", f"{value:.2g}")


def share(value: float) -> str:
    """In percent, with a decimal below one."""
    return f"{value:.1%}" if value < 0.01 else f"{value:.0%}"


def listed(values: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = values
    return f"{', '.join(first)} and {last}" if first else last


def both_sides(layers: int) -> str:
    return f"{layers}L-{layers}L"


# docs/results.md


def propagation_cells(results: Data, recipe: str) -> dict[str, str]:
    rows = {each["layers"]: each for each in results["rows"] if each["recipe"] == recipe}
    ratios = rows[1000]["gradient_ratios"]
    changes = {f"change {layers}": share(fmean(rows[layers]["updates"])) for layers in (6, 200)}
    return {"gradient": f"{two_digits(min(ratios))} to {two_digits(max(ratios))}", **changes}


@section("DeepNorm's gradient is the same", "propagation/results.json", given=("Adam step of 1e-4", "dim 32"))
def start_of_training(results: Data) -> Pieces:
    yield "the first and the last of 1,000 layers"
    yield f"{word(len(results['seeds']))} seeds"
    yield row("recipe", "gradient, 1,000 layers", "change of the output, 6 layers", "change of the output, 200 layers")
    for recipe in ("deepnorm", "sub_ln", "pre_ln", "post_ln"):
        yield row(SHOWN[recipe], *propagation_cells(results, recipe).values())


def said(run: Data) -> tuple[str, float]:
    """Depth and millions of parameters, as the run printed them: 500L-500L, 923.6."""
    found = re.search(r"(\d+L-\d+L), ([\d.]+) M", run["said"][0])
    assert found is not None
    return found[1], float(found[2])


@section(
    "A thousand layers train",
    "translation/thousand-deepnorm-500L.json",
    "translation/thousand-post_ln-500L.json",
    "translation/thousand-deepnorm-6L.json",
)
def thousand_layers(deep: Data, post_ln: Data, shallow: Data) -> Pieces:
    (depth, millions), losses = said(deep), dict(deep["valid"])
    step, loss = post_ln["train"][-1]
    spread = max(each["spread"]["gradient"]["encoder"] for each in deep["gradients"])
    first = post_ln["gradients"][0]
    yield f"{depth}, dim 256"
    yield f"{millions:.0f}M parameters"
    yield f"{deep['steps']:,} steps, one seed"
    yield f"a DeepNorm {said(shallow)[0]} reaches {dict(shallow['valid'])[1500]:.2f}"
    heads = ("validation loss at step 700", f"at step {deep['steps']:,}")
    yield row("", *heads, "largest over smallest gradient of the encoder's layers")
    yield row(
        f"DeepNorm {depth}", f"{losses[700]:.2f}", f"{losses[deep['steps']]:.2f}", f"at most {math.ceil(10 * spread) / 10}"
    )
    ended = f"training loss {loss:.2f} at step {step}, where it was stopped"
    at_first = f"{float(format(first['spread']['gradient']['encoder'], '.1g')):,.0f} at step {first['step']}"
    yield row(f"Post-LN {said(post_ln)[0]}", ended, "", at_first)


class MethodsByDepth:
    """The runs of deepnet-table1."""

    def __init__(self, document: Data) -> None:
        found = document["found"]
        self.chosen: list[Data] = found["runs"]
        self.runs: list[Data] = [*found["runs"], *found["not_chosen"], *document.get("not_asked", [])]
        self.methods = list(dict.fromkeys(map(self.method, self.chosen)))
        self.depths = sorted({run["options"]["layers"] for run in self.chosen})

    @staticmethod
    def method(run: Data) -> str:
        recipe = run["options"]["model.recipe"]
        return recipe if isinstance(recipe, str) else recipe["name"]

    def of(self, runs: Iterable[Data], method: str, layers: int, lr: float | None = None) -> list[Data]:
        """By seed, without those that have not been trained."""
        own = [run for run in runs if self.method(run) == method and run["options"]["layers"] == layers]
        own = [run for run in own if run["outcome"] != "waiting" and lr in (None, run["options"]["train.lr"])]
        return sorted(own, key=lambda run: run["options"]["train.seed"])

    def at(self, method: str, layers: int, lr: float) -> list[Data]:
        return self.of(self.runs, method, layers, lr)

    def best(self, method: str, layers: int) -> list[Data]:
        """The runs at the chosen rate; none while a run of the cell waits."""
        own = [run for run in self.chosen if self.method(run) == method and run["options"]["layers"] == layers]
        return [] if any(run["outcome"] == "waiting" for run in own) else own

    def mean(self, name: str, method: str, layers: int, lr: float | None = None) -> float:
        """The mean of the seeds at a rate, or at the chosen one."""
        return fmean(run[name] for run in (self.best(method, layers) if lr is None else self.at(method, layers, lr)))

    def cell(self, method: str, layers: int) -> str:
        """Loss and BLEU at the chosen rate; the outcome, if a seed did not live; - if it is not known."""
        runs = self.best(method, layers)
        if not runs:
            return "-"
        if dead := [run for run in runs if run["outcome"] != "finished"]:
            return dead[0]["text"]
        chosen = rate(runs[0]["options"]["train.lr"])
        return f"{self.mean('loss', method, layers):.3f}, {self.mean('bleu', method, layers):.1f} ({chosen})"

    def rows(self) -> Pieces:
        """The methods of which a cell is known."""
        yield row("", *map(both_sides, self.depths))
        for method in self.methods:
            cells = [self.cell(method, layers) for layers in self.depths]
            if set(cells) != {"-"}:
                yield row(SHOWN[method], *cells)

    def losses(self, method: str, layers: Sequence[int], lr: float) -> str:
        return listed(f"{self.mean('loss', method, each, lr):.2f}" for each in layers)


WARMUP_OF_TABLE1 = 400


@section(
    "methods at",
    "reproduce/deepnet-table1.json",
    given=("dropout 0.1", "the two best have three seeds", "the papers' warm-ups rise by 1e-7 to 4e-7"),
)
def methods_by_depth(document: Data) -> Pieces:
    table = MethodsByDepth(document)
    loss = table.mean
    setting = re.search(r"dim .* warm-up", document["setting"])
    assert setting is not None
    yield f"{word(len(table.methods)).capitalize()} methods at {table.depths[0]} to {table.depths[-1]} layers per side"
    yield re.findall(r"Table \d+", document["source"])[0]
    yield setting[0]
    yield re.findall(r"differ by factors of \d", document["setting"])[0]
    yield f"of {word(len(table.best('deepnorm', 6)))} seeds, and the learning rate"
    yield from table.rows()

    yield f"Pre-LN {loss('loss', 'pre_ln', 50) - loss('loss', 'pre_ln', 6):.1f} nats from 6 to 50 layers per side"
    yield f"DeepNorm at 50 layers is within {loss('loss', 'deepnorm', 50) - loss('loss', 'deepnorm', 6):.2f} of its 6 layers"
    yield f"{loss('bleu', 'deepnorm', 50) - loss('bleu', 'pre_ln', 50):.0f} BLEU ahead of Pre-LN"

    tried = table.at("deepnorm", 18, 2e-3)
    living = [run["loss"] for run in tried if run["outcome"] == "finished"]
    (dead,) = [run["loss"] for run in tried if run["outcome"] == "dead"]
    yield f"At 18L-18L {word(len(living))} of {word(len(tried))} seeds of DeepNorm at 2e-3"
    yield f"reach {listed(f'{each:.2f}' for each in living)}, and one is dead at the end ({dead:.2f})"
    yield f"so that {rate(table.best('deepnorm', 18)[0]['options']['train.lr'])} is chosen"
    yield f"a warm-up of {WARMUP_OF_TABLE1} steps, which rises by {rate(2e-3 / WARMUP_OF_TABLE1)} per step"
    assert all(run["outcome"] == "dead" for run in table.at("deepnorm", 50, 2e-3))
    yield f"At 50L-50L it lives at 1e-3 ({rate(1e-3 / WARMUP_OF_TABLE1)} per step) with all seeds, and dies at 2e-3"

    depths = (6, 18, 50)
    yield f"At one rate, 1e-3, DeepNorm has {table.losses('deepnorm', depths, 1e-3)}"
    yield f"at {listed(map(str, depths))} layers per side, and Pre-LN {table.losses('pre_ln', depths, 1e-3)}"

    runs = [run for method in ("post_ln", "ds_init") for run in table.of(table.runs, method, 100)]
    rates = sorted({run["options"]["train.lr"] for run in runs})
    assert all(run["outcome"] == "dead" for run in runs)
    yield f"At 100L-100L, one seed, Post-LN and DS-Init are dead at all of {listed(map(rate, rates))}"
    yield f"Pre-LN reaches {loss('loss', 'pre_ln', 100, 1e-3):.2f} at 1e-3"
    yield f"Admin {loss('loss', 'admin', 100, 5e-4):.2f} at 5e-4"

    best = {"rezero": 4e-3, "r_fixup": 4e-3, "t_fixup": 1e-3, "dlcl": 4e-3}
    runs = [run for method in best for run in table.of(table.runs, method, 50)]
    (seeds,) = {len(table.at(method, 50, lr)) for method, lr in best.items()}
    rates = sorted({run["options"]["train.lr"] for run in runs})
    yield f"at some of {listed(map(rate, rates))} ({word(seeds)} seeds at the best)"
    reached = [f"{loss('loss', method, 50, lr):.2f}" for method, lr in best.items()]
    yield f"at 50L-50L they reach {listed(reached)}"
    yield f"take {rate(max(best.values()))} at that depth"


@section(
    "With a slower warm-up",
    "depth/slow-warmup.json",
    given=("2,500 of them for warm-up", "500 test sentences"),
)
def slow_warmup(document: Data) -> Pieces:
    runs = {run["name"]: run for run in document["runs"]}
    rates = sorted({run["options"]["train.lr"] for run in runs.values()})
    (layers,) = {run["options"]["layers"] for run in runs.values()}
    (steps,) = {run["valid"][-1]["step"] for run in runs.values()}
    difference = next(each for each in document["against_dlcl_at_4e-3"] if each["run"] == "deepnorm-50L-lr0.001")
    yield f"{both_sides(layers)} of DeepNorm and of DLCL are ahead"
    yield f"at {both_sides(layers)}, but {steps:,} steps"
    yield "DLCL at 4e-3 has the lowest loss"
    yield f"it is {-difference['difference']['value']:.1f} above DeepNorm at 1e-3"
    yield f"one-sided p = {difference['p_value']:.2f}"
    yield row("", *map(rate, rates))
    found = [
        (SHOWN[recipe], *(runs[f"{recipe}-{layers}L-lr{each:g}"] for each in rates))
        for recipe in ("dlcl", "deepnorm", "rezero", "pre_ln")
    ]
    assert min(runs.values(), key=lambda run: run["valid"][-1]["loss"])["name"] == "dlcl-50L-lr0.004"
    for name, *own in found:
        yield row(name, *(f"{run['valid'][-1]['loss']:.2f}, {run['bleu']:.1f}" for run in own))


@cache
def dead_table() -> Data:
    """The functions of benchmarks/dead/table.py, and its runs."""
    names = runpy.run_path(str(ROOT / "benchmarks/dead/table.py"))
    return {**names, "runs": names["every_run"]()}


@section(
    "A run that recovers is not ended",
    "dead/runs.json",
    "reproduce/deepnet-table1.json",
    given=("rates by factors of 2",),
)
def dying_stacks(_: Data, __: Data) -> Pieces:
    table = dead_table()
    runs = table["runs"]
    fit, test = ([run for run in runs if run["set"] == name] for name in ("fit", "test"))
    wrong, found, early = table["errors"](test)
    living, died = table["living"](test), table["died"](test)
    late = [run for run in died if not table["low_at"](run, DEAD, 0.5)]
    (short, low), (long, high) = DYING
    layers, warmups = ({run[name] for run in runs} for name in ("layers", "warmup"))
    yield f"below {rate(DEAD)} over the last tenth"
    yield f"below {as_fraction(low)} for {short:.0%} of the steps, or below {as_fraction(high)} for {long:.0%}"
    yield f"chosen on {len(fit)} runs that went to their end, and tested on {len(test)} others"
    yield f"{min(layers)} to {max(layers)} layers, {word(len({run['task'] for run in runs}))} tasks"
    yield f"{100 * min(warmups):.0f} to {max(warmups):.0%} of the steps"
    yield row("living", str(len(living)), f"{wrong} (at most {table['bound'](len(living)):.1%}, with 95% confidence)")
    yield row("dead at the end", str(len(died)), f"{found}, {early} of them in the first half of the run")
    yield f"{word(len(late)).capitalize()} of the dead were never below {rate(DEAD)}"
    for level, seen, recovered in table["levels"](runs):
        yield row(as_fraction(level), str(seen), str(recovered))


@section("gains from a higher learning rate", "reproduce/deepnet-figure7.json", given=("DeepNorm 18L-18L",))
def figure7(document: Data) -> Pieces:
    found = document["found"]
    runs = [run for own in found.values() for run in own]
    setting = re.search(
        r"dim (\d+), ([\d,]+) tokens and (\S+) with one changed.*; ([\d,]+ steps, \d+ of them)", document["setting"]
    )
    assert setting is not None
    assert document["verdict"] == "held"
    assert all(run["outcome"] == "finished" for run in runs)
    yield re.findall(r"Figure \d+", document["source"])[0]
    yield f"{setting[4]} for warm-up, mean of {word(len({run['options']['train.seed'] for run in runs}))} seeds"
    yield f"from a learning rate of {setting[3]}, {setting[2]} tokens and dim {setting[1]}"
    yield f"All {word(len(runs))} runs live"
    columns = []
    for option, shown in (("train.lr", rate), ("batches.tokens", "{:,}".format), ("model.dim", str)):
        own: dict[Any, list[Data]] = {}
        for run in found[option]:
            own.setdefault(run["options"][option], []).append(run)
        cells = [(shown(value), f"{mean(runs, 'loss'):.2f}, {mean(runs, 'bleu'):.1f}") for value, runs in own.items()]
        columns.append([("", "")] * (4 - len(cells)) + cells)
    for cells in zip(*columns, strict=True):
        yield row(*(text for pair in cells for text in pair))


def mean(runs: Iterable[Data], name: str) -> float:
    return fmean(run[name] for run in runs)


def bleu_of_seeds(runs: Data, system: str, score: str) -> list[str]:
    return [f"{run['scores'][score]['value']:.1f}" for name, run in sorted(runs.items()) if name.startswith(f"{system}-seed")]


@section(
    "BLEU on Multi30k",
    "translation/tokenised-final.json",
    "translation/multi30k-final.json",
    given=("reached 41.0 (Wu et al. 2021)",),
)
def multi30k(tokenised: Data, cased: Data) -> Pieces:
    systems = (("Post-LN", "post_ln", 4), ("DeepNorm", "deepnorm", 4), ("DeepNorm", "deepnorm", 12))
    scores = {
        (recipe, layers): bleu_of_seeds(tokenised["runs"], f"{recipe}-{layers}L", "bleu_tokens")
        for _, recipe, layers in systems
    }
    ours = [[*map(float, own)] for (recipe, _), own in scores.items() if recipe == "deepnorm"]
    (goal,) = {f"{fmean(own):.0f}" for own in ours}
    yield f"DeepNorm 4L-4L and 12L-12L reach {goal} BLEU"
    yield f"lower-cased tokens, {word(len(ours[0]))} seeds"
    yield f"DeepNorm 18L-18L has {listed(bleu_of_seeds(cased['runs'], 'deepnorm-18L', 'bleu'))}"
    yield row("", f"BLEU, {word(len(ours[0]))} seeds")
    for name, recipe, layers in systems:
        yield row(f"{name} {both_sides(layers)}", ", ".join(scores[recipe, layers]))


@section("One command trains", "translation/multilingual.json", given=("DeepNorm 18L-18L",))
def multilingual(document: Data) -> Pieces:
    directions = list(document["directions"])
    languages = {part for each in directions for part in each.split("-")} - {"eng"}
    minutes, seconds = divmod(document["training"]["seconds"], 60)
    yield f"trains {len(directions)} directions"
    yield f"{len(languages)} languages with English"
    yield f"{document['training']['scored_step']:,} steps in {minutes:.0f} min {seconds:.0f} s"
    for name, score in (("BLEU", "bleu"), ("chrF++", "chrf")):
        yield row(name, *(f"{fmean(own):.1f}" for own in by_side(document["directions"], score)))


def by_side(directions: Data, score: str) -> list[list[float]]:
    """Into English, out of it, and both."""
    into = [each[score] for name, each in directions.items() if name.endswith("-eng")]
    out = [each[score] for name, each in directions.items() if name.startswith("eng-")]
    return [into, out, into + out]


class Speed:
    """The runs of benchmarks/speed in which systems ran beside ours."""

    def __init__(self, document: Data) -> None:
        self.by_name = {name: run for run in document["runs"] for name in run["jobs"] if "ms" in run["jobs"][name]}

    def job(self, name: str) -> Data:
        """A measurement, of the last run that has it."""
        return self.by_name[name]["jobs"][name]

    def whole(self, name: str) -> str:
        """Milliseconds without decimals."""
        return f"{self.job(name)['ms']:.0f}"

    def memory(self, name: str) -> str:
        return f"{self.job(name)['gigabytes']:.1f} GB"

    def ours_beside(self, name: str, ours: str = "kilolayer") -> float:
        """Our time in the run that measured a peer, with dropout if the peer had it."""
        variant = ", dropout" if name.endswith(", dropout") else ""
        return self.by_name[name]["jobs"][ours + variant]["ms"]

    def times(self, name: str, ours: str = "kilolayer") -> float:
        return self.job(name)["ms"] / self.ours_beside(name, ours)


PEERS = {
    "nn.Transformer in one graph": "torch.nn.Transformer, compiled, in one CUDA graph",
    "nn.Transformer compiled": "torch.nn.Transformer, compiled",
    "nn.Transformer": "torch.nn.Transformer",
}


@section(
    "the best that torch's users can have",
    "speed/results.json",
    given=("100L-100L, dim 512, 64 x 64 tokens per side, dropout 0.1", "24 layers, dim 1024, 32 x 1,024 tokens, dropout 0.1"),
)
def training_steps(document: Data) -> Pieces:
    speed = Speed(document)
    torchscale = f"TorchScale {speed.by_name['torchscale, dropout']['versions']['torchscale']}"
    peers = {**PEERS, "torchscale": torchscale}
    strongest, other = (f"{name}, dropout" for name in ("nn.Transformer in one graph", "torchscale"))
    (beside,) = {speed.ours_beside(f"{name}, dropout") for name in list(peers)[1:]}
    yield f"A training step at 100L-100L is {speed.times(strongest):.1f} times as fast"
    yield f"and {speed.times(other):.0f} times as TorchScale's"
    yield f"The first {word(2)} rows are of one run, the others of another, in which ours took {beside:.1f} ms"
    assert speed.by_name[strongest] is speed.by_name["kilolayer, dropout"]
    yield f"Without dropout Kilolayer takes {speed.by_name[strongest]['jobs']['kilolayer']['ms']:.1f} ms"
    yield f"the others {listed(map(speed.whole, peers))} ms"
    yield row("Kilolayer", f"{speed.job('kilolayer, dropout')['ms']:.1f} ms", "", speed.memory("kilolayer, dropout"))
    for name, shown in peers.items():
        job = f"{name}, dropout"
        yield row(shown, f"{speed.whole(job)} ms", f"{speed.times(job):.2f}", speed.memory(job))
    for name, shown in (
        ("kilolayer language", "Kilolayer"),
        ("x-transformers compiled", "x-transformers, compiled"),
        ("gpt2 compiled", "Hugging Face's GPT-2, compiled"),
    ):
        yield row(shown, f"{speed.whole(f'{name}, dropout')} ms", speed.memory(f"{name}, dropout"))
    missed = [text for text, (least, most, value) in goals_of(document).items() if not least <= value <= most]
    wanted, flat, near = (goals_of(document)[text] for text in MISSED)
    assert sorted(missed) == sorted(MISSED)
    dropout = speed.times("x-transformers compiled, dropout", "kilolayer language")
    yield f"{word(len(missed)).capitalize()} of its goals were missed"
    yield f"to be {wanted[0]} times as fast as x-transformers ({wanted[2]:.2f}, and {dropout:.2f} with dropout)"
    yield f"within {near[1] - 1:.0%} of Pre-LN's time ({near[2] - 1:.0%})"
    yield f"the time per layer constant within {flat[1] - 1:.0%} from 25 to 500 layers per side ({flat[2] - 1:.0%})"


MISSED = (
    "times x-transformers compiled (at least 1.2)",
    "largest over smallest time of a layer, vocabulary and all (at most 1.1)",
    "sub_ln over pre_ln (at most 1.08)",
)


def goals_of(document: Data) -> dict[str, tuple[float, float, float]]:
    """The goals with a bound, by their words: the least and the most that was wanted, and what the last run has."""
    found = {}
    for text, value in [goal for run in document["runs"] for goals in run["goals"].values() for goal in goals.items()]:
        bound = re.search(r"\((at least|at most|below) ([\d.]+)\)", text)
        if bound is not None and value is not None:
            limit = float(bound[2])
            found[text] = (limit, float("inf"), value) if bound[1] == "at least" else (0.0, limit, value)
    return found


@section("A masked language model's step", "understanding/masked_speed.json")
def masked_steps(document: Data) -> Pieces:
    without, with_dropout = sorted(document["results"], key=lambda result: result["setting"]["dropout"])
    setting = with_dropout["setting"]
    (times,) = {f"{result['times_faster_than']['bert']:.1f}" for result in (without, with_dropout)}
    yield f"{times} times as fast as BERT's"
    yield f"{setting['layers']} layers, dim {setting['dim']}, {setting['rows']} rows of {setting['length']} tokens"
    yield row("", f"dropout {setting['dropout']}", "memory", "no dropout", "memory")
    for name, shown in (
        ("ours", "Kilolayer"),
        ("bert", "Hugging Face's BertForMaskedLM, compiled"),
        ("bert, masked places", "the same, scores at masked positions only"),
    ):
        systems = [result["systems"][name] for result in (with_dropout, without)]
        cells = [(f"{each['ms']:.1f} ms", f"{max(used['gigabytes'] for used in each['rounds']):.1f} GB") for each in systems]
        yield row(shown, *(text for pair in cells for text in pair))


@section("Likelihoods are scored", "understanding/likelihood.json")
def likelihoods(document: Data) -> Pieces:
    plain, few = document["rows"]
    model, seconds = (
        document["model"],
        {name: [median(each["seconds"][name]) for each in (plain, few)] for name in ("ours", "lm-eval")},
    )
    times = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["lm-eval"], strict=True)]
    assert all(each["same_answers"] == each["questions"] for each in (plain, few))
    worst = max(each["largest_difference"] for each in (plain, few))
    yield f"{times[0]:.1f} times as fast as by lm-eval, {times[1]:.1f} times with {word(few['shots'])} examples"
    yield f"{model['layers']} layers, dim {model['dim']}, the same weights in both"
    yield re.sub(r".*?(\d) cores.*", lambda found: f"{word(int(found[1]))} CPU cores", document["hardware"])
    yield f"median of {word(len(plain['seconds']['ours']))} rounds"
    yield f"All {plain['questions'] + few['questions']} answers are the same"
    yield f"at most {worst:.0e}".replace("e-0", "e-")
    yield row(
        "", f"{plain['questions']} questions, no examples", f"{few['questions']} questions, {word(few['shots'])} examples"
    )
    yield row("Kilolayer", *(f"{each:.1f} s" for each in seconds["ours"]))
    yield row("lm-eval's Hugging Face backend", *(f"{each:.1f} s" for each in seconds["lm-eval"]))


@section(
    "decoding gives the same tokens",
    "decoding/trained.json",
    "decoding/ctranslate2.json",
    "decoding/ctranslate2_int8.json",
    given=("DeepNorm 18L-18L, dim 512", "beam 5"),
)
def decoding(trained: Data, fp32: Data, int8: Data) -> Pieces:
    def cells(name: str) -> tuple[str, str]:
        own = trained["systems"][name]
        return f"{own['bleu']:.2f}", f"{own['sentences_per_second']:.0f}"

    equal, sentences = trained["equal"], f"{trained['sentences']:,}"
    assert equal["ours fp32, theirs fp32"] == 1
    yield f"{sentences} sentences with"
    yield row("Kilolayer, fp32", *cells("ours fp32"), f"all {sentences} equal Hugging Face's")
    yield row("Hugging Face `generate`, fp32", *cells("theirs fp32"), "")
    yield row("Kilolayer, bf16", *cells("ours bf16"), f"{equal['ours bf16, ours fp32']:.1%}")
    yield row("Hugging Face `generate`, bf16", *cells("theirs bf16"), f"{equal['theirs bf16, theirs fp32']:.1%}")

    times = [each["times_ctranslate2"] for each in fp32["rows"]]
    greedy = [each["seconds"] for each in int8["rows"] if each["beam"] == 1]
    slower = [each["ctranslate2 int8"] / each["ours int8"] for each in greedy]
    yield re.sub(r".*?(\d) cores.*", lambda found: f"On {word(int(found[1]))} CPU cores", fp32["hardware"])
    yield f"{min(times):.2f} to {max(times):.2f} times as fast"
    yield f"{min(slower):.2f} to {max(slower):.2f} times;"


MASKED_WARMUP = 120


@section(
    "Masked language models",
    "understanding/masked-sweep.json",
    "understanding/masked-train.json",
    "understanding/glue.json",
    given=("12 layers, dim 256", "in the paper it trains at 5e-4"),
)
def masked_models(sweep: Data, train: Data, glue: Data) -> Pieces:
    def trains(run: Data) -> bool:
        """As in masked.md: at least 0.5 below the loss of token frequencies."""
        return run["valid"][-1]["loss"] <= sweep["unigram_loss"] - 0.5

    recipes = ("pre_ln", "normformer", "sub_ln", "deepnorm")
    best = {run["recipe"]: run for run in train["runs"].values()}
    (steps,) = {run["steps"] for run in best.values()}
    lowest = min(run["rate"] for run in sweep["runs"].values())
    seeds = {recipe: seeds_on(glue, recipe, "SST-2") for recipe in recipes}
    fewer = [SHOWN[recipe] for recipe, count in seeds.items() if count == 2]
    assert not any(trains(run) for run in sweep["runs"].values() if run["recipe"] == "post_ln")
    yield f"a warm-up of {MASKED_WARMUP} steps, which is steep ({lowest / MASKED_WARMUP:.0e} per step and more)".replace(
        "e-0", "e-"
    )
    yield f"over {word(seeds_on(glue, 'deepnorm', 'CoLA'))} fine-tunings ({word(2)} on SST-2 for {listed(fewer)};"
    yield row("recipe", "largest learning rate that trains", f"loss after {steps:,} steps", "GLUE")
    for recipe in recipes:
        largest = max(run["rate"] for run in sweep["runs"].values() if run["recipe"] == recipe and trains(run))
        yield row(SHOWN[recipe], rate(largest), f"{best[recipe]['valid'][-1]['loss']:.2f}", f"{glue_average(glue, recipe):.1f}")


def glue_scores(glue: Data, recipe: str, task: str) -> dict[float, list[float]]:
    by_rate: dict[float, list[float]] = {}
    for result in glue["results"]:
        if (result["recipe"], result["task"]) == (recipe, task):
            by_rate.setdefault(result["lr"], []).append(result["score"])
    return by_rate


def seeds_on(glue: Data, recipe: str, task: str) -> int:
    return max(map(len, glue_scores(glue, recipe, task).values()))


def glue_average(glue: Data, recipe: str) -> float:
    """The mean over tasks of the best rate's mean over seeds."""
    tasks = glue["settings"]["tasks"].split(",")
    return fmean(max(map(fmean, glue_scores(glue, recipe, task).values())) for task in tasks)


@section("Small language models", "depth/language.json")
def language_models(document: Data) -> Pieces:
    runs, speed = list(document["runs"].values()), document["speed"]
    recipes, depths = ("pre_ln", "sub_ln", "deepnorm"), (12, 24, 48, 96)
    widths = dict(zip(depths, (512, 384, 256, 192), strict=True))
    (steps,) = {run["steps"] for run in runs}
    (tokens,) = {each["tokens"] for each in speed.values()}

    def losses(model: str) -> list[float]:
        """Of the seeds at the rate that is best with the first one."""
        own = [run for run in runs if run["model"] == model]
        best = min((run for run in own if run["seed"] == 1), key=lambda run: run["valid"][-1]["loss"])
        return [run["valid"][-1]["loss"] for run in own if run["rate"] == best["rate"]]

    def first_loss(model: str) -> float:
        return losses(model)[0]

    def rows(model: Callable[[int, str], str], loss: Callable[[str], float]) -> Pieces:
        for recipe in recipes:
            yield row(SHOWN[recipe], *(f"{loss(model(layers, recipe)):.3f}" for layers in depths))
        yield row("ms per step, DeepNorm", *(f"{speed[model(layers, 'deepnorm')]['ms']:.1f}" for layers in depths))

    def fixed(layers: int, recipe: str) -> str:
        return f"{layers}L-d256-{recipe}"

    def equal(layers: int, recipe: str) -> str:
        return f"{layers}L-d{widths[layers]}-{recipe}"

    found = [losses(fixed(layers, recipe)) for layers in depths for recipe in recipes]
    (seeds,) = set(map(len, found))
    yield f"after {steps} steps of {tokens:,} tokens"
    yield f"At one width, dim 256, the numbers are means of {word(seeds)} seeds"
    yield f"differ by at most {max(max(each) - min(each) for each in found):.2f}:"
    yield row("", "12 layers", *map(str, depths[1:]))
    yield from rows(fixed, lambda model: fmean(losses(model)))

    (weights,) = {f"{speed[equal(layers, recipe)]['without_tables'] / 1e6:.0f}" for layers in depths for recipe in recipes}
    yield f"{weights} million without the embedding tables"
    yield row("", *(f"{layers}{' layers' * (layers == 12)}, dim {width}" for layers, width in widths.items()))
    yield from rows(equal, first_loss)

    lost = {recipe: first_loss(equal(96, recipe)) - first_loss(equal(12, recipe)) for recipe in recipes}
    gains = {
        recipe: [layers for layers in depths[1:] if first_loss(equal(layers, recipe)) < first_loss(equal(12, recipe))]
        for recipe in recipes
    }
    assert gains == {"pre_ln": [], "sub_ln": [], "deepnorm": [24]}
    yield "only DeepNorm gains from depth, from 12 to 24 layers"
    yield f"by 96: {lost['deepnorm']:.2f}, where Pre-LN loses {lost['pre_ln']:.2f} and Sub-LN {lost['sub_ln']:.2f}"
    assert {run["recipe"] for run in runs if run["rate"] == 4e-3 and run["outcome"] == "finished"} == {"pre_ln", "sub_ln"}
    assert any(run["recipe"] == "deepnorm" for run in runs if run["rate"] == 4e-3)
    yield f"DeepNorm does not train at a learning rate of {rate(4e-3)}"
    yield f"the other {word(len(recipes) - 1)} do"
    enwik8 = {name[:2]: each["bits_per_byte"] for name, each in read("depth/enwik8.json")["scores"].items()}
    assert enwik8["24"] < enwik8["12"]
    yield "24 layers of Pre-LN are better than 12 (next table)"


@section(
    "bits per byte on enwik8",
    "depth/enwik8.json",
    given=(
        "| character Transformer, 12 layers (Al-Rfou et al. 2018, arXiv:1808.04444) | 44 M | 1.11 |",
        "| character Transformer, 64 layers (Al-Rfou et al. 2018) | 235 M | 1.06 |",
        "| Transformer-XL, 12 layers (Dai et al. 2019, arXiv:1901.02860) | 41 M | 1.06 |",
        "| Transformer-XL, 24 layers (Dai et al. 2019) | 277 M | 0.99 |",
    ),
)
def enwik8(document: Data) -> Pieces:
    dims = {12: 768, 24: 512}
    models = {layers: f"{layers}L-75M-pre_ln-lr0.001" for layers in dims}
    score = {layers: document["scores"][name]["bits_per_byte"] for layers, name in models.items()}
    commands = [each for each in document["commands"] if f"train OUT --config {models[24]}" in each]
    (minutes,) = {int(re.findall(r"--seconds (\d+)", each)[0]) // 60 for each in commands}
    test = re.findall(r"bytes:(\d+)", document["scores"][models[24]]["signature"])[0]
    assert score[24] < score[12]
    yield f"{len(commands) * minutes} minutes of one H200 give {score[24]:.3f} bits per byte"
    yield "24 layers are better than 12"
    yield f"{word(len(commands))} commands of {minutes} minutes"
    yield f"{int(test) / 1e6:.0f} million bytes"
    for layers, name in models.items():
        weights = f"{document['plans'][name]['parameters'] / 1e6:.0f} M"
        yield row(
            f"Kilolayer, {layers} layers, dim {dims[layers]}, {len(commands) * minutes} minutes",
            weights,
            f"{score[layers]:.3f}",
        )


@section("experts help per step", "sparse/language.json", "sparse/translation.json")
def experts(language: Data, translation: Data) -> Pieces:
    def cells(document: Data, name: str) -> tuple[str, str]:
        if name not in document["runs"]:
            return "", ""
        run = document["runs"][name]
        return f"{run['valid'][-1][3]:.1f}", f"{1000 * run['seconds_per_step']:.1f}"

    (steps,) = {run["steps"] for document in (language, translation) for run in document["runs"].values()}
    layers = [re.findall(r" (\S+L),", document["runs"]["dense"]["said"][0])[0] for document in (language, translation)]
    yield f"after {steps:,} steps"
    yield row("", f"language model, {layers[0][:-1]} layers", "ms per step", f"translator, {layers[1]}", "ms per step")
    for name, shown in (
        ("dense", "dense"),
        ("16", "16 experts"),
        ("64", "64 experts"),
        ("256", "256 experts, SparseClip"),
        ("256 plain clipping", "256 experts, plain clipping"),
    ):
        yield row(shown, *cells(language, name), *cells(translation, name))


@section("Adapted by `kl.adapt`", "adapt/deep.json")
def adapted(document: Data) -> Pieces:
    runs = document["runs"]
    (layers,), (dim,), (steps,) = ({run[name] for run in runs} for name in ("layers", "dim", "steps"))
    yield f"a {layers}-layer BERT and a {both_sides(layers)} Marian"
    yield f"dim {dim}, {steps} steps"
    both, single = (listed(map(str, seeds_of(runs, model))) for model in ("bert", "marian"))
    yield f"seeds {both} (Marian: only seed {single})"
    for model, shown in (("bert", "BERT"), ("marian", "Marian"), ("gpt2", "GPT-2")):
        own = [run for run in runs if run["model"] == model]
        (lr,), (frequencies,) = ({run[name] for run in own} for name in ("lr", "frequencies"))
        without, with_recipe = (
            ", ".join(f"{run['valid'][str(steps)]:.2f}" for run in own if (run["recipe"] is None) == is_plain)
            for is_plain in (True, False)
        )
        yield row(f"{shown}, {rate(lr)}", without, with_recipe, f"{frequencies:.2f}")


def seeds_of(runs: Iterable[Data], model: str) -> list[int]:
    return sorted({run["seed"] for run in runs if run["model"] == model})


@section("Exported models", "export/same_sentences.json", "export/remote_class.json")
def exported(same: Data, remote: Data) -> Pieces:
    (depth,), (dim,) = ({re.findall(found, each["model"])[0] for each in same["rows"]} for found in (r"^\d+L-\d+L", r"dim \d+"))
    (sentences,) = {same["sentences"], *(each["sentences"] for each in remote["rows"])}
    beams = [f"beam {beam}" for beam in same["rows"][0]["systems"]["transformers"]["equal"] if beam != "1"]
    yield f"Trained {depth} translators ({dim}"
    yield f"{sentences:,} unseen sentences"
    yield f"The first {word(len(same['rows']))} were loaded"
    yield row("recipe", "class in Transformers", "Transformers, greedy", *beams, "CTranslate2, greedy", *beams)
    for each in same["rows"]:
        systems = [each["systems"][name] for name in ("transformers", "ctranslate2")]
        counts = [f"{count:,}" for system in systems for count in system["equal"].values()]
        yield row(SHOWN[each["run"]], f"`{systems[0]['architecture']}`", *counts)
    for each in remote["rows"]:
        counts = [f"{count:,}" for count in each["equal"].values()]
        yield row(SHOWN[each["run"]], f"`{each['architecture']}`", *counts, "not supported", "not supported")


@section("Predicted training memory", "plan/results.json")
def predicted_memory(document: Data) -> Pieces:
    cases = document["cases"]
    low = [1 - each["ratio"] for each in cases.values()]
    layers = [int(each) for each in re.findall(r" (\d+)L", " ".join(cases))]
    recipes = {name for name in kl.recipes.names() if f"kilolayer {name}" in cases} | {"deepnorm"}
    yield f"{100 * min(low):.0f} to {max(low):.0%} too low"
    yield f"{word(len(cases))} training jobs"
    yield f"{min(layers)} to {max(layers)} layers per stack, {word(len(recipes))} recipes"


# README.md


@section(
    "Kilolayer",
    given=("1,000 layers", "Python 3.11", "PyTorch 2.11 to 2.13"),
    page=README,
)
def first_words() -> Pieces:
    compared = {*MethodsByDepth(read("reproduce/deepnet-table1.json")).methods, "sub_ln", "post_ln_init"}
    yield f"{word(len(set(kl.recipes.names()) - compared))} others"


@section(
    "What a recipe does at depth",
    "propagation/results.json",
    "reproduce/deepnet-table1.json",
    "speed/results.json",
    "translation/thousand-deepnorm-500L.json",
    given=("Gradient by layer at 1,000 layers", "dropout 0.1", "for four recipes"),
    page=README,
)
def at_depth(propagation: Data, document: Data, measured: Data, thousand: Data) -> Pieces:
    of_last = "gradient of the first layers divided by that of the last, 1,000 layers"
    change = "change of the output after one Adam step of 1e-4, 200 layers"
    yield row("at the start of training, dim 32, random tokens", of_last, change)
    for recipe in ("post_ln", "deepnorm"):
        cells = propagation_cells(propagation, recipe)
        yield row(SHOWN[recipe], cells["gradient"], cells["change 200"])
    yield f"lowest and highest of {word(len(propagation['seeds']))} seeds"

    table = MethodsByDepth(document)
    lowest = [
        min(table.at("deepnorm", *each)[0]["stacks"]["encoder"], key=lambda check: check[1])[0]
        for each in ((18, 2e-3), (50, 1e-3))
    ]
    bleu = {method: table.mean("bleu", method, 50) for method in ("deepnorm", "pre_ln")}
    setting = re.search(r"(dim \d+), (.* steps) of .* tokens(, .* warm-up)", document["setting"])
    assert setting is not None
    yield f"falls for {min(lowest)} to {max(lowest)} steps and recovers"
    yield "".join((setting[1], ", ", setting[2], setting[3]))
    yield f"mean of {word(len(table.best('deepnorm', 6)))} seeds"
    yield re.findall(r"factors of \d", document["setting"])[0]
    yield f"with 50 layers per side it reaches {bleu['deepnorm']:.1f} BLEU and Pre-LN {bleu['pre_ln']:.1f}"
    assert table.mean("loss", "deepnorm", 6) > max(table.mean("loss", method, 6) for method in ("post_ln", "pre_ln"))
    yield "With 6 layers both are ahead of it"
    assert not any(table.best(method, 100) for method in table.methods)
    yield "100 layers and other methods are still to be trained"

    speed = Speed(measured)
    peers = ("kilolayer", "nn.Transformer in one graph", "torchscale")
    ours, graph, torchscale = (f"{speed.whole(f'{name}, dropout')} ms" for name in peers)
    yield f"A training step of 100 + 100 layers takes {ours}"
    yield f"takes {graph}, {speed.times('nn.Transformer in one graph, dropout'):.2f} times as long, and TorchScale {torchscale}"
    yield f"without dropout: {listed(map(speed.whole, peers))} ms"
    yield f"A DeepNorm model of {' + '.join(re.findall('[0-9]+', said(thousand)[0]))} layers"


# The tests


def numbered() -> list[tuple[str, str]]:
    """The sections with numbers in them, by page and heading."""
    return [(page, heading) for page in DERIVATIONS for heading, text in sections(page).items() if changed(plain(text))]


def derivation_of(page: str, heading: str) -> Derivation:
    found = [each for each in DERIVATIONS[page] if each.heading in heading]
    assert len(found) == 1, f"{page}, {heading}: {len(found)} derivations of its numbers, but there has to be one"
    return found[0]


@cache
def pieces_of(derivation: Derivation) -> list[str]:
    return derivation.all_pieces(read)


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_every_number_is_derived_from_the_files(page: str, heading: str) -> None:
    found = list(differences(plain(sections(page)[heading]), pieces_of(derivation_of(page, heading))))
    assert not found, "\n".join((f"{page}, {heading}", *found))


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_a_changed_number_is_noticed(page: str, heading: str) -> None:
    pieces = pieces_of(derivation_of(page, heading))
    for number, text in changed(plain(sections(page)[heading])):
        assert any(differences(text, pieces)), f"{page}, {heading}: another number in place of {number}"


@pytest.mark.parametrize(("page", "heading"), numbered())
def test_the_files_are_cited(page: str, heading: str) -> None:
    cited = links_of(sections(page)[heading])
    for file in derivation_of(page, heading).files:
        assert f"benchmarks/{file}" in cited, f"{page}, {heading}"


@pytest.mark.parametrize("page", DERIVATIONS)
def test_every_derivation_has_a_section(page: str) -> None:
    for derivation in DERIVATIONS[page]:
        assert any(derivation.heading in heading for heading in sections(page)), derivation.heading


def test_the_levels_of_fading_stacks_are_those_of_the_runs() -> None:
    table = dead_table()
    assert [(level.share, level.seen, level.recovered) for level in LEVELS] == table["levels"](table["runs"])
