"""Very Deep Transformers: Admin by depth."""

from __future__ import annotations

import math
import re
from statistics import fmean
from typing import Any

import kilolayer as kl
from kilolayer.evaluate.stack_label import DEAD, LEVELS
from tests.derivations.section import Data, Pieces, listed, rate, row, section, two_digits

FOLDER = "reproduce/admin-"
LEARNING_RATE = r"learning rate (\S+),"


def sides(layers: str) -> str:
    """60-12 is 60L-12L."""
    return "-".join(f"{each}L" for each in layers.split("-"))


def by_depth(runs: list[Data]) -> dict[str, list[Data]]:
    """The seeds of each depth."""
    found: dict[str, list[Data]] = {}
    for run in sorted(runs, key=lambda run: run["options"]["train.seed"]):
        found.setdefault(run["options"]["layers"], []).append(run)
    return {str(run["options"]["layers"]): found[run["options"]["layers"]] for run in runs}


def weights(layers: str) -> str:
    encoder, decoder = map(int, layers.split("-"))
    recipe = kl.recipes.get("admin", start="released")
    config = kl.ModelConfig(
        dim=128, heads=4, ffn_dim=512, encoder_layers=encoder, decoder_layers=decoder, vocab_size=8000, recipe=recipe
    )
    model = kl.build_model(config, device="meta", seed=0)
    return f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}M"


def both(runs: list[Data], name: str, digits: int) -> str:
    return ", ".join(f"{run[name]:.{digits}f}" for run in runs)


def mean(runs: list[Data], name: str) -> float:
    return fmean(run[name] for run in runs)


def said(pattern: str, text: str) -> str:
    """What a sentence says at the first match of a pattern."""
    return str(re.findall(pattern, text)[0])


def encoder(run: Data) -> list[tuple[int, float]]:
    """The share of the largest layer's gradient that reaches the encoder's first layers, by step."""
    return [(step, share) for step, share in run["stacks"]["encoder"]]


@section(
    "learns where Post-LN dies",
    f"{FOLDER}table3.json",
    f"{FOLDER}figure2.json",
    f"{FOLDER}table1.json",
    f"{FOLDER}figure3.json",
    f"{FOLDER}table4.json",
    f"{FOLDER}checks.json",
    given=(
        "Figures 2 and 3 and Tables 1, 3 and 4 of Very Deep Transformers",
        "So Figures 2 and 3 and Tables 1 and 3 depend here",
        "In Table 4 the text",
        "in the paper 60L-12L has 43.8 BLEU and 12L-60L 43.1",
        "in which the rate alone rises for 8,000 steps",
        "in the paper by 8.8e-8",
        "A deeper encoder is worse here from 12L-12L on",
    ),
)
def very_deep(table3: Data, figure2: Data, table1: Data, figure3: Data, table4: Data, checks: Data) -> Pieces:
    admin, default = by_depth(table3["found"]["runs"]), by_depth(figure2["found"]["default"])
    assert by_depth(figure2["found"]["admin"]).keys() == admin.keys()
    setting = table3["setting"]
    training = said(r"[\d,]+ steps of [\d,]+ tokens, [\d,]+ of them for warm-up", setting)
    lr, steps = said(LEARNING_RATE, setting), said(r"[\d,]+", training)
    yield said(r"dim \d+", setting)
    yield f"a learning rate of {lr}, {training}"
    yield f"after {steps} steps it is behind 6L-6L"
    yield f"shows seeds {listed(str(run['options']['train.seed']) for run in admin['6-6'])}"
    yield said(r"BLEU on (\d+ sentences)", setting)
    yield said(r"p < [\d.]+", table3["rule"])
    yield from depths(admin, table3["found"]["signs"], default)
    yield from deaths(default["60-12"], setting)
    lowest = min(share for runs in admin.values() for run in runs for own in run["stacks"].values() for _, share in own)
    assert all(run["outcome"] == "finished" for runs in admin.values() for run in runs)
    yield f"never get less than {math.floor(100 * lowest) / 100:.2f} of the largest"
    ordered = [mean(admin[layers], "loss") for layers in ("12-12", "24-12", "48-12", "60-12")]
    assert ordered == sorted(ordered)
    assert min(admin, key=lambda layers: mean(admin[layers], "loss")) == "12-60"
    assert max(admin, key=lambda layers: mean(admin[layers], "bleu")) == "12-60"
    yield f"by {ordered[-1] - ordered[0]:.2f} nats to 60L-12L, and the deepest decoder, 12L-60L"
    yield from verdicts(admin, table3, figure2, table1, figure3, table4)
    yield from again(admin, checks, lr, steps)
    yield f"a 6L-6L model with a validation loss of {table4['found']['backward']['loss']:.2f}"


def depths(admin: dict[str, list[Data]], signs: Data, default: dict[str, list[Data]]) -> Pieces:
    for layers, runs in admin.items():
        better = [sides(other) for other, sign in signs[layers].items() if sign == "+"]
        others = "all others" if len(better) == len(admin) - 1 else ", ".join(better)
        yield row(f"Admin {sides(layers)}", weights(layers), both(runs, "loss", 3), both(runs, "bleu", 1), others)
    for layers, runs in default.items():
        losses = ", ".join(f"{run['loss']:.3f}" if run["outcome"] == "finished" else run["text"] for run in runs)
        yield row(f"Post-LN {sides(layers)}", weights(layers), losses, both(runs, "bleu", 1), "")


