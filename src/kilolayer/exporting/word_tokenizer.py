"""An encoder's WordPiece vocabulary as a tokenizer.json with the run's ids, which Transformers reads without Kilolayer."""

from __future__ import annotations

import json

from kilolayer.data.word_pieces import FIRST, MASK, WordPieceVocabulary


def word_files(vocabulary: WordPieceVocabulary, length: int, *, token_types: int | None, masked: bool) -> dict[str, bytes]:
    """File names and contents, for an encoder that reads `length` tokens. masked: texts may contain masks."""
    pad, unknown, start, end = FIRST
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "unk_token": unknown,
        "cls_token": start,
        "sep_token": end,
        "mask_token": MASK,
        "model_max_length": length,
        "model_input_names": [name for name in inputs if token_types or name != "token_type_ids"],
        "split_special_tokens": not masked,  # text that spells a special token is ordinary text, unless masks must be found
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": vocabulary.text().encode(), "tokenizer_config.json": json.dumps(settings, indent=1).encode()}
