"""Trains SentencePiece models in a process of its own: inside one, Python could hear no signal before the model is done.

The child reads its options and then the lines from standard input, and writes the model, or what is wrong, to standard output.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any

import sentencepiece

from kilolayer.errors import KilolayerError
from kilolayer.parallel.parent import when_parent_dies

LENGTH_BYTES = 4
MODEL, FAULT = b"m", b"f"


class UntrainableError(Exception):
    """SentencePiece can make no model of the lines; the text says why."""


def train_pieces(lines: Iterable[bytes], options: dict[str, Any]) -> bytes:
    """A model of `lines`, by SentencePiece's options. What `lines` raises, or a signal, ends the child too."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # a terminal's signals are for the parent
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        try:
            with child.stdin as stream:
                _send(stream, [json.dumps(options).encode()])
                _send(stream, lines)
        except BrokenPipeError:
            pass  # it has ended, and tells why
        answer = child.stdout.read()
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    if answer[:1] == MODEL and code == 0:
        return answer[1:]
    if answer[:1] == FAULT:
        raise UntrainableError(answer[1:].decode(errors="replace"))
    raise KilolayerError(
        f"the training of the vocabulary was ended from outside: exit code {code}",
        where="tokenizer",
        fix="it may have taken too much memory: lower tokenizer.sentences",
    )


def _send(stream: IO[bytes], texts: Iterable[bytes]) -> None:
    for text in texts:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def _received(stream: IO[bytes]) -> Iterator[bytes]:
    while size := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(size, "little"))


def _serve(parent: int) -> None:
    when_parent_dies(parent, lambda: os._exit(1))
    texts = _received(sys.stdin.buffer)
    options, model = json.loads(next(texts)), io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options)
        answer = MODEL + model.getvalue()
    except RuntimeError as error:
        answer = FAULT + str(error).encode()
    except MemoryError:
        sys.exit(1)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
