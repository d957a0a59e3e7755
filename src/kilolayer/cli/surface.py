"""kilolayer surface: plot the loss around a model's weights, or around its training trajectory."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_device, int_between
from kilolayer.cli.output import show_json, show_line, show_table
from kilolayer.cli.prepared import prepared
from kilolayer.errors import InputError, OptionError, shown, unknown
from kilolayer.files.paths import kind_of
from kilolayer.files.writing import make_folder
from kilolayer.tasks import registry
from kilolayer.terminal import LiveLine, counted, say

if TYPE_CHECKING:
    import torch

    from kilolayer.models.model import Model
    from kilolayer.probe.subject import BatchLoss
    from kilolayer.report.surface_page import SurfaceFiles, SurfaceView
    from kilolayer.runs.run import Run
    from kilolayer.tasks.config import RunConfig
    from kilolayer.tasks.task import Task

SIZE, SPAN, BATCHES = 21, 1.0, 8
LARGEST_SPAN = 1e6
FLAGS = ["--size", "--span", "--seed", "--trajectory", "--batches", "--out", "--device", "--json"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "subject",
        nargs="?",
        type=Path,
        default=registry.EMBEDDED,
        metavar="RUN|CONFIG.toml",
        help="a run folder; or a configuration [the embedded default], for its model before the first step",
    )
    parser.add_argument("--size", type=int_between(3, 501), default=SIZE, help=f"points per side, an odd number [{SIZE}]")
    parser.add_argument(
        "--span", type=_span, help=f"distance to each side, relative to the norm of each filter of the weights [{SPAN:g}]"
    )
    parser.add_argument("--seed", type=int_between(0, 2**31 - 1), help="seed of the two random directions [0]")
    parser.add_argument("--trajectory", action="store_true", help="use the plane of the run's checkpoints, and show its path")
    parser.add_argument(
        "--batches",
        type=int_between(1, 100_000),
        default=BATCHES,
        help=f"number of batches that the loss is averaged over [{BATCHES}]",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write the files [the run folder; surfaces/NAME for a configuration]",
    )
    add_device(parser, "auto; for a configuration, its own")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _span(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a number") from None
    if not 0 < value <= LARGEST_SPAN:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {LARGEST_SPAN:g}, not {shown(value)}")
    return value


@dataclass(frozen=True)
class Subject:
    """The model to plot. run: None for a configuration."""

    name: str
    config: RunConfig
    task: Task
    run: Run | None


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Compute the surface, write its files and print where they are."""
    _check(options, typed)
    import torch

    from kilolayer.probe.subject import training_loss
    from kilolayer.report.surface_page import as_json, write_surface
    from kilolayer.runs.run import choose_device

    choose_device(options.device, "device")  # raises before any work
    with _opened(options.subject, typed, options.device) as subject:
        own = options.device == "auto" and subject.run is None
        device = choose_device(subject.config.train.device) if own else choose_device(options.device, "device")
        if subject.config.train.threads:
            torch.set_num_threads(subject.config.train.threads)
        folder = options.out or (Path("surfaces") / subject.name if subject.run is None else subject.run.folder)
        make_folder(folder)
        loss = training_loss(subject.task, subject.config.train.seed, options.batches)
        view = _trajectory(subject, loss, device, options) if options.trajectory else _random(subject, loss, device, options)
    files = write_surface(folder, "trajectory" if options.trajectory else "surface", view)
    if options.json:
        show_json(as_json(view))
    else:
        _show(view, files)
    return 0


