"""Examples as batches: their tokens, their order, what fills them up, and a position that can be saved."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilolayer.data.example_batches import (
    EncodedExamples,
    ExampleBatch,
    ExampleBatches,
    encode_example,
    padded_length,
    real_rows,
)
from kilolayer.data.example_file import Example
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.errors import InputError

BYTES = ByteVocabulary()
PAD, START, END = 0, 2, 3


def ids(text: str) -> list[int]:
    return [byte + 4 for byte in text.encode()]


def test_one_sentence_stands_between_start_and_end() -> None:
    assert encode_example("abc", None, BYTES, 8)[0].tolist() == [START, *ids("abc"), END]
    assert encode_example("abcdefgh", None, BYTES, 8)[0].tolist() == [START, *ids("abcdef"), END]


def test_two_sentences_have_two_ends_between_them() -> None:
    assert encode_example("ab", "cd", BYTES, 8)[0].tolist() == [START, *ids("ab"), END, END, *ids("cd"), END]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(8, 40))
def test_the_longer_sentence_is_cut_first(a: int, b: int, length: int) -> None:
    kept_a, kept_b = a, b
    while kept_a + kept_b > length - 4:  # token by token, as BERT's authors do
        if kept_a > kept_b:
            kept_a -= 1
        else:
            kept_b -= 1
    found, cut = encode_example("a" * a, "b" * b, BYTES, length)
    assert found.tolist() == [START, *ids("a" * kept_a), END, END, *ids("b" * kept_b), END]
    assert cut == ((kept_a, kept_b) != (a, b))


def test_lengths_of_batches_are_few() -> None:
    assert {padded_length(tokens, 200) for tokens in range(1, 201)} == {16, 32, 48, 64, 128, 200}
    assert all(tokens <= padded_length(tokens, 200) for tokens in range(1, 201))
    assert padded_length(9, 10) == 10


LETTERS = "abcdefghijklmnopqrstuvw"
EXAMPLES = [Example(letter * (1 + 3 * index), None, "xyz"[index % 3], index + 1) for index, letter in enumerate(LETTERS)]


def encoded(length: int = 40) -> EncodedExamples:
    return EncodedExamples(EXAMPLES, BYTES, ("x", "y", "z"), length)


def read(batch: ExampleBatch) -> list[tuple[str, int]]:
    """The examples of a batch: their first letters and labels, filling left out."""
    tokens, labels = batch.parts
    return [(chr(int(row[1]) - 4), int(label)) for row, label in zip(tokens, labels, strict=True) if row[0] != PAD]


def test_the_summary_tells_how_many_were_cut() -> None:
    # 23 examples of 3 to 69 tokens: those of more than 40 are the last 10
    assert ExampleBatches(encoded(), rows=5).summary.startswith("23 examples, ")
    assert ExampleBatches(encoded(), rows=5).summary.endswith(" tokens, 10 cut to 40; batches of 5")
    assert encoded(128).cut == 0


def test_every_example_is_in_each_epoch_once_in_another_order() -> None:
    batches = ExampleBatches(encoded(), rows=5, seed=3)
    assert len(batches) == 5
    epochs = [[row for batch in islice(batches, 5) for row in read(batch)] for _ in range(3)]
    expected = sorted((letter, index % 3) for index, letter in enumerate(LETTERS))
    assert [sorted(epoch) for epoch in epochs] == [expected] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert (batches.epoch, batches.index) == (2, 5)


def test_the_last_batch_of_an_epoch_is_filled_with_rows_that_do_not_count() -> None:
    *whole, last = islice(ExampleBatches(encoded(), rows=5, seed=3), 5)
    assert [batch.tokens for batch in whole] == [5] * 4
    assert last.tokens == 3
    assert all(batch.parts[0].shape[0] == batch.parts[1].shape[0] == 5 for batch in (*whole, last))
    assert real_rows(last.parts[0]).tolist() == [True] * 3 + [False] * 2
    assert not last.parts[0][3:].any()


def test_rows_are_padded_to_the_smallest_length_that_holds_them() -> None:
    for batch in islice(ExampleBatches(encoded(), rows=2, seed=1), 24):
        tokens, _ = batch.parts
        longest = int((tokens != PAD).sum(dim=1).max())
        assert tokens.shape[1] == padded_length(longest, 40)
        for row in tokens[: batch.tokens]:
            text = row[row != PAD].tolist()
            assert text[0] == START
            assert text[-1] == END
            assert set(text[1:-1]) == {text[1]}
            assert len(text) == min(2 + 1 + 3 * LETTERS.index(chr(text[1] - 4)), 40)


@pytest.mark.parametrize("steps", [0, 1, 5, 7])
def test_a_saved_position_goes_on_with_the_next_batch(steps: int) -> None:
    batches = ExampleBatches(encoded(), rows=5, seed=3)
    for _ in range(steps):
        next(batches)
    state = batches.state()
    expected = [next(batches) for _ in range(7)]
    other = ExampleBatches(encoded(), rows=5, seed=3)
    other.load_state(state)
    for batch in expected:
        found = next(other)
        assert found.tokens == batch.tokens
        assert all(torch.equal(a, b) for a, b in zip(found.parts, batch.parts, strict=True))


def test_skipped_batches_are_those_that_would_have_come() -> None:
    one, other = (ExampleBatches(encoded(), rows=5, seed=3) for _ in range(2))
    for _ in range(8):
        next(one)
        other.skip()
    assert torch.equal(next(one).parts[0], next(other).parts[0])


def test_a_position_of_other_examples_or_another_seed_is_refused() -> None:
    state = ExampleBatches(encoded(), rows=5, seed=3).state()
    for others in (ExampleBatches(encoded(), 5, 4), ExampleBatches(encoded(), 4, 3), ExampleBatches(encoded(39), 5, 3)):
        with pytest.raises(InputError, match="belongs to different data"):
            others.load_state(state)


def test_in_order_gives_every_example_with_its_place() -> None:
    seen = {}
    for places, batch in encoded().in_order(rows=4, most=21):
        seen |= dict(zip(places.tolist(), read(batch), strict=True))
        assert batch.parts[0].shape[0] == 4
    members = [place * len(encoded()) // 21 for place in range(21)]  # from all over the set, which may be sorted by class
    assert seen == {place: (LETTERS[member], member % 3) for place, member in enumerate(members)}


def test_numbers_are_kept_in_fp32_and_examples_without_labels_have_none() -> None:
    numbers = [Example("a", "b", value, 1) for value in (0.25, 4.75)]
    _, labels = EncodedExamples(numbers, BYTES, (), 20).batch(np.array([1, 0]), 3).parts
    assert labels.dtype == torch.float32
    assert labels.tolist() == [4.75, 0.25, 0.0]
    assert EncodedExamples([Example("a", None, None, 1)], BYTES, (), 20).labels is None
