"""The root mean square of each norm's input, by which the norm divides the gradient that passes through it.

DeepNet, section 3.2 and Figure 3b and c: as the inputs of Post-LN's norms grow, the gradient of the layers below vanishes.
"""

from __future__ import annotations

from torch import Tensor, nn

from kilolayer.layers.norms.base import Norm
from kilolayer.models.model import Model
from kilolayer.moe.groups import Groups
from kilolayer.probe.hooks import ByKind, compute, forward_hooks, layer_and_module, root_mean_square, table_by_module
from kilolayer.probe.propagation import Loss
from kilolayer.recipes.base import Kind


def norm_inputs(model: Model, loss: Loss) -> ByKind:
    """The root mean square by stack and by name of the norm, such as `self_attention.out_norm`, for each layer."""
    found: dict[str, dict[tuple[int | None, str], float]] = {stack.side: {} for stack in model.stacks()}
    with forward_hooks(model) as hooks:
        for stack in hooks.stacks:
            for name, module in stack.named_modules():
                if isinstance(module, Norm):
                    key, way = layer_and_module(name), name.rpartition(".")[2] if name.endswith((".A", ".B")) else ""

                    def record(
                        _norm: nn.Module,
                        inputs: tuple[Tensor, Groups] | tuple[Tensor],
                        key: tuple[int | None, str] = key,
                        side: str = stack.side,
                        way: str = way,
                    ) -> None:
                        # An expert's norm reads rows of tokens; padding comes after the rows of the last expert.
                        x = (
                            inputs[0][: inputs[1].ends[-1]]
                            if len(inputs) > 1
                            else hooks.real_positions(*_states(side, key[1], inputs[0]), way)
                        )
                        found[side][key] = root_mean_square(x)

                    hooks.before(module, record)
        compute(model, loss)
    return {stack.side: table_by_module(found[stack.side], len(stack.blocks)) for stack in model.stacks()}


def _states(side: str, module: str, x: Tensor) -> tuple[str, Tensor]:
    """The stack whose positions a norm reads, and its input as [batch, length, width]: heads are put beside one another."""
    side = "encoder" if module == f"{Kind.CROSS_ATTENTION}.key_norm" else side
    return side, x.transpose(1, 2).flatten(2) if x.dim() == 4 else x
