"""What a recipe adds to one sublayer of another library's layer: norms and scales, called by hooks on the layer's own modules.

    N(skip x + branch N_post(f(in_scale N_pre(x))))

A Pre-LN class has N_pre, a Post-LN class N. If skip is a number a, N(a x + b) = N(x + b / a) with eps / a^2, so only the branch
is scaled. If it is learned, the state is multiplied by it before the sublayer, and divided by it where f reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kilolayer.layers.norms.base import norm_class
from kilolayer.layers.scale import HeadScale, LearnedScale, make_scale
from kilolayer.models.adapt.fit import fixed_number
from kilolayer.models.adapt.inner_attention import InnerAttention
from kilolayer.models.adapt.sublayers import ForeignSublayer, eps_name
from kilolayer.recipes.base import Kind, Learned, NormSpec, PerLayer, Place, Recipe, Scale


class Additions(nn.Module):
    """The norms and scales of one sublayer that its own class does not have; absent ones are the identity.

    Its methods are the hooks, so a copy of the model has hooks on the copy, and a pickled model keeps them.
    """

    def __init__(
        self, recipe: Recipe, place: Place, sublayer: ForeignSublayer, norm_first: bool, input_norm: NormSpec | None
    ) -> None:
        super().__init__()
        self.recipe, self.depths = recipe, place.depths
        plan = recipe.plan(place)
        width, inner_width = sublayer.width, sublayer.last.values.shape[1]
        self.kind, self.heads = sublayer.kind, sublayer.heads
        self.input_norm = _norm_like(input_norm, sublayer.norm, width)
        self.pre_norm = _norm_like(None if norm_first else plan.pre_norm, sublayer.norm, width)
        self.inner_norm = _norm_like(plan.inner_norm, sublayer.norm, inner_width)
        self.post_norm = _norm_like(plan.post_norm, sublayer.norm, width)
        self.head_scale = HeadScale(self.heads) if plan.head_scale else nn.Identity()
        self.in_scale = make_scale(_as_constant(plan.in_scale), width)
        self.branch = make_scale(_as_constant(plan.branch), width)
        number = fixed_number(plan.skip)
        self.skip_number = 1.0 if number is None else float(number)
        self.skip = make_scale(plan.skip if number is None else 1.0, width)
        self.handles: list[RemovableHandle] = []
        self.changed: list[tuple[nn.Module, str, Any]] = []

    def attach(self, sublayer: ForeignSublayer, layer: nn.Module, before: nn.Module | None) -> None:
        """Register the necessary hooks. before: the norm of the previous sublayer in the same layer."""
        if _present(self.input_norm):
            self._keep(layer.register_forward_pre_hook(self.normalize_input, with_kwargs=True))
        if _present(self.skip):
            if before is None:
                self._keep(layer.register_forward_pre_hook(self.scale_input, with_kwargs=True))
            else:
                self._keep(before.register_forward_hook(self.scale_state))
        if any(map(_present, (self.skip, self.pre_norm, self.in_scale))):
            self._keep(sublayer.function.register_forward_pre_hook(self.read, with_kwargs=True))
        changed_inside = _present(self.inner_norm) or _present(self.head_scale)
        if changed_inside:
            if isinstance(sublayer.output, nn.MultiheadAttention):
                self.change(sublayer.output, "__class__", InnerAttention)
                sublayer.output.__dict__["inside"] = self.inside
            else:
                self._keep(sublayer.output.register_forward_pre_hook(self.look_inside))
        # Even if nothing is scaled: torch's layers skip the attention's forward unless one of their modules has a hook.
        if changed_inside or _present(self.post_norm) or _present(self.branch) or self.skip_number != 1:
            self._keep(sublayer.output.register_forward_hook(self.write))
        if self.skip_number != 1:
            eps = eps_name(sublayer.norm)
            self.change(sublayer.norm, eps, getattr(sublayer.norm, eps) / self.skip_number**2)

    def detach(self) -> None:
        """Remove the hooks and undo the changes."""
        for handle in self.handles:
            handle.remove()
        for module, name, value in reversed(self.changed):
            setattr(module, name, value)
            if name == "__class__":
                del module.__dict__["inside"]
        self.handles, self.changed = [], []

    def change(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an attribute of one of the layer's modules; `detach` restores it."""
        self.changed.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    @property
    def changes_nothing(self) -> bool:
        """Whether the layer's class alone computes the same."""
        return not self.handles and not self.changed

    def own_norms(self) -> list[str]:
        """The names of the norms and head scales that it holds."""
        parts = {name: getattr(self, name) for name in ("input_norm", "pre_norm", "inner_norm", "post_norm", "head_scale")}
        return [name for name, part in parts.items() if _present(part)]

    def inside(self, heads: Tensor) -> Tensor:
        """Transform the input of the output projection, [..., width inside f]."""
        if isinstance(self.head_scale, HeadScale):
            heads = (heads.unflatten(-1, (self.heads, -1)) * self.head_scale.weight[:, 0]).flatten(-2)
        return self.inner_norm(heads)

    def normalize_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_first(args, kwargs, self.input_norm)

    def scale_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _with_first(args, kwargs, self.skip)

    def scale_state(self, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self.skip(output)

    def read(self, function: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # nn.MultiheadAttention is given the same state as query, key and value.
        same = self.kind is Kind.SELF_ATTENTION and isinstance(function, nn.MultiheadAttention)
        return _with_first(args, kwargs, self._reading, everywhere=same)

    def look_inside(self, output: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.inside(args[0]), *args[1:])

    def write(self, output: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        if isinstance(result, tuple):
            return (self._written(result[0]), *result[1:])
        return self._written(result)

    def _reading(self, x: Tensor) -> Tensor:
        if isinstance(self.skip, LearnedScale):
            x = x / self.skip.weight
        return self.in_scale(self.pre_norm(x))

    def _written(self, y: Tensor) -> Tensor:
        y = self.branch(self.post_norm(y))
        return y if self.skip_number == 1 else y / self.skip_number

    def _keep(self, handle: RemovableHandle) -> None:
        self.handles.append(handle)


def attribute(kind: Kind) -> str:
    """The attribute under which a layer holds the additions of a sublayer."""
    return f"recipe_{kind}"


def _as_constant(scale: Scale) -> Scale:
    """A learned scale that is not trained, replaced by its value."""
    return PerLayer(scale.init) if isinstance(scale, Learned) and not scale.trainable else scale


def _norm_like(spec: NormSpec | None, norm: nn.Module, size: int) -> nn.Module:
    """The norm of a plan over `size`, by default of the same kind as `norm`; the identity if there is none."""
    if spec is None:
        return nn.Identity()
    kind = ("layer" if isinstance(norm, nn.LayerNorm) else "rms") if spec.kind is None else spec.kind
    return norm_class(kind)(size, eps=getattr(norm, eps_name(norm)) if spec.eps is None else spec.eps)


def _present(part: nn.Module) -> bool:
    return not isinstance(part, nn.Identity)


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], everywhere: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first one changed; with `everywhere`, also wherever the same tensor is passed again."""
    if not args:
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}
    first = args[0]
    changed = change(first)
    return tuple(changed if index == 0 or (everywhere and arg is first) else arg for index, arg in enumerate(args)), kwargs
