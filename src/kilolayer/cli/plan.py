"""kilolayer plan: what a model costs, computed before anything is allocated."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_options, int_between, read_tables
from kilolayer.cli.output import human_count, show_json, show_line, show_table
from kilolayer.config import RawConfig, table_of
from kilolayer.errors import OptionError, UnusedOptionError
from kilolayer.models.config import ModelConfig
from kilolayer.models.trainable_config import TrainableConfig
from kilolayer.optimizers.registry import DEFAULT, get
from kilolayer.tasks.registry import get as registration
from kilolayer.terminal import counted, human_bytes, plural, say

if TYPE_CHECKING:
    from kilolayer.optimizers.base import UpdateRule
    from kilolayer.runs.budget import Budget, Training, Work
    from kilolayer.runs.division import Division
    from kilolayer.runs.fit import Fit
    from kilolayer.tasks.config import RunConfig


LARGEST = 1_000_000  # maximum batch, length and beam, as a guard against typing errors
COUNT = int_between(1, LARGEST)


@dataclass(frozen=True)
class PlanConfig:
    """The configuration of only a model."""

    model: ModelConfig = field(default_factory=ModelConfig)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    add_options(parser, ModelConfig, "model")
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="a configuration file [the default values]")
    parser.add_argument("--batch", type=COUNT, help="sequences per batch [as many as fit in batches.tokens, else 64]")
    parser.add_argument(
        "--length",
        type=COUNT,
        help="tokens per sequence, on each side [a language model's text.length, an image's patches, else 64]",
    )
    parser.add_argument("--beam", type=COUNT, help="hypotheses per sentence in decoding [as in the search options, else 5]")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), help="precision of weights and activations [bf16; fp32 for a task's own model]"
    )
    parser.add_argument(
        "--memory",
        type=_gibibytes,
        metavar="GIB",
        help="memory of the device, to say whether training fits and what would make it fit [that of the GPU, if there is one]",
    )
    parser.add_argument("--processes", type=COUNT, help="processes that train together, which divide what train.shard says [1]")
    parser.add_argument("--machines", type=COUNT, help='machines that these processes are on; for train.shard = "hybrid"')
    parser.add_argument(
        "--bandwidth",
        type=_gigabytes,
        metavar="GB",
        help="GB per second that each process can send, to say how long that takes; between machines if there are several",
    )
    parser.add_argument(
        "--bandwidth-inside",
        type=_gigabytes,
        metavar="GB",
        help='the same within a machine, for train.shard = "hybrid" [as --bandwidth]',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Print the plan."""
    tables = read_tables(options.config, typed)
    whole = configuration_of(tables)
    config = whole.model

    from kilolayer.runs.budget import budget

    work = work_of(whole, set(tables.merged), options.length)
    own = isinstance(config, TrainableConfig)
    if own and options.precision not in (None, "fp32"):
        raise OptionError("a model of a task's own is trained in fp32", where="--precision", fix="remove it")
    precision = options.precision or ("fp32" if own else "bf16")
    work = replace(work, batch=options.batch or work.batch, beam=options.beam or work.beam, precision=precision)
    rule = get(DEFAULT) if isinstance(whole, PlanConfig) else whole.train.rule
    division = division_of(whole, options)
    cost = budget(config, work, rule, division=division)
    seconds = sending_time(cost, options)
    warnings, fit = schedule_warnings(whole), find_fit(whole, cost, rule, options.memory)
    if options.json:
        fitted = {} if fit is None else {"fit": {**dataclasses.asdict(fit), "fits": fit.fits}}
        show_json({**as_json(config, cost, seconds), **fitted, "warnings": warnings})
    elif own:
        assert not isinstance(whole, PlanConfig)
        show_own(config, cost, rule.title, registration(whole.task).unit)
    else:
        show(config, cost, rule.title)
    if division.processes > 1 and not options.json:
        show_sent(cost, seconds)
    if fit is not None and not options.json:
        show_fit(fit, cost.work.batch)
    for warning in warnings:
        say(warning)
    return 0


