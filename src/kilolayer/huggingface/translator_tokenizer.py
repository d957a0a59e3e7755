"""A translation model's vocabularies as the files of `MarianTokenizer`, which splits text with the SentencePiece model itself.

The tag of a target language, <2de>, is written >>de<< before a source, as in Marian's multilingual models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import Tokenizer, Tokenizers


def marian_files(tokenizers: Tokenizers, directions: Sequence[Direction], length: int, left_out: int = 0) -> dict[str, bytes]:
    """File names and contents.

    length: maximum number of source tokens. left_out: number of first ids dropped; the start token then serves as padding.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "MarianTokenizer",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<s>" if left_out else "<pad>",
        "model_max_length": length,
        "separate_vocabs": not tokenizers.shared,
        "split_special_tokens": True,  # text that spells </s> is ordinary text
        "clean_up_tokenization_spaces": False,
    }
    if len(directions) == 1:
        (direction,) = directions
        settings |= {"source_lang": direction.source, "target_lang": direction.target}
    files = {
        "source.spm": tokenizers.source.model,
        "target.spm": tokenizers.target.model,
        "vocab.json": _vocabulary(tokenizers.source, left_out, read=not tokenizers.shared),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }
    return files if tokenizers.shared else {**files, "target_vocab.json": _vocabulary(tokenizers.target, left_out)}


def marian_tag(language: str) -> str:
    """The tag before a source to be translated into this language."""
    return f">>{language}<<"


def _vocabulary(tokenizer: Tokenizer, left_out: int, *, read: bool = False) -> bytes:
    """Pieces and ids as JSON. read: only pieces that this side's text is split into.

    MarianTokenizer also looks up letters that SentencePiece does not know, and would find pieces of the other side.
    """
    tags = {f"<2{language}>": marian_tag(language) for language in tokenizer.languages}
    known = {token: piece for token, piece in enumerate(tokenizer.pieces) if not (read and tokenizer.is_unused(token))}
    ids = {tags.get(piece, piece): token - left_out for token, piece in known.items() if token >= left_out}
    return json.dumps(ids, indent=1, ensure_ascii=False).encode()
