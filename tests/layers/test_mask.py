"""What positions may look at, against the rule written as loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.layers.mask import Mask, cross_mask, self_mask
from kilolayer.layers.position import position_ids

CPU = torch.device("cpu")


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int, bool, list[bool] | None, list[int] | None]:
    """New length, cached length, causal, real or padding of every position, document of every position."""
    length = draw(st.integers(1, 7))
    packed = draw(st.booleans())
    causal = draw(st.booleans())
    past = draw(st.integers(0, 4)) if causal and not packed else 0
    padded = st.none() | st.lists(st.booleans(), min_size=past + length, max_size=past + length)
    documents = st.lists(st.integers(0, 2), min_size=length, max_size=length).map(sorted)
    return length, past, causal, draw(padded), draw(documents) if packed else None


def may_attend(query: int, key: int, causal: bool, real: list[bool] | None, documents: list[int] | None) -> bool:
    return (
        (not causal or key <= query)
        and (real is None or real[key])
        and (documents is None or documents[query] == documents[key])
    )


def as_grid(mask: Mask, queries: int, keys: int) -> list[list[bool]]:
    if mask.values is None:
        return [[not mask.causal or key <= query for key in range(keys)] for query in range(queries)]
    return mask.values.expand(1, 1, queries, keys)[0, 0].tolist()


@pytest.mark.slow
@given(sequences())
@settings(deadline=None, max_examples=100)
def test_self_mask_is_the_rule(case: tuple[int, int, bool, list[bool] | None, list[int] | None]) -> None:
    length, past, causal, real, documents = case
    mask = self_mask(
        length,
        causal=causal,
        device=CPU,
        real=None if real is None else torch.tensor([real]),
        segments=None if documents is None else torch.tensor([documents]),
        past=past,
    )
    for query, row in enumerate(as_grid(mask, length, past + length)):
        at = past + query
        expected = [may_attend(at, key, causal, real, documents) for key in range(past + length)]
        if not any(expected):  # a position that may look nowhere sees itself; in a row of padding alone, all of it
            expected = [key == at or (not causal and documents is None) for key in range(past + length)]
        assert row == expected


@given(
    st.integers(1, 5),
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.none() | st.tuples(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.lists(st.integers(0, 2), min_size=6)),
)
@settings(deadline=None, max_examples=100)
def test_cross_mask_is_the_rule(queries: int, real: list[bool], documents: tuple[list[int], list[int]] | None) -> None:
    keys = len(real)
    targets, sources = (None, None) if documents is None else (documents[0][:queries], documents[1][:keys])
    mask = cross_mask(
        real=torch.tensor([real]),
        segments=None if targets is None else torch.tensor([targets]),
        memory_segments=None if sources is None else torch.tensor([sources]),
    )
    for query, row in enumerate(as_grid(mask, queries, keys)):
        same = [targets is None or sources is None or targets[query] == sources[key] for key in range(keys)]
        expected = [real[key] and same[key] for key in range(keys)]
        assert row == (expected if any(expected) else [True] * keys)


def test_an_encoders_mask_has_one_row_for_all_queries() -> None:
    mask = self_mask(5, causal=False, device=CPU, real=torch.tensor([[True] * 4 + [False]]), segments=None)
    assert mask.values is not None
    assert mask.values.shape == (1, 1, 1, 5)


def test_no_padding_and_no_documents_leave_the_fast_kernels_free() -> None:
    assert self_mask(5, causal=False, device=CPU, real=None, segments=None) == Mask()
    assert self_mask(5, causal=True, device=CPU, real=None, segments=None) == Mask(causal=True)
    assert self_mask(1, causal=True, device=CPU, real=None, segments=None, past=4) == Mask()
    assert cross_mask(real=None, segments=None, memory_segments=None) == Mask()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None)
def test_positions_start_anew_in_each_document(lengths: list[int]) -> None:
    segments = torch.tensor([[document for document, length in enumerate(lengths) for _ in range(length)]])
    positions = position_ids(segments.shape[1], device=CPU, real=None, segments=segments)
    assert positions.tolist() == [[position for length in lengths for position in range(length)]]


@given(st.lists(st.booleans(), min_size=1, max_size=8))
@settings(deadline=None)
def test_positions_do_not_count_padding(real: list[bool]) -> None:
    positions = position_ids(len(real), device=CPU, real=torch.tensor([real]), segments=None)[0].tolist()
    counted = [position for position, is_real in zip(positions, real, strict=True) if is_real]
    assert counted == list(range(sum(real)))


def test_the_mask_of_a_chunk_after_cached_positions_can_be_cut_as_all_masks_can() -> None:
    mask = self_mask(3, causal=True, device=CPU, real=None, segments=None, past=2)
    assert mask.values is not None
    assert mask.values.shape == (1, 1, 3, 5)
    part = mask.part(1, slice(1, 3), 5, CPU)
    assert part.values is not None
    assert part.values[0, 0].tolist() == [[True, True, True, True, False], [True] * 5]
