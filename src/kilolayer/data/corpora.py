"""Find the parallel text of a run: its corpora, languages and translation directions.

A corpus is either two line-aligned files (`train.en`, `train.de`) or a TSV file. A TSV file has two columns, whose languages
are configured, or four (language, language, text, text), which may hold many language pairs. Files may be plain, .gz or .xz.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kilolayer import config as configuration
from kilolayer.config import bounded, check
from kilolayer.data.file_facts import known
from kilolayer.data.filters import FilterConfig
from kilolayer.data.held_out import HeldOut
from kilolayer.data.parallel import LANGUAGE, Direction, ParallelText, count_filled, misaligned, pair_name, split_columns
from kilolayer.data.set_aside import Shares, set_aside
from kilolayer.data.shares import check_shares
from kilolayer.data.text import SUFFIXES
from kilolayer.errors import InputError, OptionError, UnusedOptionError, edit_distance, nearest, shown, unknown
from kilolayer.files.paths import kind_of

SHARES = ("valid_share", "test_share")
SET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Test set names become part of file names."""
MOST_NAMED = 8
"""Directions that a line of the log names."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """One corpus of a manifest: `[[train]]`, `[[valid]]` or `[[test]]`."""

    files: str = ""
    """Stem of the file names, required: "train" means train.en and train.de, train.en-de.en and train.en-de.de, or train.tsv;
    plain, .gz or .xz."""
    directions: list[str] = field(default_factory=list)
    """The directions that it is used for. Default: all directions for which it has text."""
    columns: list[str] = field(default_factory=list)
    """The languages of the columns of a two-column TSV file."""
    synthetic: bool = False
    """The source side is machine-translated (back-translation): each source sentence gets the tag <bt>."""
    upsample: float = bounded(1.0, least=1e-6, most=10_000)
    """How often each pair appears in an epoch; with 1.5, half of the pairs appear twice."""
    name: str = ""
    """Name of a test set that is scored separately. Test corpora with the same name, or without one, are scored together."""

    def __post_init__(self) -> None:
        check(self)
        if not self.files:
            raise OptionError("a corpus does not name its files", fix='give their stem: files = "train"')
        if self.name and not SET_NAME.fullmatch(self.name):
            raise OptionError(
                f"the name of a test set is {shown(self.name)}", fix="use letters, digits, '_', '-' and '.', at most 64"
            )
        if self.columns and (len(set(self.columns)) != 2 or len(self.columns) != 2):
            raise OptionError(f"columns is {self.columns}", fix='name the languages of two columns: ["en", "de"]')


def _entries(value: Any) -> list[CorpusConfig]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise OptionError(f"a list of corpora is {shown(value)}", fix="write each corpus as a table: [[train]]")
    return [configuration.build(CorpusConfig, entry, "a corpus") for entry in value]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A TOML file that lists corpora, languages and directions; stems are relative to it."""

    directions: list[str]
    """The directions to translate in: "en-de"; with `languages`, "en-*" means from English into each of the others."""
    languages: list[str] = field(default_factory=list)
    """What "*" stands for in `directions`."""
    train: list[CorpusConfig] = field(metadata={"parse": _entries})
    """The training corpora."""
    valid: list[CorpusConfig] = field(default_factory=list, metadata={"parse": _entries})
    """The validation corpora, used to choose the best checkpoint."""
    test: list[CorpusConfig] = field(default_factory=list, metadata={"parse": _entries})
    """The test corpora, scored once, after training."""

    def __post_init__(self) -> None:
        check(self)
        for entry in (*self.train, *self.valid):
            if entry.name:
                raise OptionError(f"name has no effect on the corpus {entry.files!r}", fix="remove it: it applies to [[test]]")


