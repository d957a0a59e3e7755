"""What is measured: shapes, jobs in order of importance, variants, and the rows of the table with their goals."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

Found = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A model and its batch: `rows` x `length` tokens, per side in translation; `layers` per side.

    experts: in every second layer, two of them active per token.
    twin: the dense model with the same active FLOPs, with FFNs twice as wide in every second layer.
    dropout: on embeddings, residual branches and attention weights; in translation also after the activation.
    padded: a tenth of the tokens are padding, after sentences of different lengths.
    """

    task: Literal["translation", "language"]
    layers: int
    rows: int
    length: int
    dim: int
    heads: int
    ffn_dim: int
    vocabulary: int
    recipe: str = "deepnorm"
    experts: int = 0
    twin: bool = False
    dropout: float = 0.0
    padded: bool = False
    precision: Literal["fp32", "bf16"] = "bf16"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that are not padding, ascending."""
        shortest, last = (0.8 if self.padded else 1.0) * self.length, max(1, self.rows - 1)
        return [round(shortest + (self.length - shortest) * row / last) for row in range(self.rows)]

    @property
    def tokens(self) -> int:
        """Target tokens per step, without padding."""
        return sum(self.lengths)

    @property
    def flops(self) -> int:
        """FLOPs of one step: 6 per weight and token that it sees, and those of the attention scores in the language model."""
        dim, feedforward = self.dim, 2 * self.dim * self.ffn_dim
        attention, scores = (12 * dim**2, 0) if self.task == "translation" else (4 * dim**2, dim * self.length)
        sides = 2 if self.task == "translation" else 1
        if self.experts or self.twin:
            feedforward = feedforward * 3 // 2
        layer = attention + sides * feedforward + scores
        return 6 * self.tokens * (self.layers * layer + dim * self.vocabulary)


@dataclass(frozen=True)
class Job:
    """One process. gigabytes: its approximate GPU memory, so that several can prepare in parallel.

    alone: with an empty compile cache and no other process, because its start is timed.
    profile: the name of its profile, which begins with the row that it is for.
    base: the name of the job that it is a variant of.
    left_out: our kernels that it runs without.
    peer: also decode with Hugging Face.
    """

    name: str
    kind: Literal["training", "product", "decoding", "loop", "validation"]
    system: str
    setting: Setting
    gigabytes: int
    alone: bool = False
    warm: int = 5
    timed: int = 12
    profile: str | None = None
    variant: str = "plain"
    base: str = ""
    left_out: tuple[str, ...] = ()
    peer: bool = True


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "padded": {"padded": True},
    "both": {"dropout": 0.1, "padded": True},
}
DROPOUT_MEMORY = 1.1  # approximate memory of a peer with dropout relative to without


def as_variant(job: Job, variant: str) -> Job:
    """The same job with the options of VARIANTS[variant]."""
    options = VARIANTS[variant]
    gigabytes = round(job.gigabytes * (DROPOUT_MEMORY if "dropout" in options else 1.0))
    return replace(
        job,
        name=name_of(job.name, variant),
        base=job.name,
        variant=variant,
        setting=replace(job.setting, **options),
        gigabytes=gigabytes,
        profile=None if "padded" in options else job.profile,
    )


def name_of(base: str, variant: str) -> str:
    return base if variant == "plain" else f"{base}, {variant}"


TRANSLATION = Setting("translation", 100, 64, 64, dim=512, heads=8, ffn_dim=2048, vocabulary=32_768)
LARGE = replace(TRANSLATION, rows=256)
SPARSE = Setting("language", 12, 16, 1024, dim=1024, heads=16, ffn_dim=4096, vocabulary=50_304, recipe="sub_ln", experts=64)
LANGUAGE = Setting("language", 24, 32, 1024, dim=1024, heads=16, ffn_dim=4096, vocabulary=50_304)
DECODED = replace(TRANSLATION, layers=18, length=32)
READY = 10  # our warm-up steps: `ready_s` is the time to the end of the tenth


def deep(layers: int) -> Setting:
    return replace(TRANSLATION, layers=layers)


def by(recipe: str) -> Setting:
    return replace(TRANSLATION, recipe=recipe)


JOBS = [
    Job("product", "product", "product", TRANSLATION, 3),
    Job("kilolayer", "training", "kilolayer", TRANSLATION, 27, profile="1", warm=READY),
    Job("torchscale", "training", "torchscale", TRANSLATION, 40),
    Job("nn.Transformer", "training", "nn.Transformer", TRANSLATION, 27),
    Job("nn.Transformer compiled", "training", "nn.Transformer compiled", TRANSLATION, 27),
    Job("nn.Transformer in one graph", "training", "nn.Transformer in one graph", TRANSLATION, 30),
    Job("kilolayer 256x64", "training", "kilolayer", LARGE, 76, profile="2", warm=READY),
    Job("kilolayer 500L", "training", "kilolayer", deep(500), 135, alone=True, warm=READY),
    Job("gpt2 compiled", "training", "gpt2 compiled", LANGUAGE, 37),
    Job("x-transformers compiled", "training", "x-transformers compiled", LANGUAGE, 37),
    Job("kilolayer language", "training", "kilolayer", LANGUAGE, 35, profile="4", warm=READY),
    Job("kilolayer post_ln", "training", "kilolayer", by("post_ln"), 27, warm=READY),
    Job("kilolayer pre_ln", "training", "kilolayer", by("pre_ln"), 26, profile="6-pre_ln", warm=READY),
    Job("kilolayer sub_ln", "training", "kilolayer", by("sub_ln"), 29, profile="6-sub_ln", warm=READY),
    Job("kilolayer admin", "training", "kilolayer", by("admin"), 27, warm=READY),
    Job("kilolayer 25L", "training", "kilolayer", deep(25), 9, warm=READY),
    Job("kilolayer 50L", "training", "kilolayer", deep(50), 15, warm=READY),
    Job("kilolayer 200L", "training", "kilolayer", deep(200), 54, warm=READY),
    Job("decoding fp32", "decoding", "kilolayer", replace(DECODED, precision="fp32"), 8),
    Job("decoding bf16", "decoding", "kilolayer", DECODED, 8),
    Job("kilolayer 10L", "training", "kilolayer", deep(10), 8, alone=True, warm=READY),
    Job("kilolayer 64 experts", "training", "kilolayer", SPARSE, 76, profile="10", warm=READY),
    Job("kilolayer twin", "training", "kilolayer", replace(SPARSE, experts=0, twin=True), 20, profile="11", warm=READY),
    Job("torchscale 64 experts", "training", "torchscale language", SPARSE, 110),
    Job("torchscale dense", "training", "torchscale language", replace(SPARSE, experts=0), 40),
    Job("kilolayer 16 experts", "training", "kilolayer", replace(SPARSE, experts=16), 28, warm=READY),
    Job("torchscale 16 experts", "training", "torchscale language", replace(SPARSE, experts=16), 80),
    Job("x-transformers", "training", "x-transformers", LANGUAGE, 62),
    Job("gpt2", "training", "gpt2", LANGUAGE, 88),
    Job("marian", "training", "marian", TRANSLATION, 40),
    Job("nn.Transformer compiled 256x64", "training", "nn.Transformer compiled", LARGE, 120),
    Job("nn.Transformer 256x64", "training", "nn.Transformer", LARGE, 120),
    Job("torchscale 256x64", "training", "torchscale", LARGE, 135),
]


def tiny(job: Job) -> Job:
    """The same job at a size for any CPU."""
    layers = max(2, job.setting.layers // 50)
    setting = replace(job.setting, layers=layers, rows=4, length=8, dim=32, heads=4, ffn_dim=64, vocabulary=96)
    return replace(job, setting=setting, warm=2, timed=3)


@dataclass(frozen=True)
class Goal:
    """A target for a number computed from the results; `value` raises LookupError if a part of it was not measured."""

    text: str
    value: Callable[[Found], float]


@dataclass(frozen=True)
class Row:
    title: str
    jobs: tuple[str, ...]
    goals: tuple[Goal, ...] = ()


def times(fast: str, slow: str) -> Callable[[Found], float]:
    return lambda found: found[slow]["ms"] / found[fast]["ms"]


def memory(ours: str, *others: str) -> Callable[[Found], float]:
    """Our memory divided by the least of the others' that were measured."""
    return lambda found: found[ours]["gigabytes"] / sorted(found[name]["gigabytes"] for name in others if name in found)[0]


