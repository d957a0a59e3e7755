"""Packed documents: every token once per epoch, short documents whole, nothing mixed without segments."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kilolayer.data.packing import Documents, FixedRows, PackedBatch, PackedText, best_fit
from kilolayer.errors import InputError
from tests.data.made_text import made_text

LENGTH = 12
# Empty, of one token, of one less than fits, that just fits, one more, and much longer ones.
LENGTHS = [0, 1, 9, 10, 11, 0, 3, 57, 2, 10, 5, 5, 128, 4, 1, 20, 21, 0]


def packed_text(folder: Path, rows: int = 3, seed: int = 0) -> tuple[PackedText, list[list[int]]]:
    text, documents = made_text(folder / f"{rows}-{seed}", LENGTHS)
    return PackedText(Documents(text), rows, LENGTH, seed), documents


def pieces_of(batch: PackedBatch) -> list[list[list[int]]]:
    """For each row its pieces, by a naive reader, start and end checked and left out."""
    rows = []
    for row in batch.tokens.tolist():
        found: list[list[int]] = []
        rest = row
        while rest and rest[0] != 0:
            assert rest[0] == 2
            end = rest.index(3)
            found.append(rest[1:end])
            rest = rest[end + 1 :]
        assert not any(rest)
        rows.append(found)
    return rows


def test_every_token_comes_once_an_epoch_and_short_documents_stay_whole(tmp_path: Path) -> None:
    packed, documents = packed_text(tmp_path)
    long = [document for document in documents if len(document) > LENGTH - 2]
    beginnings = set()
    for _ in range(20):
        pieces = [piece for batch in islice(packed, len(packed)) for row in pieces_of(batch) for piece in row]
        assert sorted(token for piece in pieces for token in piece) == sorted(token for each in documents for token in each)
        for document in documents:
            own = sorted(piece for piece in pieces if document and piece[0] in document)
            assert [token for piece in own for token in piece] == document
            assert all(len(piece) <= LENGTH - 2 for piece in own)
            assert len(own) == bool(document) or document in long
            assert all(len(piece) == LENGTH - 2 for piece in own[1:-1])
        beginnings.add(next(len(piece) for piece in pieces if piece[0] == long[-1][0]))
    assert len(beginnings) > 5  # another first place in other epochs


def test_segments_and_padding_are_told_where_there_are_some(tmp_path: Path) -> None:
    packed, _ = packed_text(tmp_path)
    kinds = Counter()
    for batch in islice(packed, 60):
        assert batch.tokens.shape == (3, LENGTH)
        assert batch.tokens.dtype == torch.int64
        rows = pieces_of(batch)
        kinds[batch.real is not None, batch.segments is not None] += 1
        assert (batch.segments is not None) == any(len(row) > 1 for row in rows)
        if batch.real is None:
            assert 0 not in batch.tokens
        else:
            assert torch.equal(batch.real, batch.tokens != 0)
        if batch.segments is not None:
            assert batch.real is not None
            expected = [
                [number for number, piece in enumerate(row, 1) for _ in range(len(piece) + 2)]
                + [0] * (LENGTH - sum(len(piece) + 2 for piece in row))
                for row in rows
            ]
            assert batch.segments.tolist() == expected
    assert set(kinds) >= {(False, False), (True, True)}  # full rows alone, and packed ones


def test_the_last_batch_of_an_epoch_is_filled_with_padding(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [10] * 5)
    packed = PackedText(Documents(text), 4, LENGTH)
    batches = list(islice(packed, len(packed)))
    assert sorted(len([row for row in pieces_of(batch) if row]) for batch in batches) == [1, 4]
    assert [batch.real is None for batch in sorted(batches, key=lambda each: len(torch.unique(each.tokens)))] == [False, True]


def test_a_document_without_an_end_behind_it_is_read_to_its_last_token(tmp_path: Path) -> None:
    text, (first, second) = made_text(tmp_path / "a", [4, 3], ended=False)
    (row,) = pieces_of(next(PackedText(Documents(text), 1, LENGTH)))
    assert sorted(row) == [first, second]


def test_documents_are_found_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, documents = made_text(tmp_path / "a", LENGTHS)
    whole = Documents(text)
    assert whole.lengths.tolist() == [len(each) for each in documents if each]
    for chunk in (1, 2, 7, 11):
        monkeypatch.setattr("kilolayer.data.packing.CHUNK", chunk)
        found = Documents(text)
        assert np.array_equal(found.starts, whole.starts)
        assert np.array_equal(found.lengths, whole.lengths)


def naive_best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Row by row, the sizes in it."""
    rows: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        rooms = [(capacity - sum(row), number) for number, row in enumerate(rows) if capacity - sum(row) >= size]
        if rooms:
            rows[min(rooms)[1]].append(size)
        else:
            rows.append([size])
    return rows


