"""Language models, masked ones, and experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import fmean

from tests.derivations.section import SHOWN, Data, Pieces, listed, rate, read, row, section, word

MASKED_WARMUP = 120


@section(
    "Masked language models",
    "understanding/masked-sweep.json",
    "understanding/masked-train.json",
    "understanding/glue.json",
    given=("in the paper it trains at 5e-4",),
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
    fewest = min(seeds.values())
    fewer = [SHOWN[recipe] for recipe, count in seeds.items() if count == fewest]
    assert not any(trains(run) for run in sweep["runs"].values() if run["recipe"] == "post_ln")
    model = read("understanding/masked.toml")["model"]
    yield f"{model['layers']} layers, dim {model['dim']}, books"
    yield f"a warm-up of {MASKED_WARMUP} steps, which is steep ({lowest / MASKED_WARMUP:.0e} per step and more)".replace(
        "e-0", "e-"
    )
    yield f"over {word(seeds_on(glue, 'deepnorm', 'CoLA'))} fine-tunings ({word(fewest)} on SST-2 for {listed(fewer)};"
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
