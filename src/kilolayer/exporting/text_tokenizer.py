"""A language model's vocabulary as a tokenizer.json, which the tokenizers library reads without SentencePiece.

Byte-level BPE has this form already, and bytes are byte-level BPE without merges. For a SentencePiece model without
normalization, spaces become U+2581, line feeds are separate tokens, and the pieces form a unigram model or merges. All give the
same ids, except for a unigram model when two segmentations of a text have the same score: SentencePiece rounds sums to fp32,
the tokenizers library to fp64.

Text that spells <s> or <0x41> must not become that piece. SentencePiece distinguishes kinds of pieces, but the unigram model
here does not. So the piece gets a score below that of any segmentation into others; and if one of its letters is in no piece,
so that there is no such segmentation, the text is split at that letter beforehand.
"""

from __future__ import annotations

import json
from typing import Any

from kilolayer.data.byte_piece_files import BYTE_OF, SPECIAL
from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.data.tokenizer import END, SPACE, UNKNOWN, Tokenizer
from kilolayer.data.vocabulary import ByteVocabulary, PieceVocabulary, TextVocabulary
from kilolayer.errors import InputError, shown
from kilolayer.tasks.causal_lm.config import CausalLMConfig

PIECE_SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
APART_LETTERS = "<>/xpadunks0123456789ABCDEF"
"""The characters that occur in special tokens and byte pieces."""
NEVER = -1e6
"""A score far below that of any piece."""


def text_files(vocabulary: TextVocabulary, config: CausalLMConfig, left_out: int = 0) -> dict[str, bytes]:
    """File names and contents. left_out: number of first ids dropped; the end token then replaces those special tokens."""
    special = SPECIAL
    match vocabulary:
        case ByteVocabulary():
            table = _of_bytes()
        case BytePieceVocabulary():
            table = json.loads(vocabulary.text())
        case PieceVocabulary():
            special, table = PIECE_SPECIAL, _of_pieces(vocabulary.tokenizer)
        case _:
            raise InputError(f"a vocabulary of the kind {shown(type(vocabulary).__name__)} cannot be exported")
    pad, unknown, start, end = (special[END] if token < left_out else name for token, name in enumerate(special))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "unk_token": unknown,
        "bos_token": start,
        "eos_token": end,
        "padding_side": "left",
        "model_max_length": config.text.length,
        "split_special_tokens": True,  # text that spells a special token is ordinary text
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(_without_first(table, left_out), indent=1, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
    }


def _of_bytes() -> dict[str, Any]:
    letters = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {piece: token for token, piece in enumerate([*SPECIAL, *letters])}
    return _table(SPECIAL, {"type": "BPE", "vocab": vocab, "merges": []}, pre_tokenizer=level, decoder=level)


def _of_pieces(tokenizer: Tokenizer) -> dict[str, Any]:
    pieces = tokenizer.pieces
    # BPE pieces are ranked by integers, unigram pieces by log-probabilities.
    if all(tokenizer.score(token).is_integer() for token in range(len(pieces))):
        vocab = {piece: token for token, piece in enumerate(pieces)}
        merges = _merges(tokenizer)
        model: dict[str, Any] = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<unk>", "fuse_unk": True}
    else:
        scores = [NEVER if tokenizer.is_reserved(token) else tokenizer.score(token) for token in range(len(pieces))]
        model = {"type": "Unigram", "unk_id": 1, "vocab": [list(pair) for pair in zip(pieces, scores, strict=True)]}
    letters = {letter for token, piece in enumerate(pieces) if not tokenizer.is_reserved(token) for letter in piece}
    unknown = "".join(letter for letter in APART_LETTERS if letter not in letters)
    return _table(
        PIECE_SPECIAL,
        {**model, "byte_fallback": True},
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": f"[\\n{unknown}]"},
            "behavior": "Isolated",
            "invert": False,
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    )


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    """Every way to make a piece of two others, in the order in which SentencePiece merges."""
    found = []
    known = {piece: token for token, piece in enumerate(tokenizer.pieces) if not tokenizer.is_reserved(token)}
    for piece, token in known.items():
        cuts = [(piece[:place], piece[place:]) for place in range(1, len(piece))]
        found += [(-tokenizer.score(token), token, [left, right]) for left, right in cuts if left in known and right in known]
    return [pair for _, _, pair in sorted(found, key=lambda each: each[:2])]


def _without_first(table: dict[str, Any], count: int) -> dict[str, Any]:
    """The ids reduced by `count`. Nothing is unknown to these vocabularies, so no unknown token is named."""
    if not count:
        return table
    added = [{**each, "id": each["id"] - count} for each in table["added_tokens"] if each["id"] >= count]
    model = table["model"]
    vocab: Any = model["vocab"]
    if isinstance(vocab, list):
        unknown = {"unk_id": UNKNOWN - count if count <= UNKNOWN else None}
        return {**table, "added_tokens": added, "model": {**model, **unknown, "vocab": vocab[count:]}}
    vocab = {piece: token - count for piece, token in vocab.items() if token >= count}
    unknown = {"unk_token": model.get("unk_token") if count <= UNKNOWN else None}
    return {**table, "added_tokens": added, "model": {**model, **unknown, "vocab": vocab}}


def _table(special: tuple[str, ...], model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": name, **flags} for token, name in enumerate(special)],
        "normalizer": None,
        "post_processor": None,
        **parts,
        "model": model,
    }
