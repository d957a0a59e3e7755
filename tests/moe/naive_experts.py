"""Sparse feed-forward networks in plain loops over tokens: what the layer is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.layers.initialize import new_tensors
from kilolayer.layers.options import LayerOptions
from kilolayer.moe.layer import SparseFeedForward
from kilolayer.recipes.base import Plan


@dataclass
class Naive:
    """outputs by (row, position); the choices of each real token, the best first; what the statistics should be."""

    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    choices: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    router_loss: float = 0.0
    load: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    entropy: float = 0.0
    dropped: float = 0.0


def make_layer(moe: kl.MoE, plan: Plan | None = None, dtype: torch.dtype = torch.float64, **options: Any) -> SparseFeedForward:
    """A small layer, every weight random, so that none is at a start that would hide a mistake."""
    sizes = LayerOptions(**{"dim": 6, "heads": 2, "ffn_dim": 10, **options})
    with new_tensors(dtype=dtype):
        layer = SparseFeedForward(moe, sizes, plan or Plan())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if name.endswith("inner_norm.weight"):
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, 0.5, generator=generator)
        if moe.router == "xmoe":
            layer.state_dict()["router.log_temperature"].fill_(math.log(0.2))
    return layer


def softmax(values: Sequence[float]) -> list[float]:
    exponentials = [math.exp(value - max(values)) for value in values]
    return [each / sum(exponentials) for each in exponentials]


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / math.sqrt(float(a @ a)) / math.sqrt(float(b @ b)))


def feed_forward(weights: Mapping[str, Tensor], expert: int, x: Tensor, activation: str, norm: str) -> Tensor:
    """The network of one expert on one token [dim]."""

    def of(name: str) -> Tensor | float:
        return weights[name][expert] if name in weights else 0.0

    def shift(name: str) -> Tensor | float:
        return weights.get(f"experts.{name}_shift.bias", 0.0)

    hidden = weights["experts.input.weight"][expert] @ (x + shift("input")) + of("experts.input.bias") + shift("activation")
    if activation == "swiglu":
        gate, value = hidden.chunk(2)
        hidden = gate * torch.sigmoid(gate) * value
    else:
        hidden = {"relu": torch.relu, "gelu": F.gelu}[activation](hidden)
    if "experts.inner_norm.weight" in weights:
        centred = hidden - hidden.mean() if norm == "layer" else hidden
        hidden = centred / (centred.square().mean() + 1e-5).sqrt() * of("experts.inner_norm.weight") + of(
            "experts.inner_norm.bias"
        )
    return weights["experts.output.weight"][expert] @ (hidden + shift("output")) + of("experts.output.bias")


def naive(
    layer: SparseFeedForward, x: Tensor, real: Tensor | None = None, *, training: bool = False, activation="relu", norm="layer"
) -> Naive:
    """The layer on x [batch, length, dim], token by token in fp64; second experts are all kept."""
    moe, weights = layer.moe, {name: value.detach().double() for name, value in layer.state_dict().items()}
    tokens = {
        (row, index): x[row, index].detach().double()
        for row in range(x.shape[0])
        for index in range(x.shape[1])
        if real is None or bool(real[row, index])
    }
    count, found = len(tokens), Naive()
    logits: dict[tuple[int, int], list[float]] = {}
    gates: dict[tuple[int, int], list[float]] = {}
    mean_shares = [0.0] * moe.experts
    for at, token in tokens.items():
        if moe.router == "xmoe":
            low = weights["router.weight"] @ token
            scores = [cosine(low, embedding) for embedding in weights["router.embeddings"]]
            temperature = max(0.01, math.exp(float(weights["router.log_temperature"])))
            shares = softmax([score / moe.starting_temperature for score in scores])
        else:
            scores, temperature = (weights["router.weight"] @ token).tolist(), 1.0
            shares = softmax(scores)
        logits[at] = [score / temperature for score in scores]
        gates[at] = softmax(logits[at])
        if moe.gate == "sigmoid":
            gates[at] = [1 / (1 + math.exp(-logit)) for logit in logits[at]]
        bias = weights["router.selection_bias"].tolist() if moe.loss_free else [0.0] * moe.experts
        found.choices[at] = sorted(range(moe.experts), key=lambda e: -(gates[at][e] + bias[e]))[: moe.top_k]
        for expert, share in enumerate(shares):
            mean_shares[expert] += share / count
    found.first = [sum(choice[0] == e for choice in found.choices.values()) / count for e in range(moe.experts)]
    found.load = [sum(e in choice for choice in found.choices.values()) for e in range(moe.experts)]
    balance = moe.experts * sum(m * c for m, c in zip(mean_shares, found.first, strict=True))
    z = sum(math.log(sum(map(math.exp, each))) ** 2 for each in logits.values()) / count
    found.router_loss = moe.balance_weight * balance + moe.z_loss * z
    for each in gates.values():
        found.entropy -= sum(g / sum(each) * math.log(g / sum(each)) for g in each) / count
    taken = _within_capacity(moe, found.choices) if training and moe.capacity is not None else found.choices
    found.dropped = 1 - sum(map(len, taken.values())) / (count * moe.top_k)
    for at, token in tokens.items():
        whole = sum(gates[at][e] for e in found.choices[at]) if moe.top_k > 1 else 1.0
        parts = [gates[at][e] / whole * feed_forward(weights, e, token, activation, norm) for e in taken[at]]
        found.outputs[at] = torch.stack(parts).sum(0) if parts else torch.zeros_like(token)
    return found


def _within_capacity(moe: kl.MoE, choices: dict[tuple[int, int], list[int]]) -> dict[tuple[int, int], list[int]]:
    """All first choices in the order of positions, then all second ones, as long as there is room."""
    assert moe.capacity is not None
    room = math.floor(moe.top_k * math.ceil(len(choices) / moe.experts) * moe.capacity + 1e-6)
    used: Counter[int] = Counter()
    taken: dict[tuple[int, int], list[int]] = {at: [] for at in choices}
    for rank in range(moe.top_k):
        for at, choice in choices.items():
            if used[choice[rank]] < room:
                used[choice[rank]] += 1
                taken[at].append(choice[rank])
    return taken


def compare(layer: SparseFeedForward, x: Tensor, real: Tensor | None, tolerance: float, **options: Any) -> None:
    """Assert that layer and loops agree, in output and in every statistic."""
    y, routing = layer(x, real)
    expected = naive(layer, x, real, training=layer.training, **options)
    outputs = torch.zeros_like(x, dtype=torch.float64)
    for (row, place), output in expected.outputs.items():
        outputs[row, place] = output
    torch.testing.assert_close(y.double(), outputs, rtol=tolerance, atol=tolerance)
    assert routing.load.tolist() == expected.load
    assert float(routing.tokens) == len(expected.choices)
    torch.testing.assert_close(routing.first.double(), torch.tensor(expected.first, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    for found, value in (
        (routing.router_loss, expected.router_loss),
        (routing.entropy, expected.entropy),
        (routing.dropped, expected.dropped),
    ):
        assert math.isclose(float(found.detach()), value, rel_tol=max(tolerance, 1e-9), abs_tol=tolerance)
