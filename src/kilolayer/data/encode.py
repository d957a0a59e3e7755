"""Encode parallel text as token files: filtered, tagged and written in one pass, and cached by content."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kilolayer.data.cache_folder import built, content_key
from kilolayer.data.corpora import Corpora, DataConfig
from kilolayer.data.encoding_processes import available_processes, encode_chunks
from kilolayer.data.filters import FilterConfig, FilterReport, Seen, drop_empty
from kilolayer.data.mixing import Mixture, Part
from kilolayer.data.pair_encoder import Chunk, PairEncoder
from kilolayer.data.parallel import Pair, ParallelText, blank_side
from kilolayer.data.preparation_progress import PreparationProgress
from kilolayer.data.resumable_writer import ResumablePairWriter
from kilolayer.data.store import TokenPairs
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.errors import InputError

PAIRS_AT_ONCE, CHARACTERS_AT_ONCE = 4096, 1 << 24
SEVERAL_PROCESSES = 100_000
"""Pairs from which on several processes encode a text: fewer take about as long as the start of a process."""


def encode_text(
    text: ParallelText,
    tokenizers: Tokenizers,
    cache: Path,
    *,
    tagged: bool,
    filters: FilterConfig | None = None,
    processes: int | None = None,
) -> TokenPairs:
    """The token files of `text`: source [<2target>] [<bt>] tokens end, target tokens end.

    tagged: put the target language's tag before each source (used with several directions).
    filters: for training text; without them every pair is kept, in order. The result's `report` says what was removed.
    processes: how many encode the text; default: one for each core if the text is large. The files do not depend on it, nor on
    whether a process was killed while it wrote them: the next one continues.
    """
    models = [hashlib.sha256(each.model).hexdigest() for each in (tokenizers.source, tokenizers.target)]
    use = [text.direction.name, text.columns, text.synthetic, tagged]
    settings = ["pairs 1", models, use, None if filters is None else dataclasses.asdict(filters)]
    key = content_key(settings, text.files, cache)
    count = processes or (1 if text.size < SEVERAL_PROCESSES else available_processes())

    def build(draft: Path) -> None:
        _write(text, tokenizers, draft, tagged, filters, count)

    folder = built(cache / f"pairs-{key}", build, trust_times=True, resumable=True)
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


def _write(
    text: ParallelText, tokenizers: Tokenizers, draft: Path, tagged: bool, filters: FilterConfig | None, processes: int
) -> None:
    prefix = [tokenizers.source.tag_id(text.direction.target)] if tagged else []
    if text.synthetic:
        prefix.append(tokenizers.source.synthetic_id)
    encoder = PairEncoder(tokenizers, prefix, filters)
    vocab_size = max(tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    with ResumablePairWriter(draft, vocab_size) as writer:
        progress = PreparationProgress(text.files[0].name, text.size, writer.report.read)
        left = islice(_chunks(text, filters), writer.chunks, None)  # those before are read again for their duplicates
        try:
            for encoded in encode_chunks(encoder, left, processes):
                writer.append_chunk(*encoded)
                progress.show(writer.report.read)
        finally:
            progress.end()
        writer.complete()


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


def _chunks(text: ParallelText, filters: FilterConfig | None) -> Iterator[Chunk]:
    """The pairs of a text, chunk by chunk; with filters, without empty pairs and duplicates."""
    seen = Seen(text.size) if filters is not None and not filters.duplicates else None
    for read in _some(text.pairs()):
        pairs: list[Pair] = read if filters is None else drop_empty(read)
        filled = len(pairs)
        if seen is not None:
            pairs = [pair for pair, new in zip(pairs, seen.add(pairs), strict=True) if new]
        yield Chunk(pairs, FilterReport(read=len(read), empty=len(read) - filled, duplicate=filled - len(pairs)))
