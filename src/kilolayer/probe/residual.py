"""The size of the residual stream after each layer."""

from __future__ import annotations

from kilolayer.layers.block import Block
from kilolayer.layers.stream import LayerOutput, state_of
from kilolayer.models.model import Model
from kilolayer.probe.hooks import ByLayer, compute, forward_hooks, root_mean_square
from kilolayer.probe.propagation import Loss


def residual_sizes(model: Model, loss: Loss) -> ByLayer:
    """The root mean square of the input of each stack's first layer, and of the output of each layer."""
    found: dict[str, list[float]] = {stack.side: [] for stack in model.stacks()}
    with forward_hooks(model) as hooks:
        for stack in hooks.stacks:

            def enter(_block: Block, inputs: tuple, side: str = stack.side) -> None:
                found[side].append(root_mean_square(hooks.real_positions(side, state_of(inputs[0]))))

            def leave(_block: Block, _inputs: tuple, output: LayerOutput, side: str = stack.side) -> None:
                found[side].append(root_mean_square(hooks.real_positions(side, state_of(output.states))))

            hooks.before(stack.layers()[0], enter)
            for block in stack.layers():
                hooks.after(block, leave)
        compute(model, loss)
    return {side: tuple(sizes) for side, sizes in found.items()}
