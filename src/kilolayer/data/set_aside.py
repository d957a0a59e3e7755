"""Set aside a share of the training pairs for validation and test, if there are no separate files for them.

The part of a pair depends on a hash of its sentence in one of the two languages, so it stays the same when text is added, and
in both directions. That is the language with more partners, English in `en-*`: a sentence of it is then in one part with all of
its translations. A pair that shares a sentence with a part that is set aside, on either side, is not trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.parallel import Pair, ParallelText
from kilolayer.errors import InputError
from kilolayer.files.reading import read_json
from kilolayer.terminal import counted

Part = Literal["test", "valid", "train"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Shares:
    """The shares of the training pairs that are set aside."""

    valid: float
    test: float

    def part(self, key: str) -> Part:
        """The part of a pair, by the sentence that decides it."""
        number = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()) / 2**64
        return "test" if number < self.test else "valid" if number < self.test + self.valid else "train"


def set_aside(texts: Sequence[ParallelText], shares: Shares, cache: Path) -> dict[Part, list[ParallelText]]:
    """The training, validation and test text that the training text is divided into, as files under `cache`.

    Back-translated text is only trained on.
    """
    sources = [(each.direction.name, each.columns, each.synthetic) for each in texts]
    files = [path for each in texts for path in each.files]
    key = content_key(["set aside 2", shares.valid, shares.test, sources], files, cache)
    folder = built(cache / f"parts-{key}", lambda draft: _write(texts, shares, draft), trust_times=True)
    counts = read_json(folder / "counts.json")
    found: dict[Part, list[ParallelText]] = {part: [] for part in PARTS}
    for number, text in enumerate(texts):
        for part in PARTS:
            if count := counts[part][number]:
                upsample = text.upsample if part == "train" else 1.0
                files = tuple(folder / f"{number}.{part}.{side}" for side in ("source", "target"))
                found[part].append(replace(text, files=files, columns=(), size=count, upsample=upsample))
    _check(found, shares, texts)
    return found


def _check(found: dict[Part, list[ParallelText]], shares: Shares, texts: Sequence[ParallelText]) -> None:
    """Raise if a part has no pair in some direction."""
    empty: dict[Part, str] = {
        "train": "nothing is left to train on",
        "valid": "the validation set is empty",
        "test": "the test set is empty",
    }
    wanted: list[Part] = [part for part in PARTS if part == "train" or getattr(shares, part)]
    for part in wanted:
        for direction in dict.fromkeys(each.direction for each in texts):
            if not any(each.direction == direction for each in found[part]):
                pairs = sum(each.size for each in texts if each.direction == direction)
                raise InputError(
                    f"{empty[part]}: of {counted(pairs, 'pair')} of {direction.name}, {shares.valid:.4g} are set aside for "
                    f"validation and {shares.test:.4g} for the test",
                    where=" and ".join(map(str, texts[0].files)),
                    fix="give more text, or change data.valid_share and data.test_share",
                )


def _write(texts: Sequence[ParallelText], shares: Shares, draft: Path) -> None:
    partners = _partners(texts)
    taken: set[str] = set()
    counts: dict[Part, list[int]] = {}
    for part in PARTS:
        chosen: set[str] = set()
        counts[part] = [
            _write_pairs(draft / f"{number}.{part}", _free_pairs(part, text, partners, shares, taken, chosen))
            for number, text in enumerate(texts)
        ]
        taken |= chosen
    (draft / "counts.json").write_text(json.dumps(counts))


def _partners(texts: Sequence[ParallelText]) -> Mapping[str, int]:
    """The number of languages that each is paired with, in either direction."""
    pairs = {frozenset((each.direction.source, each.direction.target)) for each in texts}
    return Counter(language for pair in pairs for language in pair)


def _free_pairs(
    part: Part, text: ParallelText, partners: Mapping[str, int], shares: Shares, taken: set[str], chosen: set[str]
) -> Iterator[Pair]:
    """The pairs of a part that have no sentence in `taken`; what is set aside is added to `chosen`.

    A pair with a blank side is left to the training text, whose filters remove it.
    """
    source, target = partners[text.direction.source], partners[text.direction.target]
    for pair in text.pairs():
        sentences = _sentences(text, pair)
        deciding = min(sentences) if source == target else sentences[source < target]
        blank = not all(side.strip() for side in pair)
        own = "train" if text.synthetic or blank else shares.part(deciding)
        if own == part and taken.isdisjoint(sentences):
            if part != "train":
                chosen.update(sentences)
            yield pair


def _write_pairs(stem: Path, pairs: Iterator[Pair]) -> int:
    """Write two aligned files; returns the number of pairs."""
    count = 0
    with (
        open(f"{stem}.source", "w", encoding="utf-8", newline="") as sources,
        open(f"{stem}.target", "w", encoding="utf-8", newline="") as targets,
    ):
        for pair in pairs:
            count += 1
            for stream, line in zip((sources, targets), pair, strict=True):
                stream.write(line + ("\r\n" if line.endswith("\r") else "\n"))  # reading strips one CR
    return count


def _sentences(text: ParallelText, pair: Pair) -> tuple[str, str]:
    """Both sentences with their languages, without differences in spaces."""
    source, target = (" ".join(side.split()) for side in pair)
    return f"{text.direction.source} {source}", f"{text.direction.target} {target}"
