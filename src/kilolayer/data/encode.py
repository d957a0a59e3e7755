"""Encode parallel text as token files: filtered, tagged and written in one pass, and cached by content."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.corpora import Corpora, DataConfig
from kilolayer.data.filters import FilterConfig, FilterReport, Seen, drop_empty, fits_length, fits_ratio
from kilolayer.data.mixing import Mixture, Part
from kilolayer.data.parallel import Pair, ParallelText, blank_side
from kilolayer.data.store import PairWriter, TokenPairs
from kilolayer.data.tokenizer import END, Tokenizers
from kilolayer.errors import InputError

PAIRS_AT_ONCE, CHARACTERS_AT_ONCE = 4096, 1 << 24


def encode_text(
    text: ParallelText, tokenizers: Tokenizers, cache: Path, *, tagged: bool, filters: FilterConfig | None = None
) -> TokenPairs:
    """The token files of `text`: source [<2target>] [<bt>] tokens end, target tokens end.

    tagged: put the target language's tag before each source (used with several directions).
    filters: for training text; without them every pair is kept, in order. The result's `report` says what was removed.
    """
    models = [hashlib.sha256(each.model).hexdigest() for each in (tokenizers.source, tokenizers.target)]
    use = [text.direction.name, text.columns, text.synthetic, tagged]
    settings = ["pairs 1", models, use, None if filters is None else dataclasses.asdict(filters)]
    key = content_key(settings, text.files)
    folder = built(cache / f"pairs-{key}", lambda draft: _write(text, tokenizers, draft, tagged, filters))
    pairs = TokenPairs(folder)
    if not len(pairs):
        raise _nothing_left(text, pairs.report)
    return pairs


def _nothing_left(text: ParallelText, report: FilterReport | None) -> InputError:
    where = " and ".join(map(str, text.files))
    return blank_side(text) or InputError(f"no pairs are left: {report}", where=where, fix="relax data.filters")


def encode_training(corpora: Corpora, tokenizers: Tokenizers, config: DataConfig, cache: Path) -> Mixture:
    """The training text of all directions, filtered and encoded, as one mixture."""
    tagged = bool(corpora.tags)
    encoded = [(text, encode_text(text, tokenizers, cache, tagged=tagged, filters=config.filters)) for text in corpora.train]
    return Mixture([Part(pairs, text.direction.name, text.upsample) for text, pairs in encoded], corpora.temperature)


def _write(text: ParallelText, tokenizers: Tokenizers, draft: Path, tagged: bool, filters: FilterConfig | None) -> None:
    prefix = [tokenizers.source.tag_id(text.direction.target)] if tagged else []
    if text.synthetic:
        prefix.append(tokenizers.source.synthetic_id)
    vocab_size = max(tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    report = FilterReport()
    with PairWriter(draft, vocab_size) as writer:
        for chunk, counted in _kept(text, tokenizers, filters):
            sources = [[*prefix, *source, END] for source, _ in chunk]
            writer.append(sources, [[*target, END] for _, target in chunk])
            report += counted
        writer.finish(report)


def _some(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    """Group pairs into chunks of limited size: many short pairs, or a few long ones."""
    read: list[Pair] = []
    characters = 0
    for pair in pairs:
        read.append(pair)
        characters += len(pair[0]) + len(pair[1])
        if len(read) == PAIRS_AT_ONCE or characters > CHARACTERS_AT_ONCE:
            yield read
            read, characters = [], 0
    if read:
        yield read


def _kept(
    text: ParallelText, tokenizers: Tokenizers, filters: FilterConfig | None
) -> Iterator[tuple[list[tuple[list[int], list[int]]], FilterReport]]:
    """The tokens of the pairs that pass the filters, chunk by chunk, and the filter counts of each chunk."""
    seen = Seen(text.size) if filters is not None and not filters.duplicates else None
    for read in _some(text.pairs()):
        pairs: list[Pair] = read if filters is None else drop_empty(read)
        filled = len(pairs)
        if seen is not None:
            pairs = [pair for pair, new in zip(pairs, seen.add(pairs), strict=True) if new]
        sources = tokenizers.source.encode([source for source, _ in pairs])
        tokens = list(zip(sources, tokenizers.target.encode([target for _, target in pairs]), strict=True))
        if filters is None:
            yield tokens, FilterReport(read=len(read), kept=len(tokens))
            continue
        spoken = [pair for pair in tokens if pair[0] and pair[1]]  # text that consists only of control characters has no tokens
        short = [pair for pair in spoken if fits_length(*pair, filters)]
        kept = [pair for pair in short if fits_ratio(*pair, filters)]
        yield (
            kept,
            FilterReport(
                read=len(read),
                kept=len(kept),
                empty=len(read) - filled + len(tokens) - len(spoken),
                duplicate=filled - len(pairs),
                too_long=len(spoken) - len(short),
                ratio=len(short) - len(kept),
            ),
        )
