"""Lines in, as many lines out, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.generate.translate import translate_lines
from tests.generate.small_translators import EOS, translator

VOCABULARY = 20
BREAKS = {4: "\n", 5: "\r"}
GREEDY = SearchConfig(method="greedy", max_length_factor=1.0, max_length_extra=2)


class Letters:
    """A tokenizer of one token a character that is no space; two tokens are line breaks."""

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [[4 + ord(letter) % (VOCABULARY - 4) for letter in line if not letter.isspace()] for line in lines]

    def decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(BREAKS.get(token, chr(96 + token)) for token in tokens) for tokens in ids]


MODEL = translator(VOCABULARY, sharpness=1.0)


def alone(line: str, config: SearchConfig) -> list[str]:
    (tokens,) = Letters().encode([line])
    if not tokens:
        return [""]
    (hypotheses,) = generate(MODEL, torch.tensor([[*tokens, EOS]]), config)
    return [text.replace("\n", " ").replace("\r", " ") for text in Letters().decode([each.tokens for each in hypotheses])]


@pytest.mark.slow
@settings(max_examples=25, deadline=None, database=None)
@given(lines=st.lists(st.text(max_size=9), max_size=8), window=st.integers(1, 5), batch_tokens=st.sampled_from([1, 20, 8192]))
def test_every_line_has_its_own_answer_in_its_place(lines: list[str], window: int, batch_tokens: int) -> None:
    config = SearchConfig(method="greedy", max_length_factor=1.0, max_length_extra=2, window=window, batch_tokens=batch_tokens)
    answers = list(translate_lines(MODEL, Letters(), lines, config))
    assert [each.texts for each in answers] == [alone(line, config) for line in lines]
    assert not any("\n" in each.text or "\r" in each.text for each in answers)


def test_oddities_count_as_one_line_each() -> None:
    lines = ["", "a\u2028b", "\ufeffc", "x\0y", "\v", "  ", "z" * 3000, "end"]
    answers = list(translate_lines(MODEL, Letters(), lines, SearchConfig(beam=2, max_source_length=16)))
    assert len(answers) == 8
    assert [each.text == "" and each.scores == [0.0] for each in answers] == [not line.strip() for line in lines]
    assert [each.cut for each in answers] == [False] * 6 + [True, False]


def test_a_long_line_is_cut_to_what_fits_with_tag_and_end() -> None:
    config = SearchConfig(method="greedy", max_source_length=7)
    long, exact = translate_lines(MODEL, Letters(), ["abcdefgh", "abcde"], config, prefix=[9])
    assert (long.cut, exact.cut) == (True, False)
    assert long.text == exact.text


def test_the_prefix_is_read_before_the_line() -> None:
    (answer,) = translate_lines(MODEL, Letters(), ["cab"], GREEDY, prefix=[11, 12])
    (tokens,) = Letters().encode(["cab"])
    ((expected,),) = generate(MODEL, torch.tensor([[11, 12, *tokens, EOS]]), GREEDY)
    assert answer.scores == [expected.score]


def test_samples_do_not_depend_on_windows_or_batches() -> None:
    lines = ["cab", "a", "", "bad cab", "face", "cab", "ab"]
    found = []
    for window, batch_tokens in ((100, 8192), (2, 8192), (100, 1), (3, 30)):
        config = SearchConfig(method="sample", seed=3, n_best=2, window=window, batch_tokens=batch_tokens)
        found.append([each.texts for each in translate_lines(MODEL, Letters(), lines, config)])
    assert all(each == found[0] for each in found)
    assert found[0][0] != found[0][5]  # equal lines draw anew


def test_answers_come_before_the_input_ends() -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "cab"

    config = SearchConfig(method="greedy", window=4)
    assert len(list(islice(translate_lines(MODEL, Letters(), endless(), config), 6))) == 6
    assert read == 8


def test_n_best_gives_texts_best_first() -> None:
    answers = list(translate_lines(MODEL, Letters(), ["cab", ""], SearchConfig(beam=4, n_best=3)))
    assert len(answers[0].texts) == len(answers[0].scores) == 3
    assert answers[0].scores == sorted(answers[0].scores, reverse=True)
    assert answers[1].texts == [""]


def test_learned_positions_cut_lines_too() -> None:
    model = translator(VOCABULARY, positions="learned", max_length=6)
    (answer,) = translate_lines(model, Letters(), ["abcdefgh"], SearchConfig(beam=2))
    assert answer.cut


def test_no_room_for_the_line_is_refused() -> None:
    with pytest.raises(OptionError, match="max_source_length leaves 0 of 2 tokens"):
        list(translate_lines(MODEL, Letters(), ["a"], SearchConfig(max_source_length=2), prefix=[9]))
