"""Decoding in fixed memory finds what decoding with a growing cache finds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.generate.beam import beam_search
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.search import greedy, sample
from kilolayer.runtime.reader import Reader, Reads
from kilolayer.speed.decoding import Size, _decoders, decoders_of
from kilolayer.speed.fast import fast_form
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.static_reader import ScoringDecoder, StaticReader
from tests.generate.small_translators import sources, translator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SEARCHES: dict[str, tuple[int, Any]] = {
    "greedy": (1, greedy),
    "beam": (4, lambda reader, limits: beam_search(reader, limits, beam=4, length_penalty=0.8, n_best=3)),
    "sample": (3, lambda reader, limits: sample(reader, limits, samples=3, indices=range(len(limits)), seed=5, top_k=4)),
}


def same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    assert [[each.tokens for each in few] for few in ours] == [[each.tokens for each in few] for few in theirs]
    scores = [[each.score for few in found for each in few] for found in (ours, theirs)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4, abs=1e-5)


def language_model(**options: Any) -> kl.Decoder:
    torch.manual_seed(0)
    model = kl.Decoder(12, 16, 4, 24, 2, **options)
    with torch.no_grad():
        for weight in model.decoder.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
        scores = model.embedding.weight if model.vocabulary is None else model.vocabulary.weight
        scores.mul_(3.0)
    return model


@torch.inference_mode()
def both(model: kl.EncoderDecoder | kl.Decoder, search: str, lengths: list[int], seed: int) -> list[list[list[Hypothesis]]]:
    source = sources(lengths, seed=seed).to(next(model.parameters()).device)
    width, find = SEARCHES[search]
    limits = [length + 5 for length in lengths]
    readers: list[Reads] = [kind(model, source, width=width, max_length=max(limits)) for kind in (StaticReader, Reader)]
    return [find(reader, [min(limit, reader.max_length) for limit in limits]) for reader in readers]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "rotary"},
        {"positions": "t5", "kv_heads": 1},
        {"positions": "learned", "max_length": 20},
        {"recipe": "dlcl"},
        {"recipe": "peri_ln"},
        {"recipe": "sub_ln", "tie_embeddings": False},
        {"pad_id": None},
        {"moe": kl.MoE(experts=3, every=1)},
    ],
)
def test_the_same_hypotheses(search: str, options: dict[str, Any], device: str) -> None:
    model = translator(**options).to(device).eval()
    for seed, lengths in enumerate([[3, 7, 1, 5, 5], [2], [9, 4, 6, 8, 3, 3, 1]]):
        same(*both(model, search, lengths, seed))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "rotary", "kv_heads": 2},
        {"positions": "t5"},
        {"recipe": "sub_ln", "tie_embeddings": False},
        {"recipe": "sub_ln", "positions": "rotary", "moe": kl.MoE(experts=3)},
    ],
)
def test_texts_are_continued_alike(search: str, options: dict[str, Any], device: str) -> None:
    model = language_model(**options).to(device).eval()
    for seed, lengths in enumerate([[3, 7, 1, 5, 5], [1, 1], [9, 4, 6, 8, 3, 3, 1]]):
        same(*both(model, search, lengths, seed))


@pytest.mark.parametrize("device", DEVICES)
def test_texts_of_one_length_are_continued_up_to_the_last_learned_position(device: str) -> None:
    model = language_model(positions="learned", max_length=12).to(device).eval()
    for search in SEARCHES:
        same(*both(model, search, [8, 8], seed=1))


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_one_size_share_memory_and_leave_nothing_behind(device: str) -> None:
    model = translator().to(device).eval()
    first = both(model, "beam", [9, 9, 9, 9], seed=1)
    both(model, "beam", [3, 2, 1], seed=2)
    same(*both(model, "beam", [9, 9, 9, 9], seed=1))
    same(both(model, "beam", [9, 9, 9, 9], seed=1)[0], first[0])
    assert len(_decoders[model].decoders) == 1
    for rows in range(1, 40, 6):
        same(*both(model, "greedy", [3] * rows, seed=rows))
    assert len(_decoders[model].decoders) == 4


def test_a_source_beyond_the_learned_positions_is_refused_as_ever() -> None:
    model = translator(positions="learned", max_length=20).eval()
    with pytest.raises(InputError, match="21 positions"):
        StaticReader(model, sources([21]), width=1, max_length=5)
    same(*both(model, "greedy", [20, 3], seed=1))


@pytest.mark.gpu
def test_the_encoder_and_the_step_are_recorded() -> None:
    model = translator().to("cuda").eval()
    for seed in range(3):
        same(*both(model, "beam", [4, 5], seed=seed))
    recorder = decoders_of(model).recorder
    assert recorder is not None
    (decoder,) = decoders_of(model).decoders.values()
    assert set(recorder.recordings) == {((decoder, "read_source"),), ((decoder, "take_step"),)}


@pytest.mark.parametrize("form", [lambda model: model, fast_form], ids=["plain", "fast"])
def test_decoders_do_not_keep_their_model(form: Any) -> None:
    model = form(translator())
    same(*both(model, "greedy", [4, 5], seed=1))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_memory_serves_weights_where_they_were_when_it_was_made() -> None:
    model, size = translator(), Size.smallest_for(2, 1, 8, 4)
    decoders = decoders_of(model)
    decoder = decoders.decoder(ScoringDecoder, model, size)
    assert decoders.decoder(ScoringDecoder, model, size) is decoder
    moved = model.decoder.blocks[-1].get_parameter("feedforward.f.output.weight")
    moved.data = moved.data.clone()
    assert decoders.decoder(ScoringDecoder, model, size) is not decoder


@pytest.mark.parametrize("form", [lambda model: model, fast_form], ids=["plain", "fast"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_replaced_vocabulary_is_read_at_once(device: str, form: Any) -> None:
    model = form(translator(tie_embeddings=False)).to(device).eval()
    same(*both(model, "greedy", [4, 5], seed=1))
    model.vocabulary = nn.Linear(16, 12, device=device, dtype=torch.float64)
    same(*both(model, "greedy", [4, 5], seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["", "decoder.blocks.1.feedforward.f.output"])
def test_weights_that_moved_are_read_where_they_are(name: str) -> None:
    model = translator().to("cuda").eval()
    same(*both(model, "beam", [4, 5], seed=1))
    with torch.no_grad():
        for weight in model.get_submodule(name).parameters():
            weight.data = weight.data * 1.1
    same(*both(model, "beam", [4, 5], seed=1))


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_run_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no recording today\nand more")

    monkeypatch.setattr(GraphPool, "record", fail)
    model = translator().to("cuda").eval()
    with pytest.warns(UserWarning, match="recording failed: no recording today$"):
        same(*both(model, "beam", [4, 5], seed=1))
    same(*both(model, "beam", [4, 5], seed=2))  # a second warning would be an error
