"""Windows of running text: full, shuffled, each label the next token, and a position that can be saved."""

from __future__ import annotations

import resource
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from kilolayer.data.documents import TextConfig, TextPart, find_text
from kilolayer.data.store import TOKENS
from kilolayer.data.token_text import TokenText, encode_documents
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.data.windows import Windows, windows_in_order
from kilolayer.errors import InputError

DOCUMENTS = [b"first document", b"second", b"a third one that is longer than the others\n" * 5]


@pytest.fixture
def text(tmp_path: Path) -> TokenText:
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for path, data in zip(paths, DOCUMENTS, strict=True):
        path.write_bytes(data)
    return encode_documents(TextPart(tuple(paths)), ByteVocabulary(), tmp_path / "cache")


def line_of(documents: list[bytes]) -> list[int]:
    """The packed tokens, by a naive loop."""
    line = [3]
    for document in documents:
        line += [byte + 4 for byte in document]
        line.append(3)
    return line


LINE = line_of(DOCUMENTS)


def test_documents_are_packed_with_ends_between_them(text: TokenText) -> None:
    assert text.read(np.array([0]), len(text))[0].tolist() == LINE
    assert (text.documents, text.bytes, len(text)) == (3, sum(map(len, DOCUMENTS)), len(LINE))
    assert str(text) == f"{text.bytes} bytes in 3 documents, {len(LINE)} tokens"


def test_a_part_that_ends_inside_a_document_has_no_end(text: TokenText, tmp_path: Path) -> None:
    files = tuple(tmp_path / f"{number}.txt" for number in range(3))
    part = encode_documents(TextPart(files, 6, 16), ByteVocabulary(), tmp_path / "cache")
    assert part.read(np.array([0]), len(part))[0].tolist() == [3, *(b + 4 for b in b"document"), 3, *(b + 4 for b in b"se")]
    assert part.digest != text.digest


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 7), (4, 16), (2, 60)])
def test_every_row_is_a_full_window_and_labels_are_inputs_shifted(text: TokenText, rows: int, length: int) -> None:
    windows = Windows(text, rows, length, seed=5)
    firsts = []
    for _ in range(3):
        starts: list[int] = []
        for batch in islice(windows, len(windows)):
            assert batch.inputs.shape == batch.labels.shape == (rows, length)
            assert (batch.inputs.dtype, batch.tokens) == (torch.int64, rows * length)
            assert all(part.is_contiguous() for part in batch.parts)
            assert torch.equal(batch.inputs[:, 1:], batch.labels[:, :-1])
            for row, after in zip(batch.inputs.tolist(), batch.labels[:, -1].tolist(), strict=True):
                positions = [
                    position
                    for position in range(len(LINE) - length)
                    if LINE[position : position + length + 1] == [*row, after]
                ]
                assert positions
                starts.append(positions[0])
        firsts.append(starts)
    assert len(windows) == (len(LINE) - length) // length // rows
    if length == 16:
        assert len({tuple(each) for each in firsts}) == 3  # another order each epoch


def test_an_epoch_shows_windows_that_do_not_overlap(tmp_path: Path) -> None:
    numbers = np.arange(256, dtype=np.uint8).tobytes()  # every byte once: a token tells its place
    (tmp_path / "a").write_bytes(numbers)
    text = encode_documents(TextPart((tmp_path / "a",)), ByteVocabulary(), tmp_path / "cache")
    windows = Windows(text, rows=4, length=10, seed=1)
    assert len(windows) == 6  # 24 windows fit behind any first place of 10
    beginnings = set()
    for _ in range(20):
        batches = list(islice(windows, 6))
        shown = torch.cat([batch.labels.flatten() for batch in batches]).tolist()
        assert len(shown) == len(set(shown)) == 240
        beginnings.add(min(shown))
    assert len(beginnings) > 5


