"""A beam search inside recorded steps finds what a beam search outside finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.generate.beam import beam_search
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.static_beam import static_beam_search
from kilolayer.runtime.reader import Reader
from kilolayer.speed.decoding import decoders_of
from kilolayer.speed.static_beam import BeamDecoder, StaticBeam
from tests.generate.small_translators import EOS, sources, translator

pytestmark = pytest.mark.filterwarnings("default")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [6, 2, 4, 1, 5]
Found = list[list[Hypothesis]]


def in_fixed_memory(model: kl.EncoderDecoder, source: Tensor, limits: list[int], *, beam: int, **options: Any) -> Found:
    steps = StaticBeam(model, source, beam=beam, max_length=max(limits))
    return static_beam_search(steps, limits, beam=beam, **options)


@torch.inference_mode()
def both(model: kl.EncoderDecoder, source: Tensor, limits: list[int], **options: Any) -> tuple[Found, Found]:
    """In fixed memory, and by the plain search."""
    source = source.to(model.embedding.weight.device)
    reader = Reader(model, source, width=options["beam"], max_length=max(limits))
    cut = [min(limit, reader.max_length) for limit in limits]
    return in_fixed_memory(model, source, limits, **options), beam_search(reader, cut, **options)


def same(ours: Found, theirs: Found, rel: float = 1e-9) -> None:
    assert [[(each.tokens, each.ended) for each in few] for few in ours] == [
        [(each.tokens, each.ended) for each in few] for few in theirs
    ]
    for name in ("score", "log_probability"):
        numbers = [[getattr(each, name) for few in found for each in few] for found in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=rel)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("beam", "penalty", "n_best"), [(1, 1.0, 1), (2, 0.0, 2), (4, 1.0, 1), (5, 0.6, 5), (3, 4.0, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_hypotheses(beam: int, penalty: float, n_best: int, seed: int, device: str) -> None:
    model, source = translator(seed=seed).to(device), sources(LENGTHS, seed=seed)
    same(*both(model, source, [9, 14, 1, 12, 5], beam=beam, length_penalty=penalty, n_best=n_best))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"positions": "rotary"},
        {"positions": "t5", "kv_heads": 1},
        {"positions": "learned", "max_length": 7},
        {"recipe": "dlcl"},
    ],
    ids=str,
)
def test_the_same_hypotheses_with_other_layers(options: dict[str, Any], device: str) -> None:
    same(*both(translator(**options).to(device), sources(LENGTHS), [9] * 5, beam=3, length_penalty=1.0, n_best=3))


@pytest.mark.parametrize("device", DEVICES)
def test_sentences_end_at_different_steps(device: str) -> None:
    model = translator(30, sharpness=6.0).to(device)
    source = sources([5] * 12, 30, seed=3)
    ours, theirs = both(model, source, [40] * 12, beam=4, length_penalty=1.0, n_best=4)
    same(ours, theirs)
    assert len({len(few[0].tokens) for few in ours}) > 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_beam_larger_than_the_vocabulary_returns_what_there_is(device: str) -> None:
    ours, theirs = both(translator(5).to(device), sources([2, 3], 5), [2, 2], beam=50, length_penalty=1.0, n_best=50)
    same(ours, theirs)
    assert [len(few) for few in ours] == [7, 7]


@pytest.mark.parametrize("device", DEVICES)
def test_equal_tokens_are_as_good_as_each_other(device: str) -> None:
    model = translator(8)
    assert model.vocabulary is not None
    with torch.no_grad():
        for table in (model.embedding.weight, model.vocabulary.weight):
            table[6] = table[7] = table[5]
    ours, theirs = both(model.to(device), sources(LENGTHS, 8), [8] * 5, beam=4, length_penalty=1.0, n_best=4)
    for few, others in zip(ours, theirs, strict=True):
        assert [[min(token, 5) for token in each.tokens] for each in few] == [
            [min(token, 5) for token in each.tokens] for each in others
        ]
        assert [each.score for each in few] == pytest.approx([each.score for each in others], rel=1e-9)
        assert len({(*each.tokens, each.ended) for each in few}) == 4


@pytest.mark.parametrize("device", DEVICES)
def test_batches_of_one_size_share_memory_and_leave_nothing_behind(device: str) -> None:
    model = translator().to(device)
    options: dict[str, Any] = {"beam": 4, "length_penalty": 1.0, "n_best": 2}
    for seed, lengths in enumerate([[9, 9, 9, 9], [3, 2, 1], [9, 9, 9, 9], [1, 5, 2, 8]]):
        same(*both(model, sources(lengths, seed=seed), [length + 9 for length in lengths], **options))
    assert [type(each) for each in decoders_of(model).decoders.values()] == [BeamDecoder]


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_broken_weights_are_named(device: str) -> None:
    model = translator().to(device)
    assert model.vocabulary is not None
    model.vocabulary.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="NaN"):
        in_fixed_memory(model, sources([3]).to(device), [5], beam=3, length_penalty=1.0)


@torch.inference_mode()
def test_one_step_more_than_needed_is_taken_and_none_beyond_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"ours": 0, "theirs": 0}

    def counted(name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            taken[name] += 1
            return method(*arguments)

        return call

    monkeypatch.setattr(BeamDecoder, "take_step", counted("ours", BeamDecoder.take_step))
    monkeypatch.setattr(Reader, "read", counted("theirs", Reader.read))
    seen = set()
    for seed in range(8):
        taken.update(ours=0, theirs=0)
        both(translator(seed=seed), sources([3], seed=seed), [6], beam=2, length_penalty=0.0)
        assert taken["ours"] == min(taken["theirs"] + 1, 6)
        seen.add(taken["theirs"])
    assert 6 in seen
    assert len(seen) > 1


@pytest.mark.parametrize("serves", [False, True])
def test_the_step_attention_changes_nothing(serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilolayer.speed.decoding.can_run_step_attention", lambda *_: serves)
    for options in ({"kv_heads": 2}, {"positions": "rotary"}, {"recipe": "normformer"}):
        model = translator(**options)
        same(*both(model, sources(LENGTHS), [9, 14, 3, 12, 5], beam=3, length_penalty=1.0, n_best=3))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"positions": "rotary"}, {"recipe": "normformer"}], ids=str)
def test_the_kernels_find_the_tokens_that_plain_fp32_finds(options: dict[str, Any]) -> None:
    """A vocabulary and heads that the kernels serve; recorded steps after the first."""
    torch.manual_seed(0)
    options = {"recipe": kl.recipes.DEFAULT, "tie_embeddings": False, **options}
    model = kl.EncoderDecoder(8000, 128, 4, 256, 3, 3, **options).to("cuda").eval()
    assert model.vocabulary is not None
    model.vocabulary.weight.data.mul_(6)
    for seed in range(3):
        lengths = [20, 7, 33, 12, 5]
        source = sources(lengths, 8000, seed=seed)
        ours, theirs = both(model, source, [15 + length % 4 for length in lengths], beam=5, length_penalty=1.0, n_best=3)
        same(ours, theirs, rel=1e-4)
    (decoder,) = decoders_of(model).decoders.values()
    assert decoder.by_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_what_it_finds_as_the_model_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = kl.EncoderDecoder(8000, 128, 4, 256, 3, 3, tie_embeddings=False).to("cuda", dtype).eval()
    assert model.vocabulary is not None
    model.vocabulary.weight.data.mul_(2)
    source = sources([20, 7, 33, 12], 8000).to("cuda")
    with torch.inference_mode():
        found = in_fixed_memory(model, source, [30] * 4, beam=5, length_penalty=1.0, n_best=3)
        for row, few in zip(source, found, strict=True):
            for each in few:
                tokens = [*each.tokens, EOS] if each.ended else each.tokens
                target = torch.tensor([[2, *tokens[:-1]]], device="cuda")
                own = model(row[row != 0][None], target).logits.double().log_softmax(-1)[0, range(len(tokens)), tokens].sum()
                assert each.log_probability == pytest.approx(float(own), rel=2e-2)
