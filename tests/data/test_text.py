"""Lines of files: exact counts whatever is in them, and errors that name the place."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kilolayer.data.text import count_lines, read_lines
from kilolayer.errors import InputError

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
ODD = {
    "bom": (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
    "bom_alone": (b"\xef\xbb\xbf", [""]),
    "bom_later": (b"one\n\xef\xbb\xbftwo\n", ["one", "\ufefftwo"]),
    "crlf": (b"one\r\ntwo\r\n", ["one", "two"]),
    "one_cr_is_removed": (b"one\r\r\ntwo\r", ["one\r", "two"]),
    "cr_inside": (b"one\rstill one\n", ["one\rstill one"]),
    "nul": (b"a\0b\n\0\n", ["a\0b", "\0"]),
    "separators": (
        "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei\nnext\n".encode(),
        ["a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1dh\x1ei", "next"],
    ),
    "no_final_newline": (b"one\ntwo", ["one", "two"]),
    "empty": (b"", []),
    "empty_lines": (b"\n\n\n", ["", "", ""]),
    "ten_megabytes": (b"x" * 10_000_000 + b"\ny\n", ["x" * 10_000_000, "y"]),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ODD)
def test_odd_files_have_exact_lines(name: str, suffix: str, tmp_path: Path) -> None:
    content, lines = ODD[name]
    path = tmp_path / f"text.en{suffix}"
    path.write_bytes(PACK[suffix](content))
    assert list(read_lines(path)) == lines
    assert count_lines(path) == len(lines)


def expected(content: bytes) -> list[str]:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"" and content != b"\xef\xbb\xbf":
        lines.pop()
    return [line.removesuffix(b"\r").decode() for line in lines]


@given(st.binary(max_size=200) | st.lists(st.sampled_from([b"\n", b"\r", b"\xef\xbb\xbf", b"a", b"\0", b"\xc3"])).map(b"".join))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_lines_or_a_named_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random"
    path.write_bytes(content)
    try:
        content.decode()
    except UnicodeDecodeError:
        with pytest.raises(InputError, match=r"not valid UTF-8|the text is UTF-16"):
            list(read_lines(path))
    else:
        assume(b"\x00" not in content)  # every second byte 0 is taken for UTF-16
        assert list(read_lines(path)) == expected(content)
        assert count_lines(path) == len(expected(content))


def test_invalid_utf8_is_named_by_file_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "train.de"
    path.write_bytes("eins\nzwei\nd\u00fcrr".encode() + b"\xff\nvier\n")
    with pytest.raises(InputError) as caught:
        list(read_lines(path))
    assert caught.value.what == "not valid UTF-8: byte 0xff"
    assert caught.value.where == f"{path}, line 3, byte 6"
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "not_compressed", "nothing"])
def test_damaged_compression_is_refused(suffix: str, damage: str, tmp_path: Path) -> None:
    whole = PACK[suffix](b"a line\n" * 10_000)
    path = tmp_path / f"text{suffix}"
    path.write_bytes({"cut": whole[: len(whole) // 2], "not_compressed": b"plain text\n", "nothing": b""}[damage])
    if (suffix, damage) == (".gz", "nothing"):  # gzip takes no bytes at all for an empty file
        assert list(read_lines(path)) == []
        return
    for work in (count_lines, lambda path: list(read_lines(path))):
        with pytest.raises(InputError, match="cannot be decompressed"):
            work(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        list(read_lines(tmp_path / "absent"))
    with pytest.raises(InputError, match="cannot be read"):
        count_lines(tmp_path)
