"""The results in the README."""

from __future__ import annotations

import re

import kilolayer as kl
from tests.derivations.methods import MethodsByDepth
from tests.derivations.section import README, SHOWN, Data, Pieces, listed, read, row, section, word
from tests.derivations.speed import Speed
from tests.derivations.start import propagation_cells, said


@section(
    "Kilolayer",
    "quickstart/results.json",
    given=("1,000 layers", "Python 3.11", "PyTorch 2.11 to 2.13"),
    page=README,
)
def first_words(quickstart: Data) -> Pieces:
    compared = {*MethodsByDepth(read("reproduce/deepnet-table1.json")).methods, "sub_ln", "post_ln_init"}
    yield f"{word(len(set(kl.recipes.names()) - compared))} others"
    whole, training = (f"{quickstart[f'{part}_seconds']:.0f} s" for part in ("whole_command", "training"))
    cores = re.findall(r"(\w+) x86-64 cores, no GPU", quickstart["hardware"])[0]
    yield f"`{quickstart['command']}` takes {whole} on {cores} CPU cores, {training} of them for training"


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
    yield f"BLEU of {word(len(table.methods))} methods by depth"
    yield f"falls for {min(lowest)} to {max(lowest)} steps and recovers"
    yield "".join((setting[1], ", ", setting[2], setting[3]))
    yield f"mean of {word(len(table.best('deepnorm', 6)))} seeds"
    yield re.findall(r"factors of \d", document["setting"])[0]
    assert any(run["outcome"] == "dead" for run in table.best("post_ln", 50))
    assert table.mean("bleu", "post_ln", 50) < 2
    post_ln = table.of(table.runs, "post_ln", 50)
    rates = {run["options"]["train.lr"] for run in post_ln}
    assert {run["options"]["train.lr"] for run in post_ln if run["outcome"] == "finished"} == {min(rates)}
    yield "at 50 layers per side Post-LN dies at all rates but the smallest, where it hardly learns"
    yield f"Pre-LN has {bleu['pre_ln']:.1f} BLEU and DeepNorm {bleu['deepnorm']:.1f}"
    ahead = ("r_fixup", "dlcl", "rezero", "t_fixup")
    assert all(table.mean("loss", method, 50) < table.mean("loss", "deepnorm", 50) for method in ahead)
    yield f"Four methods whose residual branches start small, {listed(SHOWN[method] for method in ahead)}"
    scores = [table.mean("bleu", method, 50) for method in ahead]
    yield f"ahead of it there ({listed(f'{each:.1f}' for each in scores)})"
    own = table.best("deepnorm", 50)[0]["options"]["train.lr"]
    assert all(table.at(method, 50, own)[0]["loss"] > table.mean("loss", "deepnorm", 50) for method in ("dlcl", "rezero"))
    pre_ln, deepnorm = (table.mean("bleu", method, 100) for method in ("pre_ln", "deepnorm"))
    yield f"At 100 layers Pre-LN has {pre_ln:.1f} and DeepNorm {deepnorm:.1f}"
    assert {run["outcome"] for run in table.of(table.runs, "post_ln", 100)} == {"dead"}
    yield "Post-LN is dead at every rate"
    open_cells = [method for method in table.methods if not table.best(method, 100)]
    yield f"{word(len(open_cells))} methods still lack seeds there"

    speed = Speed(measured)
    peers = ("kilolayer", "nn.Transformer in one graph", "torchscale")
    ours, graph, torchscale = (f"{speed.whole(f'{name}, dropout')} ms" for name in peers)
    yield f"A training step of 100 + 100 layers takes {ours}"
    yield f"takes {graph}, {speed.times('nn.Transformer in one graph, dropout'):.2f} times as long, and TorchScale {torchscale}"
    yield f"without dropout: {listed(map(speed.whole, peers))} ms"
    yield f"A DeepNorm model of {' + '.join(re.findall('[0-9]+', said(thousand)[0]))} layers"
