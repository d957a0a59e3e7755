"""Models small enough to search by hand, and searches that are too slow to be wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kilolayer as kl

PAD, BOS, EOS = 0, 2, 3


def translator(vocabulary: int = 12, *, seed: int = 0, sharpness: float = 3.0, **options: Any) -> kl.EncoderDecoder:
    """An fp64 model whose distributions differ from step to step and from source to source."""
    torch.manual_seed(seed)
    options = {"recipe": kl.recipes.DEFAULT, "dtype": torch.float64, "tie_embeddings": False, **options}
    model = kl.EncoderDecoder(vocabulary, 16, 4, 24, 2, 2, **options)
    with torch.no_grad():
        (model.vocabulary or model.embedding).weight.mul_(sharpness)
    return model.eval()


def sources(lengths: list[int], vocabulary: int = 12, *, seed: int = 0) -> Tensor:
    """Int64 [batch, longest]: random tokens and their end, padded to the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[*torch.randint(4, vocabulary, (length - 1,), generator=generator).tolist(), EOS] for length in lengths]
    return torch.tensor([row + [PAD] * (max(lengths) - len(row)) for row in rows])


@torch.no_grad()
def next_log_probabilities(model: kl.EncoderDecoder, source: Tensor, prefixes: list[list[int]]) -> Tensor:
    """After each prefix, all of one length, for one source [length]: [prefixes, vocabulary], from a forward without cache."""
    target = torch.tensor([[BOS, *prefix] for prefix in prefixes])
    logits = model(source[source != PAD].expand(len(prefixes), -1), target).logits[:, -1]
    log_probabilities = logits.log_softmax(dim=-1)
    log_probabilities[:, [PAD, BOS]] = float("-inf")
    return log_probabilities


def plain_greedy(model: kl.EncoderDecoder, source: Tensor, longest: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < longest:
        tokens.append(int(next_log_probabilities(model, source, [tokens]).argmax()))
        if tokens[-1] == EOS:
            return tokens[:-1]
    return tokens


def plain_beam(
    model: kl.EncoderDecoder, source: Tensor, longest: int, beam: int, penalty: float
) -> list[tuple[float, list[int]]]:
    """Finished (score, tokens with their end), best first; the rules of `beam_search` word for word, without its bound."""
    open_: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        log_probabilities = next_log_probabilities(model, source, [tokens for _, tokens in open_])
        ranked = sorted(
            (
                (total + gain, [*tokens, token])
                for (total, tokens), gains in zip(open_, log_probabilities.tolist(), strict=True)
                for token, gain in enumerate(gains)
                if gain > float("-inf")
            ),
            key=lambda each: -each[0],
        )
        ends = [each for each in ranked[:beam] if each[1][-1] == EOS or length == longest]
        finished += [(total / len(tokens) ** penalty, tokens) for total, tokens in ends]
        open_ = [each for each in ranked[: 2 * beam] if each[1][-1] != EOS][:beam]
        if len(finished) >= beam or not open_:
            break
    return sorted(finished, key=lambda each: -each[0])


def every_hypothesis(model: kl.EncoderDecoder, source: Tensor, longest: int, penalty: float) -> list[tuple[float, list[int]]]:
    """All (score, tokens with their end) of at most `longest` tokens, best first."""
    found: list[tuple[float, list[int]]] = []
    open_: list[tuple[float, list[int]]] = [(0.0, [])]
    for length in range(1, longest + 1):
        log_probabilities = next_log_probabilities(model, source, [tokens for _, tokens in open_]).tolist()
        longer = [
            (total + gain, [*tokens, token])
            for (total, tokens), gains in zip(open_, log_probabilities, strict=True)
            for token, gain in enumerate(gains)
            if gain > float("-inf")
        ]
        found += [(total / length**penalty, tokens) for total, tokens in longer if tokens[-1] == EOS or length == longest]
        open_ = [each for each in longer if each[1][-1] != EOS]
    return sorted(found, key=lambda each: -each[0])
