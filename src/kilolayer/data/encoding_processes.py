"""Encode chunks of text in this process or in several; the results are the same, and in the same order.

A child process reads an encoder and then chunks from standard input, and writes what it made of each to standard output.
Children are our own processes, so what passes between them is pickled.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any, TypeVar

from kilolayer.errors import KilolayerError
from kilolayer.parallel.parent import when_parent_dies
from kilolayer.terminal import under_torchrun

AnyChunk = TypeVar("AnyChunk")
Encoded = TypeVar("Encoded")


def available_processes() -> int:
    """One for each core that this process may use; the processes of a torchrun share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else 1
    return max(cores // beside, 1)


def encode_chunks(encoder: Callable[[AnyChunk], Encoded], chunks: Iterable[AnyChunk], processes: int) -> Iterator[Encoded]:
    """What `encoder` makes of each chunk, in order. An exception from `chunks`, or a signal, also ends the children.

    encoder: can be pickled, and so can what it takes and returns.
    """
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
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    # Several threads in each of several processes would only wait for each other.
    env = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,  # a terminal's signals go to the parent
    )


def _send(stream: IO[bytes] | None, value: Any) -> None:
    assert stream is not None
    stream.write(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    stream.flush()


def _receive(child: subprocess.Popen[bytes]) -> Any:
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
    encoder = pickle.load(sys.stdin.buffer)
    while True:
        try:
            chunk = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, encoder(chunk))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