def _stems(value: Any) -> Any:
    """Accept a single stem without brackets."""
    return [value] if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`[data]`: where the text is. Either `folder`, with the stems of its files, or `manifest`."""

    folder: str | None = None
    """Folder that contains the corpora."""
    manifest: str | None = None
    """TOML file that lists corpora, languages and directions."""
    directions: list[str] = field(default_factory=list)
    """The directions to translate in: ["en-de"], or with `languages` ["en-*", "*-en"]. With a manifest: which of its directions
    to use."""
    languages: list[str] = field(default_factory=list)
    """What "*" stands for in `directions`."""
    train: list[str] = field(default_factory=lambda: ["train"], metadata={"parse": _stems})
    """Stem of the training corpus's file names, or a list of stems: "train" means train.en and train.de, or train.tsv; plain,
    .gz or .xz."""
    valid: str | None = None
    """Stem of the validation corpus."""
    valid_share: float = bounded(0.0, least=0, below=1)
    """Fraction of the training pairs that is set aside for validation, by a hash of the sentences, instead of `valid`. Pairs
    that have a sentence in common with it are not trained on."""
    test_share: float = bounded(0.0, least=0, below=1)
    """Fraction of the training pairs that is set aside for the test in the same way, instead of `test`."""
    test: str | list[str] | None = None
    """Stem of the test corpus; or a list of stems, each a test set that is scored separately: ["newstest2013",
    "newstest2014"]."""
    columns: list[str] = field(default_factory=list)
    """The languages of the columns of two-column TSV files."""
    synthetic: list[str] = field(default_factory=list)
    """Stems of back-translated training corpora; each source sentence gets the tag <bt>."""
    upsample: float = bounded(1.0, least=1e-6, most=10_000)
    """How often each pair of the corpora in `train` appears in an epoch (pairs in `synthetic` appear once)."""
    temperature: float = bounded(1.0, least=1, most=1000)
    """Directions are sampled with p ~ pairs^(1/temperature): 1 in proportion to their size, 5 closer to equal (for many
    languages). The text that the vocabulary is trained on is balanced across languages in the same way."""
    filters: FilterConfig = field(default_factory=FilterConfig)
    """What is left out of the training text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", _stems(self.train))
        check(self)
        check_shares(self)
        if self.folder is not None and self.manifest is not None:
            raise UnusedOptionError(
                "folder and manifest are both given",
                fix="remove one of them",
                unused="folder",
                beside=("manifest",),
                either=True,
            )
        if self.manifest is not None:
            untouched = DataConfig()
            for name in ("languages", "train", "valid", "test", "columns", "synthetic", "upsample", *SHARES):
                if getattr(self, name) != getattr(untouched, name):
                    raise UnusedOptionError(
                        f"{name} has no effect with a manifest",
                        fix="remove it, and list a corpus in the manifest"
                        if name in SHARES
                        else "remove it, or set it in the manifest",
                        unused=name,
                        beside=("manifest",),
                    )


@dataclass(frozen=True)
class ScoredPart:
    """A part of the test text that is scored separately: one direction of one test set.

    name: of the test set; empty if there is only one.
    """

    direction: Direction
    name: str = ""


@dataclass(frozen=True)
class Corpora:
    """All parallel text of a run: its directions, and the training, validation and test corpora."""

    directions: list[Direction]
    train: list[ParallelText]
    valid: list[ParallelText]
    test: list[ParallelText]
    temperature: float = 1.0
    """From the configuration: balances the directions of a mixture, and the languages of a vocabulary's training text."""

    def valid_of(self, direction: Direction) -> list[ParallelText]:
        """The validation text of one direction."""
        return [text for text in self.valid if text.direction == direction]

    def test_of(self, part: ScoredPart) -> list[tuple[str, str]]:
        """The sentence pairs of one part of the test text, from all its corpora in order."""
        return [pair for text in self.test if ScoredPart(text.direction, text.set_name) == part for pair in text.pairs()]

    @property
    def scored_parts(self) -> list[ScoredPart]:
        """The parts of the test text, ordered by test set and then by direction."""
        there = {ScoredPart(text.direction, text.set_name) for text in self.test}
        names = dict.fromkeys(text.set_name for text in self.test)
        every = [ScoredPart(direction, name) for name in names for direction in self.directions]
        return [part for part in every if part in there]

    def read_held_out(self) -> HeldOut:
        """Read the validation and test text once, so that a faulty line is reported now and not after training."""
        return HeldOut(*(_digest(texts) if texts else None for texts in (self.valid, self.test)))

    def gaps(self) -> Iterator[str]:
        """Lines for the log: the directions without validation or test text, where others have it."""
        for part, texts in (("validation", self.valid), ("test", self.test)):
            lacking = [each.name for each in self.directions if all(text.direction != each for text in texts)]
            if texts and lacking:
                more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
                yield f"no {part} text for {', '.join(lacking[:MOST_NAMED])}{more}"

    @property
    def tags(self) -> list[str]:
        """The languages whose tag is put before a source: the target languages, if there are several directions."""
        return sorted({direction.target for direction in self.directions}) if len(self.directions) > 1 else []


