"""Greedy and beam search against searches without cache, batch or bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.generate.beam import beam_search
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.generate.search import generate
from kilolayer.runtime.reader import Reader
from tests.generate.small_translators import BOS, EOS, PAD, every_hypothesis, plain_beam, plain_greedy, sources, translator

LENGTHS = [6, 2, 4, 1, 5]
METHODS = [
    SearchConfig(method="greedy"),
    SearchConfig(beam=1),
    SearchConfig(beam=4, n_best=3),
    SearchConfig(beam=3, length_penalty=0.0),
    SearchConfig(method="sample", n_best=3, seed=7),
    SearchConfig(method="sample", top_k=4, top_p=0.8, temperature=1.5),
]
NAMES = ["greedy", "beam 1", "beam 4", "beam 3 without penalty", "3 samples", "top-k and top-p"]


def at_most(longest: int, **options: Any) -> SearchConfig:
    return SearchConfig(**options, max_length_factor=0.0, max_length_extra=longest)


def with_end(hypothesis: Hypothesis) -> list[int]:
    return [*hypothesis.tokens, EOS] if hypothesis.ended else hypothesis.tokens


# --- against exhaustive and plain searches ---


@pytest.mark.matrix(4)
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_that_holds_everything_finds_the_true_n_best(penalty: float, seed: int) -> None:
    # Of 6 tokens 3 continue and 1 ends: 1 + 3 + 9 + 27 + 81 hypotheses of at most 4 tokens, the cut ones included.
    model, source = translator(6, seed=seed), sources([3, 5], 6, seed=seed)
    found = generate(model, source, at_most(4, beam=128, n_best=20, length_penalty=penalty))
    for row, hypotheses in zip(source, found, strict=True):
        expected = every_hypothesis(model, row, 4, penalty)[:20]
        assert [with_end(each) for each in hypotheses] == [tokens for _, tokens in expected]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected], rel=1e-12)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("beam", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0), (5, 0.6)])
def test_beam_search_is_the_plain_one(seed: int, beam: int, penalty: float) -> None:
    model, source = translator(seed=seed), sources(LENGTHS, seed=seed)
    found = generate(model, source, at_most(9, beam=beam, n_best=beam, length_penalty=penalty))
    for row, hypotheses in zip(source, found, strict=True):
        expected = plain_beam(model, row, 9, beam, penalty)[:beam]
        assert [with_end(each) for each in hypotheses] == [tokens for _, tokens in expected]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected], rel=1e-12)


OPTIONS: list[dict[str, Any]] = [
    *({"recipe": name} for name in kl.recipes.names()),
    *({"positions": kind} for kind in ("rotary", "xpos", "t5", "none")),
    {"positions": "learned", "max_length": 9},
    {"kv_heads": 2},
    {"tie_embeddings": True},
]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_hypotheses_side_by_side_are_hypotheses_alone(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = translator(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    source = sources([6, 2, 4])
    for row, hypotheses in zip(source, generate(model, source, at_most(8, beam=3, n_best=3)), strict=True):
        expected = plain_beam(model, row, 8, 3, 1.0)[:3]
        assert [with_end(each) for each in hypotheses] == [tokens for _, tokens in expected]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in expected], rel=1e-9)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("seed", range(5))
def test_greedy_takes_the_best_token_at_each_step_and_is_a_beam_of_one(seed: int) -> None:
    model, source = translator(seed=seed), sources(LENGTHS, seed=seed)
    greedy = [each.tokens for (each,) in generate(model, source, at_most(9, method="greedy"))]
    assert greedy == [plain_greedy(model, row, 9) for row in source]
    for penalty in (0.0, 1.0, 3.0):
        beam = generate(model, source, at_most(9, beam=1, length_penalty=penalty))
        assert [each.tokens for (each,) in beam] == greedy


@pytest.mark.matrix(6)
@pytest.mark.parametrize("config", METHODS, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_a_sentence_is_decoded_the_same_alone_and_in_a_batch(config: SearchConfig, seed: int) -> None:
    model, source = translator(seed=seed), sources(LENGTHS, seed=seed)
    together = generate(model, source, config, indices=[3, 1, 4, 15, 9])
    for row, index, hypotheses in zip(source, [3, 1, 4, 15, 9], together, strict=True):
        (alone,) = generate(model, row[row != PAD][None], config, indices=[index])
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]
        assert [each.score for each in alone] == pytest.approx([each.score for each in hypotheses], rel=1e-10)


# --- when a search ends ---


class Counting(Reader):
    """Counts the tokens that the model reads."""

    rows = 0
    steps = 0

    def read(self, tokens: Tensor) -> Tensor:
        self.rows += len(tokens)
        self.steps += 1
        return super().read(tokens)


@pytest.mark.matrix(6)
@torch.inference_mode()
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("n_best", [1, 3])
def test_stopping_by_the_bound_changes_nothing_but_the_time(penalty: float, n_best: int) -> None:
    read: dict[bool, int] = {True: 0, False: 0}
    for seed in range(6):
        model, source = translator(seed=seed), sources(LENGTHS, seed=seed)
        found = []
        for early in read:
            reader = Counting(model, source, width=4, max_length=14)
            limits = [14, 9, 11, 12, 5]
            found.append(beam_search(reader, limits, beam=4, length_penalty=penalty, n_best=n_best, early_stop=early))
            read[early] += reader.rows
        assert [[each.tokens for each in sentence] for sentence in found[0]] == [
            [each.tokens for each in sentence] for sentence in found[1]
        ]
    assert read[True] <= read[False]
    if penalty == 0:
        assert read[True] < read[False]


@torch.inference_mode()
def test_sentences_that_are_over_leave_the_batch() -> None:
    model, source = translator(), sources([3] * 5)
    reader = Counting(model, source, width=2, max_length=9)
    found = beam_search(reader, [1, 9, 1, 2, 1], beam=2, length_penalty=5.0, n_best=2, early_stop=False)
    assert all(found)
    assert reader.rows <= 5 + 2 + (9 - 2)
    keys = reader.cache.layers[0].keys
    assert keys is not None
    assert len(keys) == 1


@torch.inference_mode()
def test_hypotheses_share_their_source_and_nothing_moves_when_parents_change() -> None:
    model, source = translator(), sources([4, 4])
    reader = Reader(model, source, width=3, max_length=9)
    layer = reader.cache.layers[1]
    reader.branch(torch.zeros(2, 1, dtype=torch.int64))
    reader.read(reader.first)
    reader.branch(torch.zeros(2, 3, dtype=torch.int64))
    reader.read(torch.tensor([[4, 5, 6], [7, 8, 9]]))
    assert layer.keys is not None
    before, place = layer.keys[:, :, :4].clone(), layer.keys.data_ptr()
    reader.branch(torch.tensor([[2, 2, 0], [1, 0, 1]]))
    reader.read(torch.tensor([[4, 4, 4], [5, 5, 5]]))
    assert layer.keys.data_ptr() == place
    assert torch.equal(layer.keys[:, :, :4], before)
    assert layer.memory is not None
    assert layer.memory[0].shape[0] == 2


@pytest.mark.matrix(3)
@pytest.mark.parametrize("config", METHODS, ids=NAMES)
def test_no_hypothesis_is_longer_than_its_own_source_allows(config: SearchConfig) -> None:
    model, source = translator(sharpness=0.1), sources(LENGTHS)
    options = {name: getattr(config, name) for name in ("method", "beam", "length_penalty", "top_k", "seed", "n_best")}
    short = SearchConfig(**options, max_length_factor=1.5, max_length_extra=0)
    for length, hypotheses in zip(LENGTHS, generate(model, source, short), strict=True):
        assert hypotheses
        assert all(len(with_end(each)) <= max(1, int(1.5 * length)) for each in hypotheses)


@pytest.mark.parametrize("config", [{"method": "greedy"}, {"beam": 4, "n_best": 4}, {"method": "sample", "n_best": 2}])
def test_a_length_of_one_gives_one_token_or_the_end(config: dict[str, Any]) -> None:
    for hypotheses in generate(translator(), sources(LENGTHS), at_most(1, **config)):
        for each in hypotheses:
            assert len(with_end(each)) == 1
            assert each.score == each.log_probability


def test_a_beam_larger_than_the_vocabulary_returns_what_there_is() -> None:
    model, source = translator(5), sources([2, 3], 5)
    for hypotheses in generate(model, source, at_most(2, beam=50, n_best=50)):
        # Tokens 1, 3 (the end) and 4 can follow: 1 hypothesis of one token, 2 x 3 of two.
        assert len(hypotheses) == 7
        assert len({tuple(with_end(each)) for each in hypotheses}) == 7


def test_learned_positions_bound_the_length() -> None:
    model = translator(positions="learned", max_length=6, sharpness=0.01)
    for config in (SearchConfig(method="greedy"), SearchConfig(beam=3, length_penalty=9.0), SearchConfig(method="sample")):
        assert all(len(with_end(each)) <= 6 for (each,) in generate(model, sources([6, 2]), config))


# --- what is generated ---


@pytest.mark.matrix(3)
@pytest.mark.parametrize("config", METHODS, ids=NAMES)
def test_padding_and_start_are_never_generated(config: SearchConfig) -> None:
    model = translator(sharpness=1.0)
    assert model.vocabulary is not None
    with torch.no_grad():  # scores of padding and start follow the largest states, whatever they are
        model.vocabulary.weight[PAD] = model.vocabulary.weight[4] * 50
        model.vocabulary.weight[BOS] = -model.vocabulary.weight[4] * 50
    for hypotheses in generate(model, sources(LENGTHS), config):
        for each in hypotheses:
            assert not {PAD, BOS, EOS} & set(each.tokens)


def test_the_log_probability_is_the_models_own() -> None:
    model, source = translator(), sources([5])
    for config in METHODS:
        for each in generate(model, source, config)[0]:
            tokens = with_end(each)
            target = torch.tensor([[BOS, *tokens[:-1]]])
            with torch.no_grad():
                own = model(source, target).logits.log_softmax(-1)[0, range(len(tokens)), tokens].sum()
            assert each.log_probability == pytest.approx(own.item(), rel=1e-10)
            penalty = (1.0 if config.length_penalty is None else config.length_penalty) if config.method == "beam" else 0.0
            assert each.score == pytest.approx(each.log_probability / len(tokens) ** penalty)


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model, source = translator(dropout=0.5), sources(LENGTHS)
    expected = generate(model, source, SearchConfig())
    model.train()
    assert generate(model, source, SearchConfig()) == expected
    assert model.training
    assert model.decoder.blocks[0].training


@pytest.mark.matrix(3)
@pytest.mark.parametrize("config", METHODS, ids=NAMES)
def test_broken_weights_are_named(config: SearchConfig) -> None:
    model = translator()
    assert model.vocabulary is not None
    model.vocabulary.weight.data.fill_(float("nan"))
    with pytest.raises(InputError, match="NaN"):
        generate(model, sources([3]), config)


def test_a_model_without_weights_is_refused() -> None:
    model = kl.Decoder(vocab_size=9, layers=1, dim=8, heads=2, ffn_dim=16, device="meta")
    for device in ("cpu", "meta"):
        with pytest.raises(InputError, match="on the meta device"):
            generate(model, torch.ones(1, 2, dtype=torch.long, device=device), SearchConfig())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (4,)])
def test_an_empty_batch_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="shape"):
        generate(translator(), torch.ones(shape, dtype=torch.int64), SearchConfig())


def test_a_row_of_padding_is_refused() -> None:
    with pytest.raises(InputError, match="row 1 of the source is only padding"):
        generate(translator(), torch.tensor([[5, 3], [0, 0]]), SearchConfig())


MODEL = translator(9, dtype=torch.float32)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=5), min_size=4, max_size=4),
    options=st.one_of(
        st.just({"method": "greedy"}),
        st.builds(dict, beam=st.integers(1, 12), length_penalty=st.sampled_from([0.0, 0.5, 1.0, 4.0])),
        st.builds(
            dict,
            method=st.just("sample"),
            n_best=st.integers(1, 3),
            temperature=st.sampled_from([None, 1e-6, 0.5, 100.0]),
            top_k=st.sampled_from([None, 1, 3, 1000]),
            top_p=st.sampled_from([None, 1e-9, 0.5, 1.0]),
        ),
    ),
    longest=st.integers(1, 4),
)
def test_a_thousand_random_inputs_have_an_answer(rows: list[list[int]], options: dict[str, Any], longest: int) -> None:
    width = max(map(len, rows))
    source = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    found = generate(MODEL, source, at_most(longest, **options))
    assert len(found) == len(rows)
    for hypotheses in found:
        assert hypotheses
        assert all(0 <= len(each.tokens) <= longest and each.log_probability <= 0 for each in hypotheses)


# --- a decoder alone ---


@pytest.mark.matrix(2)
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "xpos", "t5", "none"])
def test_a_decoder_continues_prompts_of_different_lengths(positions: str) -> None:
    model = kl.Decoder(12, 16, 4, 24, 2, tie_embeddings=False, positions=positions, dtype=torch.float64).eval()
    assert model.vocabulary is not None
    model.vocabulary.weight.data.mul_(3)
    prompts = sources([5, 1, 3])
    for prompt, (each,) in zip(prompts, generate(model, prompts, at_most(7, method="greedy")), strict=True):
        tokens: list[int] = prompt[prompt != PAD].tolist()
        start = len(tokens)
        while len(tokens) - start < 7 and (len(tokens) == start or tokens[-1] != EOS):
            with torch.no_grad():
                scores = model(torch.tensor([tokens])).logits[0, -1]
            scores[[PAD, BOS]] = float("-inf")
            tokens.append(int(scores.argmax()))
        assert with_end(each) == tokens[start:]
    together = generate(model, prompts, at_most(7, beam=3, n_best=3))
    for prompt, hypotheses in zip(prompts, together, strict=True):
        (alone,) = generate(model, prompt[prompt != PAD][None], at_most(7, beam=3, n_best=3))
        assert [each.tokens for each in alone] == [each.tokens for each in hypotheses]


def test_a_decoder_whose_positions_are_used_up_says_so() -> None:
    model = kl.Decoder(12, 16, 4, 24, 2, positions="learned", max_length=4).eval()
    (each,) = generate(model, sources([4]), SearchConfig(method="greedy"))[0]
    assert len(with_end(each)) == 1
    with pytest.raises(InputError, match="learned 4 positions, and the text before takes 5"):
        generate(model, sources([5]), SearchConfig(method="greedy"))


def test_a_search_leaves_each_module_as_it_was() -> None:
    model = translator(dropout=0.5).train()
    model.encoder.eval()
    before = [module.training for module in model.modules()]
    source = sources([4, 7])
    found = [generate(model, source, SearchConfig(beam=3)) for _ in range(2)]
    assert found[0] == found[1]
    assert [module.training for module in model.modules()] == before