def test_a_saved_position_continues_with_the_next_batch(text: TokenText) -> None:
    windows = Windows(text, 3, 8, seed=2)
    list(islice(windows, 11))
    state = windows.state()
    expected = [batch.inputs for batch in islice(windows, 20)]
    other = Windows(text, 3, 8, seed=2)
    other.load_state(state)
    found = [batch.inputs for batch in islice(other, 20)]
    assert all(map(torch.equal, found, expected))
    for changed in (Windows(text, 3, 8, seed=3), Windows(text, 2, 8, seed=2), Windows(text, 3, 9, seed=2)):
        with pytest.raises(InputError, match="another seed"):
            changed.load_state(state)


def test_a_text_that_fills_no_batch_is_refused(text: TokenText) -> None:
    with pytest.raises(InputError, match="needs 9 windows of 30 tokens, but the training text has 6") as caught:
        Windows(text, 9, 30)
    assert "batches.tokens" in caught.value.fix


@pytest.mark.matrix(4)
@pytest.mark.parametrize("length", [1, 5, 16, 100, 1000])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("overlap", [0, 0.5, 0.8])
def test_in_order_every_token_is_a_label_once_with_enough_before_it(
    text: TokenText, length: int, rows: int, overlap: float
) -> None:
    stride = max(1, length - int(length * overlap))
    seen: list[int] = []
    for batch in windows_in_order(text, rows, length, stride):
        assert batch.inputs.shape[1] == length
        assert len(batch.inputs) <= rows
        counted = 0
        for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
            for position, label in enumerate(labels):
                if label:
                    seen.append(label)
                    counted += 1
                    context = min(len(seen), position + 1)
                    assert inputs[position + 1 - context : position + 1] == LINE[len(seen) - context : len(seen)]
                    assert position + 1 >= min(len(seen), length - stride + 1)
        assert counted == batch.tokens
    assert seen == LINE[1:]


def test_the_first_windows_are_those_of_the_beginning(text: TokenText) -> None:
    few = list(windows_in_order(text, 4, 10, 10, most=6))
    assert [batch.tokens for batch in few] == [40, 20]
    assert torch.cat([batch.labels for batch in few]).flatten().tolist() == LINE[1:61]


def test_token_files_are_made_once_and_damage_is_noticed(text: TokenText, tmp_path: Path) -> None:
    part = TextPart(tuple(tmp_path / f"{number}.txt" for number in range(3)))
    before = (text.folder / TOKENS).stat().st_mtime_ns
    assert encode_documents(part, ByteVocabulary(), tmp_path / "cache").folder == text.folder
    assert (text.folder / TOKENS).stat().st_mtime_ns == before
    (text.folder / TOKENS).write_bytes(b"short")
    with pytest.raises(InputError, match="damaged"):
        TokenText(text.folder)
    assert len(encode_documents(part, ByteVocabulary(), tmp_path / "cache")) == len(LINE)  # and made anew


def test_nothing_but_white_space_is_text_but_nothing_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(InputError, match="the text is empty"):
        encode_documents(TextPart((tmp_path / "a",)), ByteVocabulary(), tmp_path / "cache")


def test_a_share_of_too_little_text_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ten bytes.")
    parts = find_text(TextConfig(train=[str(tmp_path / "a")], valid_share=0.01), tmp_path / "cache")
    assert parts.valid is not None
    with pytest.raises(InputError, match=r"a part of the text is empty\n.*\n.*raise text.valid_share"):
        encode_documents(parts.valid, ByteVocabulary(), tmp_path / "cache")


@pytest.mark.slow
def test_much_text_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcdef" * (4 << 20))  # 64 MiB, without a line
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = encode_documents(TextPart((tmp_path / "a",)), ByteVocabulary(), tmp_path / "cache")
    windows = Windows(text, 64, 512)
    for _ in islice(windows, len(windows)):
        pass
    assert len(text) == (64 << 20) + 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10  # KiB