@given(st.lists(st.integers(1, 40), min_size=1, max_size=80), st.integers(40, 60), st.integers(0, 9))
def test_packing_is_best_fit_decreasing(sizes: list[int], capacity: int, seed: int) -> None:
    row_of, count = best_fit(np.array(sizes), capacity, np.random.default_rng(seed))
    rows: list[list[int]] = [[] for _ in range(count)]
    for size, row in zip(sizes, row_of.tolist(), strict=True):
        rows[row].append(size)
    # Rows with equal room may be taken in any order, so that the rows are equal as a whole, not one by one.
    assert Counter(sum(row) for row in rows) == Counter(sum(row) for row in naive_best_fit(sizes, capacity))
    assert all(rows)


def test_which_documents_share_a_row_is_drawn_anew(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [3] * 40)
    packed = PackedText(Documents(text), 4, LENGTH)
    epochs = [
        frozenset(frozenset(piece[0] for piece in row) for batch in islice(packed, len(packed)) for row in pieces_of(batch))
        for _ in range(3)
    ]
    assert len(set(epochs)) == 3


def test_a_saved_position_continues_with_the_next_batch(tmp_path: Path) -> None:
    packed, _ = packed_text(tmp_path)
    list(islice(packed, 2 * len(packed) + 3))
    state = packed.state()
    expected = [batch.tokens for batch in islice(packed, 20)]
    other = PackedText(packed.documents, 3, LENGTH)
    other.load_state(state)
    assert all(map(torch.equal, (batch.tokens for batch in islice(other, 20)), expected))
    skipping = PackedText(packed.documents, 3, LENGTH)
    skipping.load_state(state)
    skipping.skip()
    assert torch.equal(next(skipping).tokens, expected[1])
    for rows, length, seed in ((4, LENGTH, 0), (3, LENGTH + 1, 0), (3, LENGTH, 1)):
        with pytest.raises(InputError, match="another seed"):
            PackedText(packed.documents, rows, length, seed).load_state(state)


def test_fixed_rows_do_not_depend_on_the_size_of_a_batch(tmp_path: Path) -> None:
    text, documents = made_text(tmp_path / "a", LENGTHS)
    rows = FixedRows(Documents(text), LENGTH)
    whole = torch.cat([batch.tokens for batch in rows.batches(1)])
    assert sorted(whole[whole > 3].tolist()) == sorted(token for document in documents for token in document)
    for size, most in ((2, None), (5, None), (4, 7), (100, 3)):
        found = [batch.tokens for batch in FixedRows(Documents(text), LENGTH).batches(size, most)]
        assert torch.equal(torch.cat(found), whole[:most])
        assert all(len(batch) == size for batch in found[:-1])


def test_the_summary_counts_what_is_there(tmp_path: Path) -> None:
    text, _ = made_text(tmp_path / "a", [4, 4, 4])
    packed = PackedText(Documents(text), 2, LENGTH)
    assert packed.summary == f"{text}; batches of 2 x 12, 1.5 pieces per row, 25.0% padding"
