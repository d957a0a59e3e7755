"""Time and memory."""

from __future__ import annotations

import re
from statistics import median

import kilolayer as kl
from tests.derivations.section import Data, Pieces, listed, row, section, word

PEERS = {
    "nn.Transformer in one graph": "torch.nn.Transformer, compiled, in one CUDA graph",
    "nn.Transformer compiled": "torch.nn.Transformer, compiled",
    "nn.Transformer": "torch.nn.Transformer",
}
MISSED = (
    "times x-transformers compiled (at least 1.2)",
    "largest over smallest time of a layer, vocabulary and all (at most 1.1)",
    "sub_ln over pre_ln (at most 1.08)",
)


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
    first = [name for name in ("kilolayer", *peers) if speed.by_name[f"{name}, dropout"] is speed.by_name[strongest]]
    yield f"The first {word(len(first))} rows are of one run, the others of another, in which ours took {beside:.1f} ms"
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


@section(
    "Without a network",
    "shards/results.json",
    given=(
        "and 1,000 layers of dim 1,024 fit",
        "dropout 0.1, 16 x 256 tokens per side and 8 x 1,024",
        "torch 2.11",
        "The first of eight processes is one that PyTorch's",
        "an eighth of the weights",
        "| first of eight | kept |",
        "eight processes have an eighth of it",
        "The first of eight also gains",
        "units are of 10 layers and of 1",
        "units of 1 layer",
        "1.1 times",
        "500L-500L with dim 1,024",
        "On the first of eight processes a recorded step of 16 x 256 tokens per side",
    ),
)
def shards(document: Data) -> Pieces:
    units = (("deep", 10), ("wide", 1))
    rows = document["rows"]

    def ms(name: str) -> float:
        return rows[name]["ms"]

    costs = []
    for kind, title, unit in (("deep", "100L-100L, dim 512", 10), ("wide", "24-layer decoder, dim 2,048", 1)):
        whole, sharded = ms(f"{kind}, whole"), f"{kind}, units of {unit}"
        eight = f"{kind}, first of 8, units of {unit}"
        names = (f"{kind}, units of 1", sharded, f"{sharded}, kept", eight, f"{eight}, kept")
        cells = [f"{ms(name):,.0f} ms ({ms(name) / whole:.2f})" for name in names]
        yield row(title, f"{whole:,.0f} ms", f"{ms(f'{kind}, whole, eager'):,.0f} ms", *cells)
        costs += [ms(name) / whole - 1 for name in names[3:]]
    yield f"shards cost {100 * min(costs):.0f} to {100 * max(costs):.0f}% of a step on one of eight GPUs"
    kept = "deep, units of 10, kept"
    assert ms("wide, units of 1, kept") / ms("wide, whole") < 1.1 < ms(kept) / ms("deep, whole")
    yield f"missed by 100L-100L, at {ms(kept) / ms('deep, whole'):.2f}"
    yield f"of the {ms(kept) - ms('deep, whole'):.1f} ms there"

    def spent(name: str, part: str) -> float:
        return sum(each for kernel, (each, _) in rows[name]["kernels"].items() if part in kernel)

    parts = [
        spent(kept, part) - spent("deep, whole", part)
        for part in ("vectorized_elementwise_kernel<8, at::native::bfloat16_copy", "Memcpy DtoD", "chunk_cat")
    ]
    yield "{:.1f} ms round the shards, {:.1f} ms copy them, and {:.1f} ms copy gradients to fp32".format(*parts)
    update = {name: spent(name, "_update") for name in rows if name.startswith(("deep", "wide"))}
    deep, wide = ((update[f"{kind}, first of 8, units of {unit}, kept"], update[f"{kind}, whole"]) for kind, unit in units)
    yield f"its update takes {deep[0]:.1f} instead of {deep[1]:.1f} ms at 100L-100L"
    yield f"and {wide[0]:.1f} instead of {wide[1]:.1f} ms in the wide decoder"
    without = [
        (ms(name) + update[f"{kind}, whole"] - update[name]) / ms(f"{kind}, whole")
        for kind, unit in units
        for name in (f"{kind}, first of 8, units of {unit}", f"{kind}, first of 8, units of {unit}, kept")
    ]
    yield f"at {min(without):.2f} to {max(without):.2f}"
    yield f"takes {rows['thousand, first of 8, recompute layer']['peak_gib']:.1f} GiB with recomputed layers"
    yield f"says {rows['thousand, planned']['peak_gib']:.1f} GiB"
    yield f"it took {rows['thousand, first of 8, recompute selective']['peak_gib']:.1f} GiB"
    thousand = kl.ModelConfig(
        shape="encoder_decoder", layers=500, dim=1024, heads=16, ffn_dim=4096, vocab_size=32_000, tie_embeddings=True
    )
    count = sum(weight.numel() for weight in kl.build_model(thousand, device="meta").parameters())
    yield f"{count / 1e9:.1f} billion"
    assert document["made_with"]["torch"].startswith("2.11")


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


@section("Predicted training memory", "plan/results.json")
def predicted_memory(document: Data) -> Pieces:
    cases = document["cases"]
    low = [1 - each["ratio"] for each in cases.values()]
    layers = [int(each) for each in re.findall(r" (\d+)L", " ".join(cases))]
    recipes = {name for name in kl.recipes.names() if f"kilolayer {name}" in cases} | {"deepnorm"}
    yield f"{100 * min(low):.0f} to {max(low):.0%} too low"
    yield f"{word(len(cases))} training jobs"
    yield f"{min(layers)} to {max(layers)} layers per stack, {word(len(recipes))} recipes"