def _digest(texts: Sequence[ParallelText]) -> str:
    """A digest of all pairs in order, and of the directions and test sets that they belong to."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text.direction.name}\n{text.set_name}\n".encode())
        for source, target in text.pairs():
            digest.update(f"{len(source)} {len(target)}\n{source}{target}".encode())
    return digest.hexdigest()


def find_corpora(config: DataConfig, cache: Path | None = None) -> Corpora:
    """The text that `config` specifies, after checking that its files are present, not empty, and aligned.

    Four-column files are read once and split by language pair under `cache`; without it, each direction reads the whole file.
    Shares of the training text need it.
    """
    if config.manifest is not None:
        base, manifest = Path(config.manifest).parent, _read_manifest(Path(config.manifest))
    elif config.folder is not None:
        base, manifest = Path(config.folder), _as_manifest(config)
    else:
        raise OptionError(
            "no training text is given", where="data", fix="set data.folder and data.directions, or data.manifest"
        )
    if kind_of(base) != "folder":
        raise InputError("the folder does not exist", where=str(base), fix="check data.folder")
    declared = directions = expand(manifest.directions, manifest.languages)
    if config.manifest is not None and config.directions:
        directions = _chosen(config.directions, declared, "data.directions, beside the manifest")
    finder = _Finder(base, declared, directions, cache)
    parts = [[*finder.find(part)] for part in (manifest.train, manifest.valid, manifest.test)]
    if config.valid_share or config.test_share:
        assert cache is not None, "what is set aside is written to the cache"
        found = set_aside(parts[0], Shares(config.valid_share, config.test_share), cache)
        parts = [found["train"], parts[1] + found["valid"], parts[2] + found["test"]]
    corpora = Corpora(directions, *parts, temperature=config.temperature)
    for direction in directions:
        if not any(text.direction == direction for text in corpora.train):
            raise InputError(
                f"there is no training text for {direction.name}",
                where=str(base),
                fix=f"add {finder.expected(manifest.train, direction)}, or remove the direction",
            )
    return corpora


def find_test(
    config: DataConfig, stems: Sequence[str], directions: Sequence[Direction], cache: Path | None = None
) -> list[ParallelText]:
    """The corpora for `stems`, one test set each. Stems are relative to the folder of `config`, or else to the working
    folder."""
    base = Path(config.folder or "") if config.manifest is None else Path(config.manifest).parent
    finders = [_Finder(folder, directions, directions, cache) for folder in (base, Path())]
    names = [_set_name(stem) for stem in stems]
    if len(set(names)) < len(names):
        raise OptionError(f"test sets have the same name: {', '.join(stems)}", fix="score them one at a time")
    found: list[ParallelText] = []
    for stem, name in zip(stems, names, strict=True):
        entry = CorpusConfig(files=stem, columns=config.columns, name=name)
        found += next((each for each in finders if each.has(entry)), finders[0]).find([entry])
    return found


def _set_name(stem: str) -> str:
    """A test set's name: that of its files, with other characters than a name may have replaced by _."""
    return re.sub(r"[^A-Za-z0-9_.-]|^[.-]", "_", Path(stem).name)[:64]


