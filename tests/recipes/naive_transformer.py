"""Transformers computed the slow way from the equations of the papers, one class a recipe.

Nothing here comes from the library but the values of the weights, fetched by name; each class is only its recipe's equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS = 1e-5
Branch = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class View:
    """What a stack may look at: visible [batch, query, key]; the encoder's states and which of them are real."""

    visible: Tensor
    memory: Tensor | None = None
    memory_real: Tensor | None = None


class NaiveTransformer:
    """What all recipes share. x is [batch, length, dim]; real [batch, length] is False at padding."""

    linear_bias = True

    def __init__(self, weights: Mapping[str, Tensor], layers: Mapping[str, int], heads: int, **options: Any) -> None:
        self.weights, self.layers, self.heads, self.options = weights, layers, heads, options
        self.unread = set(weights)

    def encode(self, x: Tensor, real: Tensor) -> Tensor:
        return self.stack("encoder", x, View(real[:, None, :].expand(-1, x.shape[1], -1)))

    def decode(self, x: Tensor, real: Tensor, memory: Tensor | None = None, memory_real: Tensor | None = None) -> Tensor:
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.stack("decoder", x, View(real[:, None, :] & past, memory, memory_real))

    def embed(self, ids: Tensor, table: str = "embedding", scaled: bool = True) -> Tensor:
        weight = self.weight(f"{table}.weight")
        return weight[ids] * (math.sqrt(weight.shape[1]) if scaled else 1)

    def stack(self, side: str, x: Tensor, view: View) -> Tensor:
        x = self.bottom(side, x)
        for layer in range(self.layers[side]):
            x = self.layer(f"{side}.blocks.{layer}", x, view)
        return self.top(side, x)

    def bottom(self, side: str, x: Tensor) -> Tensor:
        return x

    def layer(self, name: str, x: Tensor, view: View) -> Tensor:
        x = self.residual(f"{name}.self_attention", x, lambda x: self.self_attention(f"{name}.self_attention.f", x, view))
        if view.memory is not None:
            x = self.residual(
                f"{name}.cross_attention", x, lambda x: self.cross_attention(f"{name}.cross_attention.f", x, view)
            )
        return self.residual(f"{name}.feedforward", x, lambda x: self.feedforward(f"{name}.feedforward.f", x))

    def self_attention(self, name: str, x: Tensor, view: View) -> Tensor:
        query, key, value = self.linear(f"{name}.query_key_value", x).chunk(3, dim=-1)
        return self.linear(f"{name}.output", self.join_heads(name, self.attend(query, key, value, view.visible)))

    def cross_attention(self, name: str, x: Tensor, view: View) -> Tensor:
        assert view.memory is not None
        assert view.memory_real is not None
        query = self.linear(f"{name}.query", x)
        key, value = self.linear(f"{name}.key_value", view.memory).chunk(2, dim=-1)
        visible = view.memory_real[:, None, :].expand(-1, x.shape[1], -1)
        return self.linear(f"{name}.output", self.join_heads(name, self.attend(query, key, value, visible)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> list[Tensor]:
        width = query.shape[-1] // self.heads
        heads = []
        for head in range(self.heads):
            q, k, v = (tensor[..., head * width : (head + 1) * width] for tensor in (query, key, value))
            scores = q @ k.transpose(1, 2) / math.sqrt(width)
            # A finite number: a padded query may see nothing, and its row must not become NaN.
            weights = scores.masked_fill(~visible, -1e30)
            weights = (weights - weights.amax(-1, keepdim=True)).exp()
            heads.append(weights / weights.sum(-1, keepdim=True) @ v)
        return heads

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.output", self.activate(name, self.linear(f"{name}.input", x)))

    def linear(self, name: str, x: Tensor) -> Tensor:
        product = x @ self.weight(f"{name}.weight").T
        return product + self.weight(f"{name}.bias") if self.linear_bias else product

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = ((centred**2).mean(-1, keepdim=True) + EPS).sqrt()
        return centred / deviation * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def weight(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self.weights[name]

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        raise NotImplementedError

    def join_heads(self, name: str, heads: list[Tensor]) -> Tensor:
        return torch.cat(heads, dim=-1)

    def activate(self, name: str, hidden: Tensor) -> Tensor:
        return hidden.clamp(min=0)

    def top(self, side: str, x: Tensor) -> Tensor:
        return x


class PostLN(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return self.norm(f"{name}.out_norm", x + f(x))


class PreLN(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return x + f(self.norm(f"{name}.pre_norm", x))

    def top(self, side: str, x: Tensor) -> Tensor:
        return self.norm(f"{side}.top_norm", x)


class DeepNorm(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return self.norm(f"{name}.out_norm", self.alpha(name.split(".")[0]) * x + f(x))

    def alpha(self, side: str) -> float:
        if self.options.get("alpha") == "one":
            return 1.0
        n, m = self.layers["encoder"], self.layers["decoder"]
        if n == 0 or m == 0:
            alpha = (2 * (n + m)) ** 0.25
        else:
            alpha = {"encoder": 0.81 * (n**4 * m) ** 0.0625, "decoder": (3 * m) ** 0.25}[side]
        return alpha * self.options.get("alpha_scale", 1)


class SubLN(PreLN):
    def join_heads(self, name: str, heads: list[Tensor]) -> Tensor:
        joined = torch.cat(heads, dim=-1)
        return joined if "cross_attention" in name else self.norm(f"{name}.inner_norm", joined)

    def activate(self, name: str, hidden: Tensor) -> Tensor:
        return self.norm(f"{name}.inner_norm", hidden.clamp(min=0))


class Admin(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return self.norm(f"{name}.out_norm", self.weight(f"{name}.skip.weight") * x + f(x))


class ReZero(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        layer = name.rpartition(".")[0]
        return x + self.weight(f"{layer}.layer_branch.weight") * f(x)


class TFixup(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return x + f(x)


class RFixup(NaiveTransformer):
    linear_bias = False

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return x + self.weight(f"{name}.branch.weight") * f(x + self.weight(f"{name}.f.input_shift.bias"))

    def activate(self, name: str, hidden: Tensor) -> Tensor:
        shifted = hidden + self.weight(f"{name}.activation_shift.bias")
        return shifted.clamp(min=0) + self.weight(f"{name}.output_shift.bias")

    def top(self, side: str, x: Tensor) -> Tensor:
        shifted = x + self.weight(f"{side}.top_shift.bias")
        return shifted * self.weight(f"{side}.top_scale.weight") if side == "encoder" else shifted


class PreNormDLCL(PreLN):
    def stack(self, side: str, x: Tensor, view: View) -> Tensor:
        normed = [x]
        for layer in range(self.layers[side]):
            output = self.layer(f"{side}.blocks.{layer}", self.combine(side, layer, normed), view)
            normed.append(self.norm(f"{side}.stream.norms.{layer}", output))
        return self.top(side, self.combine(side, self.layers[side], normed))

    def combine(self, side: str, row: int, normed: list[Tensor]) -> Tensor:
        weight = self.weight(f"{side}.stream.weight")
        return torch.stack([weight[row, k] * y for k, y in enumerate(normed)]).sum(0)


class PostNormDLCL(PostLN):
    def stack(self, side: str, x: Tensor, view: View) -> Tensor:
        weight = self.weight(f"{side}.stream.weight")
        outputs, x = [x], weight[0, 0] * x
        for layer in range(self.layers[side]):
            outputs.append(self.layer(f"{side}.blocks.{layer}", x, view))
            combined = torch.stack([weight[layer + 1, k] * y for k, y in enumerate(outputs)]).sum(0)
            x = self.norm(f"{side}.stream.norms.{layer}", combined)
        return x


class NormFormer(PreLN):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        branch = f(self.norm(f"{name}.pre_norm", x))
        if "attention" in name:
            return x + (self.norm(f"{name}.post_norm", branch) if self.changes(name) else branch)
        return (self.weight(f"{name}.skip.weight") * x if self.options.get("residual_scale") else x) + branch

    def changes(self, name: str) -> bool:
        return "cross_attention" not in name or bool(self.options.get("cross_attention"))

    def join_heads(self, name: str, heads: list[Tensor]) -> Tensor:
        if not self.changes(name):
            return torch.cat(heads, dim=-1)
        scales = self.weight(f"{name}.head_scale.weight").flatten()
        return torch.cat([scale * head for scale, head in zip(scales, heads, strict=True)], dim=-1)

    def activate(self, name: str, hidden: Tensor) -> Tensor:
        return self.norm(f"{name}.inner_norm", hidden.clamp(min=0))


class ResiDual(NaiveTransformer):
    def stack(self, side: str, x: Tensor, view: View) -> Tensor:
        self.total = self.options.get("scale", 1) * x
        x = super().stack(side, x, view)
        return x + self.norm(f"{side}.stream.norm", self.total)

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        branch = f(x)
        self.total = self.total + self.options.get("scale", 1) * branch
        return self.norm(f"{name}.out_norm", x + branch)


class B2T(NaiveTransformer):
    def layer(self, name: str, x: Tensor, view: View) -> Tensor:
        self.layer_input = x
        return super().layer(name, x, view)

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        bottom = self.layer_input if name.endswith("feedforward") else 0
        return self.norm(f"{name}.out_norm", x + f(x) + bottom)


class X0Residual(PreLN):
    def stack(self, side: str, x: Tensor, view: View) -> Tensor:
        first = x = self.norm(f"{side}.input_norm", x)
        for layer in range(self.layers[side]):
            r, c = (self.weight(f"{side}.stream.{name}.{layer}.weight") for name in ("keep", "add"))
            x = self.layer(f"{side}.blocks.{layer}", r * x + c * first, view)
        return self.top(side, x)


class Keel(NaiveTransformer):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        side = name.split(".")[0]
        reads = side == "decoder" and self.layers["encoder"] > 0
        alpha = self.layers[side] * (3 if reads else 2)
        return self.norm(f"{name}.out_norm", alpha * x + f(self.norm(f"{name}.pre_norm", x)))


class PeriLN(PreLN):
    def bottom(self, side: str, x: Tensor) -> Tensor:
        return self.norm(f"{side}.input_norm", x) if self.options.get("embedding_norm", True) else x

    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return x + self.norm(f"{name}.post_norm", f(self.norm(f"{name}.pre_norm", x)))


class LayerNormScaling(PreLN):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        layer = int(name.split(".")[2]) + 1
        return x + f(self.norm(f"{name}.pre_norm", x) / math.sqrt(layer))


class MixLN(PreLN):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        side, _, layer, _ = name.split(".")
        post = int(layer) < max(1, math.floor(self.options.get("share", 0.25) * self.layers[side]))
        return self.norm(f"{name}.out_norm", x + f(x)) if post else super().residual(name, x, f)


class LayerScale(PreLN):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        return x + self.weight(f"{name}.branch.weight") * f(self.norm(f"{name}.pre_norm", x))


class CompleteP(PreLN):
    def residual(self, name: str, x: Tensor, f: Branch) -> Tensor:
        deeper = self.layers[name.split(".")[0]] / self.options.get("base_depth", 2)
        return x + deeper ** -self.options.get("alpha", 1.0) * f(self.norm(f"{name}.pre_norm", x))

    def top(self, side: str, x: Tensor) -> Tensor:
        last = side == "decoder" or self.layers["decoder"] == 0
        wider = x.shape[-1] / self.options.get("base_width", 256)
        return super().top(side, x) / (math.sqrt(wider) if last else 1)


def add_sinusoids(x: Tensor, real: Tensor) -> Tensor:
    """x plus sines in its first half and cosines in its second; padding is not counted as a position."""
    half = x.shape[-1] // 2
    placed = x.clone()
    for sentence in range(x.shape[0]):
        for position, index in enumerate(real[sentence].nonzero().flatten().tolist()):
            for i in range(half):
                angle = position / 10_000 ** (i / half)
                placed[sentence, index, i] += math.sin(angle)
                placed[sentence, index, half + i] += math.cos(angle)
    return placed
