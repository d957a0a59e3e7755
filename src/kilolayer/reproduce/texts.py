"""The training text of reproductions: real corpora from KILOLAYER_DATA, or the embedded corpus for the tiny form.

The papers' own corpora are larger, and most are not freely available. Each has a substitute: short German and English
sentences from Tatoeba for IWSLT-14 and WMT, Tatoeba in many languages for OPUS-100, books for the language models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kilolayer.data.grammar import pairs
from kilolayer.data.text import read_lines
from kilolayer.errors import InputError
from kilolayer.files.writing import write

Pair = tuple[str, str]
PARTS = ("train", "valid", "test")
HELD_OUT = 500
"""Number of lines in each validation and test set: enough to distinguish methods, few enough for a hundred models."""
HELD_OUT_OF_MANY = 200
"""The same for each of several languages, over which scores are averaged."""


def sentence_pairs(data: Path | None, language: str, folder: Path) -> None:
    """Write the training, validation and test sets of English and `language` (deu, fra, spa) to `folder`, unless they exist.

    A sentence can have several translations, so the sets are split by the hash of the English side: one percent each for
    validation and test, of which HELD_OUT lines are used.
    """
    if (folder / f"test.{language}").exists():  # the file that is written last
        return
    source = known(data, f"manythings/{language}-eng.tsv.xz")
    if source is None:
        _write_pairs(folder, language, _embedded_pairs())
        return
    parts: dict[str, list[Pair]] = {part: [] for part in PARTS}
    for line in read_lines(source):
        english, other, *_ = line.split("\t")
        bucket = int(hashlib.sha1(english.encode()).hexdigest()[:8], 16) % 100
        parts[{0: "valid", 1: "test"}.get(bucket, "train")].append((english, other))
    for part in ("valid", "test"):  # the file is sorted by length
        parts[part].sort(key=lambda pair: hashlib.sha1(pair[1].encode()).digest())
    _write_pairs(folder, language, {part: rows[: None if part == "train" else HELD_OUT] for part, rows in parts.items()})


def many_languages(data: Path | None, folder: Path, least: int, most: int, count: int | None = None) -> list[str]:
    """Write up to `most` pairs of English with each language of tatoeba_multi that has at least `least` lines.

    count: the largest number of languages; those with the most lines are taken. Returns the languages without English;
    existing files are not written again. The pairs are taken from all over the text. No sentence of the validation or test sets
    occurs in the training set of its language, and no English one in that of any.
    """
    listed = folder / "languages.txt"  # the file that is written last
    if listed.exists():
        return list(read_lines(listed))
    source = known(data, "tatoeba_multi/train.en-xx.tsv.xz")
    if source is None:
        parts = _embedded_pairs()
        for language in ("deu", "xde"):
            _write_pairs(folder, language, parts, named=True)
        _write_lines(listed, ("deu", "xde"))
        return ["deu", "xde"]
    found: dict[str, dict[str, list[Pair]]] = {}
    for line in read_lines(source):
        one, other, first, second = line.split("\t")
        language, pair = (other, (first, second)) if one == "eng" else (one, (second, first))
        bucket = int(hashlib.sha1(pair[0].encode()).hexdigest()[:8], 16) % 100
        found.setdefault(language, {part: [] for part in PARTS})[{0: "valid", 1: "test"}.get(bucket, "train")].append(pair)
    sizes = {language: sum(map(len, parts.values())) for language, parts in found.items()}
    largest = sorted(sizes, key=lambda language: (-sizes[language], language))[:count]
    chosen = sorted(language for language in largest if sizes[language] >= least)
    for language in chosen:
        _write_pairs(folder, language, _spread(found[language], most), named=True)
    _write_lines(listed, chosen)
    return chosen


def _spread(parts: Mapping[str, Sequence[Pair]], most: int) -> dict[str, list[Pair]]:
    """Up to `most` pairs for training and HELD_OUT_OF_MANY for each other set, in the order of their hashes.

    The corpus is sorted by its English side. A validation or test set has each English sentence once.
    """

    def place(pair: Pair) -> bytes:
        return hashlib.sha1("\t".join(pair).encode()).digest()

    mixed = {part: sorted(rows, key=place) for part, rows in parts.items()}
    once = {part: list({pair[0]: pair for pair in mixed[part]}.values()) for part in ("valid", "test")}
    held_out = {part: rows[:HELD_OUT_OF_MANY] for part, rows in once.items()}
    taken = {other for rows in held_out.values() for _, other in rows}
    return {"train": [pair for pair in mixed["train"] if pair[1] not in taken][:most], **held_out}


def running_text(data: Path | None, folder: Path) -> Mapping[str, Path]:
    """Documents for language models: the files of the training, validation and test sets."""
    source = known(data, "books/train.jsonl.xz")
    if source is not None:
        return {part: source.with_name(f"{part}.jsonl.xz") for part in PARTS}
    for part, rows in _embedded_pairs().items():
        _write_lines(folder / f"{part}.txt", (english for english, _ in rows))
    return {part: folder / f"{part}.txt" for part in PARTS}


def known(data: Path | None, name: str) -> Path | None:
    """A file or folder of the real text, which must exist; None if the embedded corpus is used."""
    if data is None:
        return None
    if not (data / name).exists():
        raise InputError(
            f"{name} is missing", where=str(data), fix="set KILOLAYER_DATA to a folder that contains it, or give --tiny"
        )
    return data / name


def _embedded_pairs() -> dict[str, list[Pair]]:
    sentences = list(pairs(2_400, seed=1, unseen=False))
    return {"train": sentences[:2_000], "valid": sentences[2_000:2_100], "test": sentences[2_100:2_200]}


def _write_pairs(folder: Path, language: str, parts: Mapping[str, Iterable[Pair]], named: bool = False) -> None:
    """named: file names contain both languages, as is needed in a folder with many pairs."""
    for part, rows in parts.items():
        stem = f"{part}.eng-{language}" if named else part
        rows = list(rows)
        for side, name in enumerate(("eng", language)):
            _write_lines(folder / f"{stem}.{name}", (row[side] for row in rows))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, "".join(f"{line}\n" for line in lines).encode())