def _check(options: argparse.Namespace, typed: list[str]) -> None:
    """Raise for contradictory options, before any work."""
    kind = kind_of(options.subject)
    if kind is None:
        raise InputError("found neither a run nor a configuration", where=str(options.subject), fix="check the path")
    if kind == "folder" and typed:
        name, *_ = typed[0].partition("=")
        if "." not in name:
            raise unknown(name, FLAGS)
        fix = f"remove it, or use it with {options.subject / 'config.toml'}, for the model before its first step"
        raise OptionError(f"{name} applies to a configuration, and this is a run", where=str(options.subject), fix=fix)
    if kind != "folder" and options.trajectory:
        raise OptionError(
            "a configuration has no training path yet",
            where=str(options.subject),
            fix="train it and name the run, or remove --trajectory",
        )
    if options.size % 2 == 0:
        raise OptionError(f"--size is {options.size}", fix="give an odd number, so that the weights themselves are a point")
    if options.trajectory:
        for name in ("span", "seed"):
            if getattr(options, name) is not None:
                raise OptionError(
                    f"--{name} has no effect with --trajectory", fix="remove it: the path decides the directions and the extent"
                )


@contextmanager
def _opened(path: Path, typed: list[str], device: str) -> Iterator[Subject]:
    from kilolayer.runs.run import Run, cache_folder

    if not path.is_dir():
        with prepared(path, typed, device) as (config, task):
            yield Subject(path.stem, config, task, None)
        return
    opened = Run.open(path)
    yield Subject(path.resolve().name, opened.config, opened.task(cache_folder()), opened)


def _random(subject: Subject, loss: BatchLoss, device: torch.device, options: argparse.Namespace) -> SurfaceView:
    """The surface around the weights, in two random directions."""
    from kilolayer.probe.subject import starting_model
    from kilolayer.probe.surface import grid, loss_surface, random_direction
    from kilolayer.report.facts import Fact
    from kilolayer.report.surface_page import SurfaceView
    from kilolayer.runs.chosen import choose

    if subject.run is None:
        model, of, steps = starting_model(subject.config, subject.task, device), "before the first step", [0]
    else:
        chosen = choose(subject.run.checkpoints, subject.config)
        model, steps = subject.run.load_model(device, chosen), chosen.steps
        of = f"{chosen.chosen}, step {', '.join(f'{step:,}' for step in steps)}"
    seed, span = options.seed or 0, options.span or SPAN
    directions = [random_direction(model, 2 * seed + index) for index in (0, 1)]
    steps_of_grid = grid(options.size, span)
    with _Rows(options.size) as rows:
        found = loss_surface(model, loss, directions, steps_of_grid, steps_of_grid, rows.after)
    error = loss.standard_error(model)
    unit = _unit(subject)
    return SurfaceView(
        subject.name,
        "Loss surface in two random directions",
        found.x,
        found.y,
        found.loss,
        unit,
        ("first direction", "second direction"),
        [*_model_facts(subject, of), Fact("Loss", f"{found.centre:.4f}", _precision(unit, error)), *_data(loss)],
        {"weights": steps, "centre": found.centre, "standard_error": error, "seed": seed, **_counts(loss)},
    )


def _trajectory(subject: Subject, loss: BatchLoss, device: torch.device, options: argparse.Namespace) -> SurfaceView:
    """The surface around the trajectory of a run, in the plane of its two principal components."""
    from kilolayer.models.fit import expected_weights
    from kilolayer.probe.trajectory import FEWEST, Saved, principal_plane, trajectory_surface
    from kilolayer.report.facts import Fact
    from kilolayer.report.surface_page import SurfaceView
    from kilolayer.runs.chosen import Chosen
    from kilolayer.runs.last_saved import all_deleted

    assert subject.run is not None
    if (gone := all_deleted(subject.run.checkpoints)) is not None:
        raise gone
    path = Saved.of(subject.run.checkpoints, _start(subject), expected_weights(subject.config.model))
    if len(path.paths) == 0 or len(path.steps) < FEWEST:
        raise InputError(
            f"the path has {counted(len(path.paths), 'whole checkpoint')}, which is too few for a plane",
            where=str(subject.run.checkpoints),
            fix="train with more checkpoints: --train.save_every 50 --train.keep 1000",
        )
    model = subject.run.load_model(device, Chosen("newest", [path.steps[-1]], []))
    plane = principal_plane(path, [name for name, _ in model.named_parameters()])
    with _Rows(options.size) as rows:
        found = trajectory_surface(model, loss, plane, options.size, rows.after)
    shares = [f"{share:.1%}" for share in plane.explained]
    error, end = loss.standard_error(model), _loss_of(model, loss)
    unit = _unit(subject)
    return SurfaceView(
        subject.name,
        "Loss surface and the path of training",
        found.x,
        found.y,
        found.loss,
        unit,
        (f"first component, {shares[0]}", f"second component, {shares[1]}"),
        [
            *_model_facts(subject, f"{len(plane.steps)} points, step {plane.steps[0]:,} to {plane.steps[-1]:,}"),
            Fact("Loss at the end", f"{end:.4f}", _precision(unit, error)),
            Fact("Variance in the plane", f"{sum(plane.explained):.1%}", f"{shares[0]} and {shares[1]}"),
            *_data(loss),
        ],
        {"explained": list(plane.explained), "end": end, "standard_error": error, **_counts(loss)},
        [(float(across), float(up)) for across, up in plane.path],
        plane.steps,
    )