def spread(names: tuple[str, ...]) -> Callable[[Found], float]:
    """The largest time per layer divided by the smallest."""

    def value(found: Found) -> float:
        each = [found[name]["ms_per_layer"] for name in names]
        return max(each) / min(each)

    return value


def spread_of_added(names: tuple[str, ...]) -> Callable[[Found], float]:
    """The same for the time per additional layer, from each depth to the next."""

    def value(found: Found) -> float:
        depths = [(layers_of[name], found[name]["ms"]) for name in names]
        each = [(more_ms - ms) / (more - layers) for (layers, ms), (more, more_ms) in pairwise(depths)]
        return max(each) / min(each)

    layers_of = {job.name: job.setting.layers for job in JOBS}
    return value


DEPTHS = ("kilolayer 25L", "kilolayer 50L", "kilolayer", "kilolayer 200L", "kilolayer 500L")
LANGUAGE_PEERS = ("gpt2 compiled", "x-transformers compiled", "gpt2", "x-transformers")
ROWS = {
    1: Row(
        "Translation 100L-100L, d 512, 64 x 64 tokens per side",
        ("kilolayer", "nn.Transformer in one graph", "nn.Transformer compiled", "nn.Transformer", "torchscale", "marian"),
        (
            Goal("times nn.Transformer compiled and in one graph", times("kilolayer", "nn.Transformer in one graph")),
            Goal(
                "with dropout, times nn.Transformer compiled and in one graph",
                times("kilolayer, dropout", "nn.Transformer in one graph, dropout"),
            ),
            Goal("times TorchScale (at least 11)", times("kilolayer", "torchscale")),
            Goal("times nn.Transformer (at least 5.5)", times("kilolayer", "nn.Transformer")),
            Goal("times nn.Transformer compiled", times("kilolayer", "nn.Transformer compiled")),
            Goal("with dropout, times TorchScale (at least 10)", times("kilolayer, dropout", "torchscale, dropout")),
            Goal(
                "with dropout, times nn.Transformer compiled", times("kilolayer, dropout", "nn.Transformer compiled, dropout")
            ),
            Goal("time with dropout over that without (at most 1.15)", times("kilolayer", "kilolayer, dropout")),
            Goal("memory with dropout over that without (at most 1.1)", memory("kilolayer, dropout", "kilolayer")),
        ),
    ),
    2: Row(
        "Translation 100L-100L, d 512, 256 x 64 tokens per side",
        ("kilolayer 256x64", "nn.Transformer compiled 256x64", "nn.Transformer 256x64", "torchscale 256x64"),
        (Goal("TFLOP/s (at least 330)", lambda found: found["kilolayer 256x64"]["tflops"]),),
    ),
    3: Row(
        "Translation 500L-500L, d 512, 64 x 64 tokens per side",
        ("kilolayer 500L",),
        (
            Goal("times the step of 100L-100L (at most 5.2)", times("kilolayer", "kilolayer 500L")),
            Goal("seconds to the end of step 10 (below 60)", lambda found: found["kilolayer 500L"]["ready_s"]),
        ),
    ),
    4: Row(
        "Language model, 24 layers, d 1024, 32 x 1,024 tokens",
        ("kilolayer language", *LANGUAGE_PEERS),
        (
            Goal("times HF GPT-2 compiled (at least 1.3)", times("kilolayer language", "gpt2 compiled")),
            Goal("times x-transformers compiled (at least 1.2)", times("kilolayer language", "x-transformers compiled")),
            Goal(
                "with dropout, times HF GPT-2 compiled (at least 1.25)",
                times("kilolayer language, dropout", "gpt2 compiled, dropout"),
            ),
            Goal(
                "with dropout, times x-transformers compiled",
                times("kilolayer language, dropout", "x-transformers compiled, dropout"),
            ),
            Goal("share of the product's rate (at least 0.62)", lambda found: found["kilolayer language"]["share"]),
            Goal("memory over the least of the peers' (below 1)", memory("kilolayer language", *LANGUAGE_PEERS)),
        ),
    ),
    5: Row(
        "Depth: 25, 50, 100, 200 and 500 layers per side",
        DEPTHS,
        (
            Goal("largest over smallest time of a layer, vocabulary and all (at most 1.1)", spread(DEPTHS)),
            Goal("largest over smallest time that a further layer adds (at most 1.1)", spread_of_added(DEPTHS)),
        ),
    ),
    6: Row(
        "Recipes at 100L-100L",
        ("kilolayer", "kilolayer sub_ln", "kilolayer admin", "kilolayer post_ln", "kilolayer pre_ln"),
        (
            Goal("deepnorm over post_ln (at most 1.03)", times("kilolayer post_ln", "kilolayer")),
            Goal("admin over post_ln (at most 1.03)", times("kilolayer post_ln", "kilolayer admin")),
            Goal("sub_ln over pre_ln (at most 1.08)", times("kilolayer pre_ln", "kilolayer sub_ln")),
        ),
    ),
    7: Row(
        "Compilation for 10 and for 500 layers, from an empty cache",
        ("kilolayer 10L", "kilolayer 500L"),
        (
            Goal(
                "seconds for 500 layers over 10 (about 1)",
                lambda found: found["kilolayer 500L"]["compile_s"] / found["kilolayer 10L"]["compile_s"],
            ),
        ),
    ),
    8: Row(
        "Language model, 12 layers, d 1024, X-MoE in every second layer, top-2, 16 x 1,024 tokens",
        (
            "kilolayer 64 experts",
            "kilolayer 16 experts",
            "kilolayer twin",
            "torchscale 64 experts",
            "torchscale 16 experts",
            "torchscale dense",
        ),
        (
            Goal("times TorchScale at 64 experts (at least 5)", times("kilolayer 64 experts", "torchscale 64 experts")),
            Goal(
                "with dropout, times TorchScale at 64 experts",
                times("kilolayer 64 experts, dropout", "torchscale 64 experts, dropout"),
            ),
            Goal(
                "forward and backward over those of the dense twin (at most 1.5)",
                lambda found: found["kilolayer 64 experts"]["model_ms"] / found["kilolayer twin"]["model_ms"],
            ),
            Goal("memory at 64 experts, GB (at most 64)", lambda found: found["kilolayer 64 experts"]["gigabytes"]),
        ),
    ),
    9: Row(
        "Decoding by beam 5, 18L-18L, d 512, 64 sentences",
        ("decoding fp32", "decoding bf16"),
        (
            Goal("times HF generate in fp32 (at least 5)", lambda found: found["decoding fp32"]["times"]),
            Goal("times HF generate in bf16 (at least 5)", lambda found: found["decoding bf16"]["times"]),
        ),
    ),
}


