"""A language model's or an encoder's vocabulary as a tokenizer.json, which the tokenizers library reads without SentencePiece.

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
from kilolayer.data.marian_pieces import SPECIAL as PIECE_SPECIAL
from kilolayer.data.tokenizer import END, SPACE, START, UNKNOWN, Tokenizer
from kilolayer.data.vocabulary import ByteVocabulary, PieceVocabulary, TextVocabulary
from kilolayer.errors import InputError, shown
from kilolayer.generate.fill import MASK

APART_LETTERS = "<>/xpadunks0123456789ABCDEF"
"""The characters that occur in special tokens and byte pieces."""
NEVER = -1e6
"""A score far below that of any piece."""


def text_files(vocabulary: TextVocabulary, length: int, left_out: int = 0) -> dict[str, bytes]:
    """The files of a language model that reads `length` tokens, by name.

    left_out: number of first ids dropped; the end token then replaces those special tokens.
    """
    special, table = _read(vocabulary)
    pad, unknown, start, end = (special[END] if token < left_out else name for token, name in enumerate(special))
    names = {"pad_token": pad, "unk_token": unknown, "bos_token": start, "eos_token": end}
    return _files(_without_first(table, left_out), {**names, "padding_side": "left", "model_max_length": length})


def encoder_files(vocabulary: TextVocabulary, length: int, *, token_types: int | None, masked: bool) -> dict[str, bytes]:
    """The files of an encoder that reads `length` tokens, by name.

    Texts are read as START a END, and pairs as START a END END b END. masked: there is also the token <mask>, with the id that
    follows the vocabulary's last; text that spells a special token is then that token.
    """
    (pad, unknown, start, end), table = _read(vocabulary)
    names = {"pad_token": pad, "unk_token": unknown, "bos_token": start, "eos_token": end, "cls_token": start, "sep_token": end}
    table |= {"post_processor": _template(start, end)}
    if masked:
        names |= {"mask_token": MASK}
        table = _with_mask(table, vocabulary)
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {
        "split_special_tokens": not masked,  # Transformers finds all of them in text, or no mask
        "model_max_length": length,
        "model_input_names": [name for name in inputs if (token_types or 1) > 1 or name != "token_type_ids"],
    }
    return _files(table, {**names, **settings})


def _read(vocabulary: TextVocabulary) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The special tokens of a vocabulary, and its tokenizer.json."""
    match vocabulary:
        case ByteVocabulary():
            return SPECIAL, _of_bytes()
        case BytePieceVocabulary():
            return SPECIAL, json.loads(vocabulary.text())
        case PieceVocabulary():
            return PIECE_SPECIAL, _of_pieces(vocabulary.tokenizer)
        case _:
            raise InputError(f"a vocabulary of the kind {shown(type(vocabulary).__name__)} cannot be exported")


def _files(table: dict[str, Any], settings: dict[str, Any]) -> dict[str, bytes]:
    fixed = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "split_special_tokens": True,  # text that spells a special token is ordinary text
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": json.dumps(table, indent=1, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps({**fixed, **settings}, indent=1).encode(),
    }


def _template(start: str, end: str) -> dict[str, Any]:
    """The special tokens around one text, and around two, with the token types of each part."""

    def token(name: str, kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": kind}}

    def text(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    single = [token(start, 0), text("A", 0), token(end, 0)]
    ids = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ((start, START), (end, END))}
    pair = [*single, token(end, 1), text("B", 1), token(end, 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": ids}


def _with_mask(table: dict[str, Any], vocabulary: TextVocabulary) -> dict[str, Any]:
    """The table with the mask as a special token.

    A space before a mask belongs to the token to be predicted, unless tokens are bytes.
    """
    mask = {**table["added_tokens"][0], "id": vocabulary.vocab_size, "content": MASK}
    if isinstance(vocabulary, ByteVocabulary):
        return {**table, "added_tokens": [*table["added_tokens"], mask]}
    joined = {"type": "Replace", "pattern": {"String": f" {MASK}"}, "content": MASK}
    steps = [joined, table["normalizer"]] if table["normalizer"] else [joined]
    return {
        **table,
        "added_tokens": [*table["added_tokens"], {**mask, "normalized": True}],
        "normalizer": {"type": "Sequence", "normalizers": steps},
    }


def _of_bytes() -> dict[str, Any]:
    letters = sorted(BYTE_OF, key=BYTE_OF.__getitem__)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
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
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
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