def aligned_text(source: Path, reference: Path, direction: Direction) -> ParallelText:
    """Two line-aligned files given by the user, as a test set."""
    lines, others = count_filled(source), count_filled(reference)
    if lines != others:
        raise misaligned(source, lines, reference, others)
    return ParallelText((source, reference), direction, lines)


def expand(names: Sequence[str], languages: Sequence[str]) -> list[Direction]:
    """The directions that names and patterns specify, without repetition: "en-*" is English into every other language."""
    found: dict[Direction, None] = {}
    for name in names:
        if not isinstance(name, str) or "*" not in name:
            found[Direction.parse(name)] = None
            continue
        if not languages:
            raise OptionError(
                f"the direction {name!r} has a *, but no languages are listed", fix='list them: languages = ["en", "de"]'
            )
        sources, _, targets = name.partition("-")
        pairs = [(s, t) for s in _matches(sources, languages) for t in _matches(targets, languages) if s != t]
        found.update({Direction.parse(f"{source}-{target}"): None for source, target in pairs})
    if not found:
        raise OptionError("no direction is given", where="data", fix='name at least one: directions = ["en-de"]')
    return list(found)


def _matches(side: str, languages: Sequence[str]) -> list[str]:
    if side != "*" and side not in languages:
        listed = ", ".join(f'"{each}"' for each in (side, *languages))
        near = nearest(side, languages)
        # "en" next to "es" is probably another language, "enn" next to "en" a typing error.
        guess = f"; did you mean {near!r}?" if near and edit_distance(side, near) == 1 and len(side) != len(near) else ""
        raise OptionError(
            f"languages does not list {side!r}, which is used with a * in directions{guess}",
            where="data",
            fix=f"add it: languages = [{listed}]",
        )
    return list(languages) if side == "*" else [side]


def _chosen(names: Sequence[str], available: Sequence[Direction], where: str) -> list[Direction]:
    valid = {direction.name: direction for direction in available}
    for name in names:
        if name not in valid:
            raise unknown(str(name), valid, kind="direction", where=where)
    return [valid[name] for name in dict.fromkeys(names)]


def _read_manifest(path: Path) -> Manifest:
    table = configuration.load(path)
    try:
        for name in ("directions", "train"):
            if name not in table:
                raise OptionError(
                    f"the manifest has no {name}", fix='it needs directions = ["en-de"] and at least one [[train]]'
                )
        return configuration.build(Manifest, table)
    except OptionError as error:
        raise error.at(f"in {path}") from None


def _as_manifest(config: DataConfig) -> Manifest:
    def entry(stem: str, synthetic: bool = False, upsample: float = 1.0, name: str = "") -> CorpusConfig:
        return CorpusConfig(files=stem, columns=config.columns, synthetic=synthetic, upsample=upsample, name=name)

    tests = [config.test] if isinstance(config.test, str) else config.test or []
    names = [_set_name(stem) for stem in tests] if len(tests) > 1 else [""] * len(tests)
    if len(set(names)) < len(names):
        raise OptionError(
            f"test sets have the same name: {', '.join(tests)}", where="data.test", fix="give their files different names"
        )

    return Manifest(
        directions=config.directions,
        languages=config.languages,
        train=[entry(stem, upsample=config.upsample) for stem in config.train]
        + [entry(stem, True) for stem in config.synthetic],
        valid=[entry(config.valid)] if config.valid is not None else [],
        test=[entry(stem, name=name) for stem, name in zip(tests, names, strict=True)],
    )


