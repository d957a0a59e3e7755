"""Train vocabularies in a child process, so that signals still work: inside the libraries, Python cannot handle them.

The child reads its options and then the lines from standard input, and writes the model, or an error, to standard output.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal

import sentencepiece

from kilolayer.errors import KilolayerError
from kilolayer.parallel.parent import when_parent_dies

LENGTH_BYTES = 4
MODEL, FAULT = b"m", b"f"


class UntrainableError(Exception):
    """No model can be trained on the lines; the message says why."""


def train_pieces(
    lines: Iterable[bytes], options: dict[str, Any], library: Literal["sentencepiece", "tokenizers"] = "sentencepiece"
) -> bytes:
    """Train a model on `lines`, in UTF-8, and return its file's bytes.

    options: those of SentencePiece's trainer, or of the tokenizers library's BpeTrainer, whose result is a tokenizer.json. An
    exception from `lines`, or a signal, also ends the child.
    """
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,  # a terminal's signals go to the parent
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        try:
            with child.stdin as stream:
                _send(stream, [json.dumps([library, options]).encode()])
                _send(stream, lines)
        except BrokenPipeError:
            pass  # the child has ended, and its output says why
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
        f"the process that trains the vocabulary was killed: exit code {code}",
        where="tokenizer",
        fix="it may have used too much memory: lower tokenizer.sentences",
    )


def _send(stream: IO[bytes], texts: Iterable[bytes]) -> None:
    for text in texts:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def _received(stream: IO[bytes]) -> Iterator[bytes]:
    while size := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(size, "little"))


def _sentencepiece(texts: Iterator[bytes], options: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options)
    return model.getvalue()


def _tokenizers(texts: Iterator[bytes], options: dict[str, Any]) -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **options)
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return tokenizer.to_str().encode()


def _serve(parent: int) -> None:
    when_parent_dies(parent, lambda: os._exit(1))
    texts = _received(sys.stdin.buffer)
    library, options = json.loads(next(texts))
    train = {"sentencepiece": _sentencepiece, "tokenizers": _tokenizers}[library]
    try:
        answer = MODEL + train(texts, options)
    except RuntimeError as error:
        answer = FAULT + str(error).encode()
    except MemoryError:
        sys.exit(1)
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
