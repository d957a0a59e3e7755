"""A cache whose rows hold several hypotheses, and whose rows leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.layers.cache import Cache

POSITIONS: list[dict[str, Any]] = [
    *({"positions": kind} for kind in ("sinusoidal", "rotary", "xpos", "t5", "none")),
    {"positions": "learned", "max_length": 8},
]


def decoder(**options: Any) -> kl.Decoder:
    return kl.Decoder(13, 16, 4, 24, 2, dtype=torch.float64, **options).eval()


@pytest.mark.matrix(4)
@torch.no_grad()
@pytest.mark.parametrize("options", POSITIONS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_branches_read_what_separate_rows_read(options: dict[str, Any], padded: bool) -> None:
    model = decoder(**options)
    prompt = torch.randint(1, 13, (2, 3))
    if padded:
        prompt[1, :2] = 0
    tokens = torch.randint(1, 13, (3, 2, 3))  # of each step, for 2 rows with 3 branches
    parents = torch.tensor([[[0, 0, 0], [0, 0, 0]], [[2, 0, 2], [1, 1, 0]], [[0, 1, 2], [2, 2, 2]]])
    cache = model.new_cache(12)
    model(prompt, cache=cache)
    texts = [[prompt[row].tolist()] for row in range(2)]
    for step, chosen in zip(tokens, parents, strict=True):
        cache.branch(chosen)
        logits = model(step, cache=cache).logits
        texts = [
            [[*texts[row][parent], token] for parent, token in zip(chosen[row].tolist(), step[row].tolist(), strict=True)]
            for row in range(2)
        ]
        for row in range(2):
            alone = model(torch.tensor(texts[row])).logits[:, -1]
            torch.testing.assert_close(logits[row], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.matrix(2)
@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 3, 2], [3, 1], [2], [1, 0, 3, 2]])
def test_the_rows_that_are_kept_go_on_as_before(rows: list[int]) -> None:
    model = kl.EncoderDecoder(13, 16, 4, 24, 2, 2, dtype=torch.float64).eval()
    source, target, more = torch.randint(1, 13, (4, 5)), torch.randint(1, 13, (4, 3)), torch.randint(1, 13, (4, 1))
    cache = model.new_cache(6)
    model.decode(target, model.encode(source), cache=cache)
    cache.keep(torch.tensor(rows))
    logits = model.decode(more[rows], model.encode(source[rows]), cache=cache).logits[:, -1]
    expected = model(source, torch.cat([target, more], dim=1)).logits[rows, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_row_that_stays_in_its_place_is_not_copied() -> None:
    model = decoder()
    cache = model.new_cache(4)
    model(torch.randint(1, 13, (4, 3)), cache=cache)
    keys = cache.layers[0].keys
    assert keys is not None
    before = keys.clone()
    cache.keep(torch.tensor([0, 3, 2]))
    kept = cache.layers[0].keys
    assert kept is not None
    assert kept.data_ptr() == keys.data_ptr()
    assert torch.equal(kept[:, :, :3], before[[0, 3, 2], :, :3])


@torch.no_grad()
def test_branches_count_against_the_capacity() -> None:
    model, cache = decoder(), Cache(2, capacity=4)
    model(torch.ones(1, 1).long(), cache=cache)
    cache.branch(torch.zeros(1, 3).long())
    model(torch.ones(1, 3).long(), cache=cache)
    with pytest.raises(InputError, match=r"holds 4 positions, but 4 \+ 3 are needed"):
        model(torch.ones(1, 3).long(), cache=cache)