def units(rows: Iterable[int], variants: Iterable[str]) -> list[tuple[int, str]]:
    """What a run covers: pairs of a row and a variant. Decoding and compile time have no variants."""
    variants = list(variants)
    return [(row, name) for row in rows for name in variants if name == "plain" or row not in (7, 9)]


def names_in(row: int, variant: str) -> list[str]:
    """The jobs that a row shows in one of its variants."""
    return [name_of(name, variant) for name in ROWS[row].jobs]


def every_job() -> list[Job]:
    """All jobs in all variants, most important first; the matrix product, whose rate is in every table, is first."""
    return [as_variant(job, name) for job in JOBS for name in (VARIANTS if job.kind == "training" else ["plain"])]


def jobs_named(names: Iterable[str]) -> list[Job]:
    """These jobs, in this order."""
    jobs = {job.name: job for job in every_job()}
    return [jobs[name] for name in names]


def jobs_of(rows: Iterable[int], variants: Sequence[str], systems: Container[str]) -> list[Job]:
    """The jobs of these rows, variants and systems: the matrix product, then variant by variant, most important first."""
    wanted = {"product", *(name for row, variant in units(rows, variants) for name in names_in(row, variant))}
    jobs = [job for job in every_job() if job.name in wanted and job.system in systems]
    return sorted(jobs, key=lambda job: -1 if job.kind == "product" else variants.index(job.variant))


def ours_beside(name: str) -> str | None:
    """Our job with the same setting as a peer's."""
    jobs = {job.name: job for job in every_job() if job.kind == "training"}
    if name not in jobs or jobs[name].system == "kilolayer":
        return None
    same = (job.name for job in jobs.values() if job.system == "kilolayer" and job.setting == jobs[name].setting)
    return next(same, None)
