"""Measures a model of another library: any module of torch that holds its layers in a list.

What needs to know the inside of a layer (attention entropy, dead ReLUs, the rank of states) is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kilolayer import hints, recipes
from kilolayer.errors import InputError, shown
from kilolayer.layers.modules import in_mode
from kilolayer.models.adapt.adapt import adapt
from kilolayer.models.adapt.applied import is_adapted
from kilolayer.models.adapt.layouts import layout_of
from kilolayer.probe.diagnosis import Diagnosis, Measurements, Settings, in_full_precision
from kilolayer.probe.gradients import gradients_by_layer
from kilolayer.probe.hooks import ByKind, ByLayer, root_mean_square, table_by_module
from kilolayer.probe.rank import StateRank
from kilolayer.probe.updates import update_sizes
from kilolayer.probe.verdict import judge
from kilolayer.terminal import counted

Layers = dict[str, list[nn.Module]]
"""The layers of each stack, from the input on."""


def diagnose_foreign(model: nn.Module, loss: Callable[[Any], Tensor], settings: Settings) -> Diagnosis:
    """Measure the gradient, the norms' inputs, the residual stream and one update of `model`, and judge them.

    loss: computes the loss of a batch, a scalar, from the model.
    """
    measured = _measure(in_full_precision(model), loss, settings)
    with hints.for_shell():  # a loop of one's own has neither flags nor tables: the options are said again below
        found = judge(measured)
    words = {option: _in_python(option, model) for finding in found.findings for option in finding.options}
    said = [replace(each, options=tuple(filter(None, (words[option] for option in each.options)))) for each in found.findings]
    return replace(found, findings=tuple(said))


def layers_of(model: nn.Module) -> Layers:
    """The lists of equal layers in a model, outermost first; raises if there is none."""
    lists: Layers = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside and _is_stack(list(module)):
            lists[name] = list(module)
    if not lists:
        raise InputError(
            f"{type(model).__name__} holds no layers in a list",
            fix="give a model whose layers are of one class, in an nn.ModuleList or nn.Sequential",
        )
    sides = [next((side for side in ("encoder", "decoder") if side in name), "model") for name in lists]
    names = sides if len(set(sides)) == len(sides) else list(lists)
    return dict(zip(names, lists.values(), strict=True))


def _is_stack(layers: list[nn.Module]) -> bool:
    """Whether these are layers of one class: one is enough if the class is known, else there must be two."""
    same = len({type(layer) for layer in layers}) == 1 and all(any(each.children()) for each in layers)
    return same and (len(layers) > 1 or layout_of(layers[0]) is not None)


def _measure(model: nn.Module, loss: Callable[[Any], Tensor], settings: Settings) -> Measurements:
    stacks = layers_of(model)
    with in_mode(model, training=False):
        value = _check_loss(loss(model))
        states, norms = _states(model, loss)
        updates = update_sizes(
            model,
            loss,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            output=lambda each: _states_of_last(each, loss),
            matrices=_matrices,
        )
        return Measurements(
            title=_title(model, stacks),
            recipe="",
            settings=settings,
            loss=value,
            gradients=gradients_by_layer(model, loss, stacks),
            norm_inputs=norms,
            residual=states,
            rank=StateRank({}, {}),
            width=0,
            entropy={},
            dead_units={},
            updates=updates,
            output_at_zero=False,
        )


def _check_loss(value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError(
            f"the loss is {shown(value) if not isinstance(value, Tensor) else f'of shape {tuple(value.shape)}'}, "
            "not a number with a gradient",
            fix="give a function that returns a scalar tensor: lambda model: model(**batch).loss",
        )
    return float(value.detach())


def _title(model: nn.Module, stacks: Layers) -> str:
    depths = ", ".join(
        f"{counted(len(layers), 'layer')}{f' in its {side}' * (side != 'model')}" for side, layers in stacks.items()
    )
    recipe = " with a recipe" if is_adapted(model) else ""
    return f"{type(model).__name__}{recipe}, {depths}"


def _states(model: nn.Module, loss: Callable[[Any], Tensor]) -> tuple[ByLayer, ByKind]:
    """The root mean square of each stack's input and of each layer's output; and that of each norm's input."""
    sizes: dict[str, list[float]] = {}
    norms: dict[str, dict[tuple[int | None, str], float]] = {}
    stacks = layers_of(model)
    with _hooks() as handles:
        for side, layers in stacks.items():
            sizes[side], norms[side] = [float("nan")] * (len(layers) + 1), {}

            def enter(_module: nn.Module, inputs: Any, named: Any, side: str = side) -> None:
                sizes[side][0] = root_mean_square(first_tensor((*inputs, *named.values())))

            handles.append(layers[0].register_forward_pre_hook(enter, with_kwargs=True))
            for number, layer in enumerate(layers):

                def leave(_module: nn.Module, _inputs: Any, output: Any, side: str = side, number: int = number) -> None:
                    sizes[side][number + 1] = root_mean_square(first_tensor(output))

                handles.append(layer.register_forward_hook(leave))
                for name, module in layer.named_modules():
                    if type(module).__name__.endswith("Norm"):

                        def read(_norm: nn.Module, inputs: Any, side: str = side, key: Any = (number, name)) -> None:
                            norms[side][key] = root_mean_square(first_tensor(inputs))

                        handles.append(module.register_forward_pre_hook(read))
        loss(model)
    tables = {side: table_by_module(found, len(stacks[side])) for side, found in norms.items()}
    return {side: tuple(values) for side, values in sizes.items()}, tables


def _states_of_last(model: nn.Module, loss: Callable[[Any], Tensor]) -> Tensor:
    """The output of the last layer of the last stack for the batch of `loss`."""
    found: list[Tensor] = []
    *_, layers = layers_of(model).values()
    with _hooks() as handles, torch.enable_grad():  # without gradients, torch's encoder may pass nested tensors
        handles.append(layers[-1].register_forward_hook(lambda _layer, _inputs, output: found.append(first_tensor(output))))
        loss(model)
    return found[-1]


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [
        weight for layers in layers_of(model).values() for layer in layers for weight in layer.parameters() if weight.ndim > 1
    ]


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    """A list for the handles of hooks, which are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: Any) -> Tensor:
    """The state in what a layer is given or returns: the first tensor, [batch, length, dim]."""
    if isinstance(value, Tensor):
        return value.detach()
    return next(each.detach() for each in value if isinstance(each, Tensor))


def _in_python(option: str, model: nn.Module) -> str | None:
    """An option that a rule suggests, for a loop of one's own; None if it cannot be changed here."""
    path, _, value = option.removeprefix("--").partition(" ")
    if path != "model.recipe":
        return f"{path.rpartition('.')[2]} {value}"
    try:
        adapt(copy.deepcopy(model), recipes.get(value), start=True)
    except InputError:  # it has a recipe already, or is of a class that this one does not fit
        return None
    return f'kl.adapt(model, "{value}")'