def find_fit(whole: PlanConfig | RunConfig, cost: Budget, rule: UpdateRule, memory: int | None) -> Fit | None:
    """Whether training fits in this memory, in bytes, or in that of the GPU; None if neither is known."""
    import torch

    from kilolayer.runs.budget import budget
    from kilolayer.runs.fit import fit, more_processes

    if memory is None and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    if memory is None:
        return None

    def cost_of(batch: int) -> Budget:
        parts = -(-cost.work.batch // batch)
        work = replace(cost.work, batch=batch, accumulate=cost.work.accumulate * parts)
        return budget(whole.model, work, rule, division=cost.division)

    recompute = not isinstance(whole, PlanConfig) and whole.train.recompute == "layer"
    shardable = isinstance(whole.model, ModelConfig) and rule.elementwise and rule.applied_by is None
    experts = whole.model.moe.experts if isinstance(whole.model, ModelConfig) and whole.model.moe is not None else None
    more = more_processes(cost.division, experts) if shardable else []
    return fit(cost, memory, cost_of, recompute=recompute, more=more)


def show_fit(fit: Fit, batch: int) -> None:
    """Print whether training fits, and what would make it fit. batch: sequences per batch as planned."""
    memory, needed = human_bytes(fit.memory), human_bytes(fit.needed)
    if fit.fits:
        show_line(f"Training fits in {memory}: it needs {needed}, with what a GPU reserves.")
        return
    show_line(f"Training does not fit in {memory}: it needs {needed}, with what a GPU reserves.")
    if all(each.processes is not None for each in fit.remedies):
        state = f"weights, gradients and optimizer alone need {human_bytes(fit.least)}"
        why = state if fit.least > fit.memory else "sequences are too long, even one at a time"
        what_else = "" if fit.remedies else " Use a smaller model or a larger device."
        show_line(f"  No batch is small enough: {why}.{what_else}")
    for each in fit.remedies:
        changes = [] if each.processes is None else [f'train.shard = "full" on {each.processes:,} processes']
        changes += ['train.recompute = "layer"'] if each.recompute else []
        if each.accumulate > 1:
            changes.append(f"batches of {each.batch} instead of {batch}, with {each.accumulate} times train.accumulate")
        show_line(f"  It fits with {' and '.join(changes)}: {human_bytes(each.needed)}.")


def _gibibytes(text: str) -> int:
    return int(_above_0(text, "GiB above 0, such as 80") * 2**30)


def _gigabytes(text: str) -> float:
    return _above_0(text, "GB per second above 0, such as 50") * 1e9


def _above_0(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
    return value


def division_of(config: PlanConfig | RunConfig, options: argparse.Namespace) -> Division:
    """How the processes of the command divide the model, as [train] says."""
    from kilolayer.runs.division import Division

    processes, machines = options.processes or 1, options.machines or 1
    if isinstance(config, PlanConfig):
        return Division(processes, machines=machines)
    train = config.train
    return Division(processes, train.shard, train.shard_unit, machines, train.reshard_after_forward)


def sending_time(cost: Budget, options: argparse.Namespace) -> float | None:
    """The seconds that each process sends in a step; None if it is not known how fast."""
    bandwidth, inside = options.bandwidth, options.bandwidth_inside
    if bandwidth is not None and cost.division.processes == 1:
        raise UnusedOptionError("one process sends nothing", where="--bandwidth", fix="say how many there are: --processes 8")
    if inside is not None and (bandwidth is None or cost.division.shard != "hybrid"):
        raise UnusedOptionError(
            'it has an effect only beside --bandwidth and train.shard = "hybrid"', where="--bandwidth-inside", fix="remove it"
        )
    return None if bandwidth is None else cost.sent.seconds(bandwidth, inside or bandwidth)


def schedule_warnings(config: PlanConfig | RunConfig) -> list[str]:
    """Warnings about the learning rate schedule of a run; none if only a model is planned."""
    if isinstance(config, PlanConfig):
        return []
    from kilolayer.training.schedule import warmup_warning

    return [warning for warning in [warmup_warning(config.train)] if warning is not None]


def configuration_of(found: RawConfig) -> PlanConfig | RunConfig:
    """The configuration of a model or, if there are tables besides [model], that of a run, which is checked completely.

    A run that starts from another one inherits its model as defaults.
    """
    if set(found.merged) <= {"model"}:
        return found.build(PlanConfig)
    from kilolayer.runs.start import read_started  # imports numpy and SentencePiece, which are not needed for only a model

    return read_started(found)[0]


def work_of(config: PlanConfig | RunConfig, given: Set[str], length: int | None) -> Work:
    """A run's typical batch; where the `given` tables name no data, only a model is planned, with the batch that `Work` has."""
    from kilolayer.runs.budget import Work

    if isinstance(config, PlanConfig):
        accumulate = Work.accumulate
    elif given - {"model", "train"} or config.train.start_from is not None:
        return typical_work(config, length)
    else:
        accumulate = config.train.accumulate
    image = getattr(config.model, "image", None)
    return Work(length=length or (Work.length if image is None else image.length), accumulate=accumulate)


def typical_work(config: RunConfig, length: int | None) -> Work:
    """A run's typical batch, with `length` tokens per sequence and side and its beam."""
    from kilolayer.runs.budget import Work

    usual = config.usual_batch(length)
    return Work(usual.rows, usual.length, usual.beam, scored=usual.scored, accumulate=config.train.accumulate)


def show_own(config: TrainableConfig, cost: Budget, optimizer: str, unit: str) -> None:
    """Print the plan of a model that a task brings. optimizer: its name. unit: what the task counts."""
    work, training = cost.work, cost.training
    show_line(f"{', '.join(filter(None, (config.title, config.widths)))}\n")
    rows = [(part, human_count(count)) for part, count in cost.parts.items()]
    show_table("Parameters", [*rows, ("total", human_count(cost.parameters))])
    show_table(
        "Arithmetic, FLOPs",
        [
            (f"forward, per {unit}", human_count(cost.forward_flops_per_token)),
            (f"training, per {unit}", human_count(cost.training_flops_per_token)),
            (f"training, per step of {work.batch}", human_count(_step_flops(cost))),
        ],
    )
    show_table(
        f"Training memory{_of_each(cost)}, {work.precision}, {work.batch} {plural(unit)}",
        [
            *_held(training, f"{optimizer}'s state", cost.division),
            ("activations", human_bytes(training.activations)),
            ("peak", human_bytes(training.peak)),
        ],
    )


def show(config: ModelConfig, cost: Budget, optimizer: str) -> None:
    """Print the plan as tables. optimizer: its name."""
    depths, work, training = config.depths, cost.work, cost.training
    described = config.recipe.describe(encoder_layers=depths.encoder, decoder_layers=depths.decoder)
    show_line(f"{config.recipe.title} {config.shape.replace('_', '-')}, {depths.title}, {config.widths}\n")
    rows = [(part, human_count(count)) for part, count in cost.parts.items() if count]
    show_table("Parameters", [*rows, ("total", human_count(cost.parameters)), ("active", human_count(cost.active_parameters))])
    constants = [
        (f"{side} {name}", f"{value:.4f}")
        for side, values in (("encoder", described.encoder), ("decoder", described.decoder))
        for name, value in (values or {}).items()
    ]
    if constants:
        show_table(f"Constants of {config.recipe.title}", constants)
    rates = config.recipe.unusual_rates(depths, config.dim)
    if rates:
        rows = [[name, *(f"{factor:.4g}" for factor in dataclasses.astuple(each))] for name, each in rates.items()]
        header = ["weights", "learning rate", "eps", "weight decay"]
        show_table(f"Factors of {config.recipe.title} in training", rows, header=header)
    show_table(
        f"Arithmetic at length {work.length}, FLOPs",
        [
            ("forward, per token", human_count(cost.forward_flops_per_token)),
            ("training, per token", human_count(cost.training_flops_per_token)),
            (f"training, per step of {work.batch} x {work.length}", human_count(_step_flops(cost))),
        ],
    )
    per_side = " per side" if len(depths.sides) > 1 else ""
    sharded = cost.division.shards > 1
    has_masters = work.precision != "fp32" and (not sharded or config.moe is not None)
    state = f"{optimizer}'s state and fp32 masters" if has_masters else f"{optimizer}'s state"
    show_table(
        f"Training memory{_of_each(cost)}, {work.precision}, {work.batch} x {work.length} tokens{per_side}",
        [
            *_held(training, state, cost.division),
            ("logits and loss", human_bytes(training.logits)),
            ("activations", human_bytes(training.activations)),
            ("activations, each layer recomputed", human_bytes(training.activations_recomputed)),
            ("gradients of a layer's activations", human_bytes(training.layer)),
            *([("workspaces of matrix products", human_bytes(training.workspaces))] if training.workspaces else []),
            ("peak", human_bytes(training.peak)),
            ("peak, each layer recomputed", human_bytes(training.peak_recomputed)),
        ],
    )
    if (decoding := cost.decoding) is not None:
        size = f"{counted(work.batch, 'sentence')} x beam {work.beam} x {counted(work.length, 'token')}"
        caches = [("cache of the target", human_bytes(decoding.target_cache))]
        if decoding.source_cache:
            caches.append(("cache of the source", human_bytes(decoding.source_cache)))
        show_table(
            f"Decoding memory, {work.precision}, {size}",
            [("weights", human_bytes(decoding.weights)), *caches, ("total", human_bytes(decoding.total))],
        )


def _of_each(cost: Budget) -> str:
    """Whose memory a table of a plan shows, if there are several processes."""
    division = cost.division
    if division.processes == 1:
        return ""
    shards = {"none": "", "full": ", shards of all", "hybrid": f", shards of {division.shards}"}[division.shard]
    return f" of each of {division.processes:,} processes{shards}"


def _held(training: Training, state: str, division: Division) -> list[tuple[str, str]]:
    """The rows of a plan for weights and what belongs to them; state: the name of what the optimizer keeps."""
    gathered = "two units of layers" if division.reshards else "all layers"
    rows = {
        "weights, shards of matrices in fp32" if division.shards > 1 else "weights": training.weights,
        "gradients": training.gradients,
        "gradients summed over batches and processes": training.sums,
        state: training.optimizer,
        f"gathered matrices: tables, {gathered}": training.gathered,
        "gradients on their way to shards": training.scattered,
    }
    return [(name, human_bytes(size)) for name, size in rows.items() if size]


def show_sent(cost: Budget, seconds: float | None) -> None:
    """Print what each process sends in a step, and how long that takes, if it is known."""
    sent, batches = cost.sent, cost.work.accumulate
    rows = {
        "matrices, gathered in each pass" if cost.division.reshards else "matrices, gathered once": sent.gathers,
        "their gradients, to the shards": sent.scatters,
        "gradients of shards, between machines": sent.copies,
        "gradients of whole weights": sent.sums,
        "total": sent.total,
    }
    shown = [(name, human_bytes(size)) for name, size in rows.items() if size]
    if seconds is not None:
        shown.append(("time, if nothing is computed meanwhile", f"{seconds:.3g} s"))
    show_table(f"Sent by each process in a step of {counted(batches, 'batch')}", shown)


def as_json(config: ModelConfig | TrainableConfig, cost: Budget, seconds: float | None) -> dict[str, Any]:
    """The plan as plain values: bytes, FLOPs and counts; with the recipe's constants, if the model has a recipe.

    seconds: that each process sends in a step, if they are known.
    """
    training, decoding = cost.training, cost.decoding
    of_recipe: dict[str, Any] = {}
    if isinstance(config, ModelConfig):
        recipe, depths = config.recipe, config.depths
        described = recipe.describe(encoder_layers=depths.encoder, decoder_layers=depths.decoder)
        of_recipe["constants"] = {"encoder": described.encoder, "decoder": described.decoder}
        rates = recipe.unusual_rates(depths, config.dim)
        of_recipe["rates"] = {name: dataclasses.asdict(each) for name, each in rates.items()}
    return {
        "model": table_of(config),
        "work": dataclasses.asdict(cost.work),
        "parameters": {"total": cost.parameters, "active": cost.active_parameters, "parts": cost.parts},
        **of_recipe,
        "flops": {
            "forward_per_token": cost.forward_flops_per_token,
            "training_per_token": cost.training_flops_per_token,
            "training_per_step": _step_flops(cost),
        },
        "division": {**dataclasses.asdict(cost.division), "shards": cost.division.shards},
        "sent": {**dataclasses.asdict(cost.sent), "total": cost.sent.total, "seconds": seconds},
        "training_memory": {
            **dataclasses.asdict(training),
            "peak": training.peak,
            "peak_recomputed": training.peak_recomputed,
        },
        "decoding_memory": None if decoding is None else {**dataclasses.asdict(decoding), "total": decoding.total},
    }


def _step_flops(cost: Budget) -> float:
    return cost.training_flops_per_token * cost.work.batch * cost.work.length
