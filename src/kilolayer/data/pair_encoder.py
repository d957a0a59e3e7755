"""Encode chunks of sentence pairs, in this process or in several; the result is the same.

A child process reads a `PairEncoder` and then chunks from standard input, and writes what it made of each to standard output.
Children are our own processes, so what passes between them is pickled.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, NamedTuple

import numpy as np

from kilolayer.data.filters import FilterConfig, FilterReport, fits_length, fits_ratio
from kilolayer.data.parallel import Pair
from kilolayer.data.tokenizer import END, Tokenizers
from kilolayer.errors import KilolayerError
from kilolayer.parallel.parent import when_parent_dies


class Chunk(NamedTuple):
    """Some pairs of a text, and what has been removed from among them so far."""

    pairs: list[Pair]
    report: FilterReport


class EncodedChunk(NamedTuple):
    """Tokens [n]: source, target, source, target, ...; the length of each source and target, int64 [pairs]."""

    tokens: np.ndarray
    source_lengths: np.ndarray
    target_lengths: np.ndarray
    report: FilterReport


@dataclass(frozen=True)
class PairEncoder:
    """Encodes pairs as: prefix source end, target end. filters: leave out pairs by their tokens; None: every pair is kept."""

    tokenizers: Tokenizers
    prefix: Sequence[int]
    filters: FilterConfig | None

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        sources = self.tokenizers.source.encode([source for source, _ in chunk.pairs])
        targets = self.tokenizers.target.encode([target for _, target in chunk.pairs])
        kept, report = list(zip(sources, targets, strict=True)), FilterReport(kept=len(sources))
        if self.filters is not None:
            kept, report = self._filtered(kept, self.filters)
        rows = [([*self.prefix, *source, END], [*target, END]) for source, target in kept]
        lengths = np.array([(len(source), len(target)) for source, target in rows], np.int64).reshape(-1, 2)
        tokens = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.uint32, int(lengths.sum()))
        return EncodedChunk(tokens, lengths[:, 0], lengths[:, 1], chunk.report + report)

    @staticmethod
    def _filtered(
        tokens: list[tuple[list[int], list[int]]], filters: FilterConfig
    ) -> tuple[list[tuple[list[int], list[int]]], FilterReport]:
        spoken = [pair for pair in tokens if pair[0] and pair[1]]  # text that consists only of control characters has no tokens
        short = [pair for pair in spoken if fits_length(*pair, filters)]
        kept = [pair for pair in short if fits_ratio(*pair, filters)]
        empty, too_long, ratio = len(tokens) - len(spoken), len(spoken) - len(short), len(short) - len(kept)
        return kept, FilterReport(kept=len(kept), empty=empty, too_long=too_long, ratio=ratio)


def encode_chunks(encoder: PairEncoder, chunks: Iterable[Chunk], processes: int) -> Iterator[EncodedChunk]:
    """What the encoder makes of each chunk, in order. An exception from `chunks`, or a signal, also ends the children."""
    if processes < 2:
        yield from map(encoder, chunks)
        return
    children = [_start() for _ in range(processes)]
    try:
        for child in children:
            _send(child.stdin, encoder)
        working: deque[subprocess.Popen[bytes]] = deque()
        idle = deque(children)
        for chunk in chunks:
            if not idle:
                yield _receive(working[0])
                idle.append(working.popleft())
            _send(idle[0].stdin, chunk)
            working.append(idle.popleft())
        for child in working:
            yield _receive(child)
    except BrokenPipeError:
        raise _killed() from None
    finally:
        for child in children:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):  # from what its buffer still holds
                    stream.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
        start_new_session=True,  # a terminal's signals go to the parent
    )


def _send(stream: IO[bytes] | None, value: Any) -> None:
    assert stream is not None
    stream.write(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _receive(child: subprocess.Popen[bytes]) -> EncodedChunk:
    assert child.stdout is not None
    try:
        return pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _killed() from None


def _killed() -> KilolayerError:
    return KilolayerError(
        "a process that encodes text was killed",
        where="the training text",
        fix="it may have used too much memory: start again, and the preparation goes on where it stopped",
    )


def _serve(parent: int) -> None:
    when_parent_dies(parent, lambda: os._exit(1))
    encoder: PairEncoder = pickle.load(sys.stdin.buffer)
    while True:
        try:
            chunk = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, encoder(chunk))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
