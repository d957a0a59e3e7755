"""Continuing texts: against full forwards without a cache, alone and side by side, within and beyond the context."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.errors import InputError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.generate.sample import draw
from kilolayer.tasks.causal_lm.language_model import TextStream

SHAPES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "rotary": {"positions": "rotary", "recipe": kl.recipes.get("sub_ln"), "kv_heads": 1},
    "learned": {"positions": "learned", "max_length": 16, "tie_embeddings": False},
    "t5": {"positions": "t5", "recipe": kl.recipes.get("pre_ln")},
    "padded": {"pad_id": 0},
    "experts": {"moe": kl.MoE(experts=4, second="random", capacity=0.5)},
}
PROMPTS = [[5], [7, 8, 9, 10], [6, 6, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 5, 6]]


def model_of(shape: str, seed: int = 3) -> kl.Decoder:
    options = {"pad_id": None, "dropout": 0.3, **SHAPES[shape]}
    config = kl.ModelConfig(shape="decoder", layers=2, dim=16, heads=2, ffn_dim=32, vocab_size=24, **options)
    model = kl.build_model(config, seed=seed, dtype=torch.float64)
    assert isinstance(model, kl.Decoder)
    with torch.no_grad():  # far from uniform, so that no two tokens are equally good
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.train()


def greedily(tokens: int) -> SearchConfig:
    return SearchConfig(method="greedy", max_length_factor=0, max_length_extra=tokens)


def sampling(tokens: int, **options: Any) -> SearchConfig:
    return SearchConfig(method="sample", max_length_factor=0, max_length_extra=tokens, **options)


@torch.no_grad()
def naive(model: kl.Decoder, prompt: list[int], tokens: int, context: int) -> tuple[list[int], float]:
    """The best token again and again, by a forward over all that is read; and their log-probability."""
    model.eval()
    text, first, total = prompt[-context:], len(prompt[-context:]), 0.0
    window = list(text)
    for _ in range(tokens):
        if len(window) > context:
            window = window[-max(1, context // 2) :]
        scores = model(torch.tensor([window])).logits[0, -1].log_softmax(dim=-1)
        best = max((token for token in range(24) if token not in (0, 2)), key=lambda token: float(scores[token]))
        total += float(scores[best])
        if best == 3:
            break
        text.append(best)
        window.append(best)
    model.train()
    return text[first:], total


@pytest.mark.matrix(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("context", [16, 5, 1])
def test_greedy_is_the_best_token_of_full_forwards(shape: str, context: int) -> None:
    model = model_of(shape)
    for prompt in PROMPTS:
        ((found,),) = continue_texts(model, [prompt], greedily(20), context=context)
        tokens, log_probability = naive(model, prompt, 20, context)
        assert found.tokens == tokens
        assert found.log_probability == pytest.approx(log_probability, rel=1e-9)
        assert found.ended == (len(tokens) < 20)
    assert model.training


@pytest.mark.matrix(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("config", [greedily(30), sampling(30, n_best=3, seed=5), sampling(30, top_p=0.8, temperature=1.3)])
def test_a_prompt_is_continued_the_same_alone_and_beside_others(shape: str, config: SearchConfig) -> None:
    model = model_of(shape)
    together = continue_texts(model, PROMPTS, config, context=16)
    assert [len(found) for found in together] == [config.n_best] * len(PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        (alone,) = continue_texts(model, [prompt], config, context=16, indices=[index])
        assert [each.tokens for each in alone] == [each.tokens for each in together[index]]
        assert [each.log_probability for each in alone] == pytest.approx([each.log_probability for each in together[index]])


def test_samples_differ_and_the_seed_fixes_them() -> None:
    model = model_of("rotary", seed=8)
    first, again, other = (
        [each.tokens for each in continue_texts(model, [[5, 6]], sampling(25, n_best=4, seed=seed), context=12)[0]]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert len({tuple(tokens) for tokens in [*first, *other]}) > 6


def test_sampling_follows_the_models_distribution() -> None:
    model = model_of("sinusoidal").eval()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9]])).logits[0, -1] / 2.0
    expected = logits.softmax(dim=-1)
    expected[[0, 2]] = 0.0
    found = continue_texts(model, [[5, 9]], sampling(1, n_best=4000, temperature=2.0), context=16)[0]
    counts = torch.bincount(torch.tensor([each.tokens[0] if each.tokens else 3 for each in found]), minlength=24)
    assert float((counts / 4000 - expected / expected.sum()).abs().max()) < 0.03


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    dice = random.Random(0)
    for _ in range(50):
        weights = [dice.random() ** 4 for _ in range(24)]
        probabilities = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
        top_p = dice.uniform(0.05, 0.99)
        kept, mass = set(), 0.0
        for token in sorted(range(24), key=lambda token: -weights[token]):
            if mass >= top_p:
                break
            kept.add(token)
            mass += float(probabilities[token])
        uniform = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
        rows = probabilities.log().expand(4000, -1)
        drawn = draw(rows, uniform, temperature=1.0, top_k=None, top_p=top_p)
        assert set(drawn.tolist()) <= kept
        likely = {token for token in kept if float(probabilities[token]) / mass > 0.001}
        assert likely <= set(drawn.tolist())


def test_an_end_ends_a_continuation() -> None:
    model = model_of("sinusoidal")
    with torch.no_grad():
        model.vocabulary.weight[3] = 50 * F.normalize(model.eval()(torch.tensor([[5]])).states[0, -1], dim=0)
    ((found,),) = continue_texts(model, [[5]], greedily(9), context=16)
    assert (found.tokens, found.ended) == ([], True)


def test_tokens_are_heard_as_they_are_written() -> None:
    model, heard = model_of("rotary"), []
    ((found,),) = continue_texts(model, [PROMPTS[1]], greedily(20), context=9, on_token=heard.append)
    assert heard == found.tokens + [3] * found.ended


def test_a_model_without_numbers_is_told() -> None:
    model = model_of("sinusoidal")
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="NaN"):
        continue_texts(model, [[5]], greedily(3), context=16)


@pytest.mark.parametrize("text", ["plain", "straße 日本 \U0001f600!", "\U0001f600" * 5])
def test_characters_are_shown_whole(text: str) -> None:
    shown: list[str] = []
    stream = TextStream(ByteVocabulary().decode, shown.append)
    for byte in text.encode():
        stream.add(byte + 4)
    stream.close()
    assert "".join(shown) == text
    assert not any("\ufffd" in part for part in shown)


def test_bytes_that_are_no_characters_are_shown_as_such() -> None:
    dice = random.Random(1)
    for _ in range(300):
        data = bytes(dice.choice([65, 0x80, 0xC3, 0xE2, 0xF0, 0xFF]) for _ in range(dice.randrange(40)))
        shown: list[str] = []
        stream = TextStream(ByteVocabulary().decode, shown.append)
        for byte in data:
            stream.add(byte + 4)
        stream.close()
        "".join(shown).encode()
        assert "".join(shown).count("A") == data.count(b"A")