def deaths(runs: list[Data], setting: str) -> Pieces:
    assert {run["outcome"] for run in runs} == {"dead"}
    low = [[step for step, share in encoder(run) if share >= DEAD][-1] for run in runs]
    first = max(next(step for step, _ in encoder(run) if step > above) for run, above in zip(runs, low, strict=True))
    yield "Admin 60L-12L learns where Post-LN dies"
    yield "Post-LN is dead at 60L-12L"
    warmup = int(said(r"([\d,]+) of them for warm-up", setting).replace(",", ""))
    assert 4 * first == warmup
    yield f"From step {first} on, a quarter into the warm-up"
    yield f"first layers get less than {rate(DEAD)} of"
    yield f"The learning rate rises by {two_digits(float(said(LEARNING_RATE, setting)) / warmup)} per step"
    yield f"at the end {listed(f'{encoder(run)[-1][1]:.0e}' for run in runs)}"
    changes = {f"{abs(run['source_gain']):.2f}" for run in runs}
    yield f"changes the loss by {changes.pop()} nats"
    assert not changes
    assert all(run["valid"][-1][1] == run["loss"] for run in runs)
    (level,) = (each for each in LEVELS if each.share == DEAD)
    yield f"Of {level.seen} runs that were below {rate(DEAD)} on the way, {level.recovered} [recovered]"


def verdicts(admin: Any, table3: Data, figure2: Data, table1: Data, figure3: Data, table4: Data) -> Pieces:
    signs = table3["found"]["signs"]["60-12"]
    assert (signs["6-6"], signs["12-12"], signs["12-60"]) == ("-", "-", "-")
    yield row("Table 3", table3["verdict"], "60L-12L is significantly worse than 6L-6L, 12L-12L and 12L-60L")
    deep, shallow = (f"{math.exp(mean(admin[layers], 'loss')):.2f}" for layers in ("60-12", "6-6"))
    perplexities = f"Post-LN 60L-12L is dead; the perplexity of Admin is {deep} at 60L-12L and {shallow} at 6L-6L"
    yield row("Figure 2", figure2["verdict"], perplexities)
    scores = {name: f"{mean(runs, 'bleu'):.1f}, {mean(runs, 'ter'):.1f}" for name, runs in table1["found"].items()}
    bleu, ter = scores["60-12 Admin"].split(", ")
    text = f"Admin 60L-12L: BLEU {bleu}, TER {ter}; Post-LN 6L-6L: {scores['6-6 default']}; Admin 6L-6L: {scores['6-6 Admin']}"
    yield row("Table 1 ()", table1["verdict"], text)
    buckets = {name: [run["buckets"] for run in runs] for name, runs in figure3["found"].items()}
    names = [name for name, score in buckets["shallow"][0].items() if score is not None]
    means = [[fmean(seed[name] for seed in buckets[which]) for which in ("shallow", "deep")] for name in names]
    better, none = sum(deep > shallow for shallow, deep in means), sum(shallow == deep == 0 for shallow, deep in means)
    text = f"better than Post-LN 6L-6L in {better} of {len(names)} buckets; in {none} of the others both have 0"
    yield row("Figure 3 ()", figure3["verdict"], f"Admin 60L-12L is {text}")
    loss = {name: f"{mean(runs, 'loss'):.3f}" for name, runs in table4["found"]["forward"].items()}
    deep, shallow = (
        f"from {loss[f'{which}, without back-translation']} to {loss[f'{which}, with back-translation']}"
        for which in ("deep", "shallow")
    )
    text = f"back-translation raises the loss of Admin 24L-12L {deep}, and that of Post-LN 6L-6L {shallow}"
    yield row("Table 4 ()", table4["verdict"], text)


def again(admin: dict[str, list[Data]], checks: Data, lr: str, steps: str) -> Pieces:
    first = {layers: admin[layers][0] for layers in ("6-6", "60-12")}
    yield f"Seed {first['6-6']['options']['train.seed']} of Admin was trained again"
    losses, plain = dict(map(tuple, first["60-12"]["valid"])), checks["plain"]
    gap = max(abs(loss - losses[step]) for step, loss in plain)
    yield f"60L-12L has the same validation loss to within {gap:.2f} at"
    yield f"each of {len(plain)} measurements up to step {plain[-1][0]:,}, where"
    longer, faster = (by_depth(checks["runs"][name]) for name in ("longer", "faster"))
    change = checks["changes"]
    yield row("validation loss, BLEU", *map(sides, first))
    yield row(f"{lr}, {steps} steps", *(cell(run) for run in first.values()))
    yield row(f"{rate(change['faster']['lr'])}, {steps} steps", *(cell(runs[0]) for runs in faster.values()))
    more = f"{change['longer']['steps']:,} steps"
    settings = f"{lr}, {more}, {change['longer']['warmup_steps']:,} of them for warm-up"
    yield row(settings, *(cell(runs[0]) for runs in longer.values()))
    behind = first["60-12"]["loss"] - first["6-6"]["loss"]
    ahead = longer["6-6"][0]["loss"] - longer["60-12"][0]["loss"]
    one, other = (run["loss"] for run in admin["60-12"])
    apart = abs(one - other)
    assert 0 < ahead < apart < behind + ahead
    yield "With more steps 60L-12L catches up"
    yield f"60L-12L gains {behind + ahead:.2f} nats on 6L-6L, more than its seeds differ after {steps} steps, {apart:.2f}"
    yield f"That it is then ahead by {ahead:.2f}"


def cell(run: Data) -> str:
    return f"{run['loss']:.3f}, {run['bleu']:.1f}"