def _start(subject: Subject) -> dict[str, torch.Tensor] | None:
    """The weights before the first step; None, with a message, if they can no longer be reproduced."""
    import torch

    from kilolayer.probe.subject import starting_model

    try:
        return starting_model(subject.config, subject.task, torch.device("cpu")).state_dict()
    except InputError as error:
        say(f"the path begins at the first checkpoint, since its start is not known: {error.what}")
        return None


def _loss_of(model: Model, loss: BatchLoss) -> float:
    import torch

    with torch.no_grad():
        return float(loss(model))


def _precision(unit: str, error: float) -> str:
    return unit if math.isnan(error) else f"{unit}, standard error {error:.2g}"  # it cannot be estimated from one batch


def _unit(subject: Subject) -> str:
    """The unit of the loss; a regression task has no classes."""
    from kilolayer.tasks import registry

    measure = "squared error" if list(getattr(subject.task, "classes", ["a class"])) == [] else "nats"
    return f"{measure} per {registry.get(subject.config.task).unit}"


def _model_facts(subject: Subject, weights: str) -> list[Any]:
    from kilolayer.report.facts import Fact

    model = subject.config.model
    return [Fact("Model", model.title, model.widths), Fact("Weights", weights)]


def _data(loss: BatchLoss) -> list[Any]:
    from kilolayer.report.facts import Fact

    count = len(loss.batches)
    return [Fact("Data", f"{loss.labels:,} labels", f"{count} training batch{'' if count == 1 else 'es'}, without dropout")]


def _counts(loss: BatchLoss) -> dict[str, int]:
    return {"batches": len(loss.batches), "labels": loss.labels}


class _Rows:
    """Shows how many rows of the surface are done, as a live line on a terminal; elsewhere nothing."""

    def __init__(self, size: int) -> None:
        self.size, self.live = size, LiveLine()

    def __enter__(self) -> _Rows:
        self.after(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.clear()

    def after(self, rows: int) -> None:
        self.live.show(f"{rows * self.size:,} of {self.size**2:,} points")


def _show(view: SurfaceView, files: SurfaceFiles) -> None:
    import numpy as np

    finite = view.loss[np.isfinite(view.loss)]
    rows = [(fact.name.lower(), fact.value, fact.note) for fact in view.facts]
    lowest, highest = (f"{finite.min():.4f}", f"{finite.max():.4f}") if finite.size else ("-", "-")
    rows += [("lowest loss", lowest, view.unit), ("highest loss", highest, view.unit)]
    if finite.size < view.loss.size:
        rows.append(("not finite", f"{view.loss.size - finite.size:,}", f"of {view.loss.size:,} points"))
    show_table(f"{view.title}: {view.name}", rows)
    for path in (files.page, *files.pictures, files.data):
        show_line(str(path))
