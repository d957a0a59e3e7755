"""Trained translators: scores, export and adaptation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import fmean

from tests.derivations.section import SHOWN, Data, Pieces, both_sides, listed, rate, row, section, word


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