class _Finder:
    """Finds the files of corpora by their stems; each file's lines are counted only once."""

    def __init__(self, base: Path, declared: Sequence[Direction], directions: Sequence[Direction], cache: Path | None) -> None:
        self.base, self.declared, self.directions, self.cache = base, declared, directions, cache
        self._count = lru_cache(maxsize=None)(lambda path: known(path, "lines", count_filled, cache))
        self._split = lru_cache(maxsize=None)(split_columns)

    def find(self, entries: Sequence[CorpusConfig]) -> Iterator[ParallelText]:
        for entry in entries:
            own = _chosen(entry.directions, self.declared, f"the corpus {entry.files!r}") if entry.directions else self.declared
            texts = [(direction, self._text(entry, direction)) for direction in self.directions if direction in own]
            found = [direction for direction, text in texts if text is not None]
            if entry.synthetic and (twice := next((each for each in found if each.reverse in found), None)):
                raise OptionError(
                    f"the back-translated corpus {entry.files!r} would be read as {twice.name} and {twice.reverse.name}",
                    where="data",
                    fix=f'list it in a manifest, with directions = ["{twice.name}"] if a model wrote its {twice.source}',
                )
            missing = [direction for direction, text in texts if text is None]
            narrowed = len(texts) < len(own)  # then other directions may have the text
            if missing and (entry.directions or (len(missing) == len(texts) and not narrowed)):
                raise InputError(
                    f"the corpus {entry.files!r} has no text for {missing[0].name}",
                    where=str(self.base),
                    fix=f"expected {self.expected([entry], missing[0])}{self._hint(entry)}",
                )
            yield from (text for _, text in texts if text is not None)

    def has(self, entry: CorpusConfig) -> bool:
        """Whether there is text of this corpus in any direction."""
        return any(self._text(entry, direction) is not None for direction in self.directions)

    def expected(self, entries: Sequence[CorpusConfig], direction: Direction) -> str:
        stem = entries[0].files if entries else "train"
        return f"{stem}.{direction.source} and {stem}.{direction.target} (or {stem}.tsv; plain, .gz or .xz)"

    def _text(self, entry: CorpusConfig, direction: Direction) -> ParallelText | None:
        shared: dict[str, Any] = {"synthetic": entry.synthetic, "upsample": entry.upsample, "set_name": entry.name}
        for infix in ("", f".{direction.name}", f".{direction.reverse.name}"):
            sides = [self._file(f"{entry.files}{infix}.{language}") for language in (direction.source, direction.target)]
            source, target = sides
            if source is not None and target is not None:
                return ParallelText((source, target), direction, self._aligned_count(source, target), **shared)
        table = self._file(entry.files if ".tsv" in Path(entry.files).name else f"{entry.files}.tsv")
        if table is None:
            return None
        if entry.columns:
            if set(entry.columns) != {direction.source, direction.target}:
                return None
            return ParallelText((table,), direction, self._count(table), tuple(entry.columns), **shared)
        split = self._split(table, self.cache)
        pair = pair_name(direction.source, direction.target)
        return ParallelText((split[pair][0],), direction, split[pair][1], **shared) if pair in split else None

    def _file(self, name: str) -> Path | None:
        """The plain file if it exists, else the compressed one."""
        paths = [self.base / f"{name}{suffix}" for suffix in SUFFIXES]
        return next((path for path in paths if kind_of(path) in ("file", "other")), None)

    def _aligned_count(self, source: Path, target: Path) -> int:
        lines = self._count(source)
        if lines != self._count(target):
            raise misaligned(source, lines, target, self._count(target))
        return lines

    def _hint(self, entry: CorpusConfig) -> str:
        """For an error message: the languages for which there are files with this stem."""
        pattern = re.compile(rf"{re.escape(Path(entry.files).name)}\.({LANGUAGE.pattern})(\.gz|\.xz)?")
        folder = (self.base / entry.files).parent
        names = os.listdir(folder) if kind_of(folder) == "folder" else []
        found = sorted({match[1] for match in map(pattern.fullmatch, names) if match} - {"tsv", "gz", "xz"})
        return f"; there is {', '.join(f'{entry.files}.{language}' for language in found)}" if found else ""
