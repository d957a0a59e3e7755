"""The vocabulary of an encoder as a Transformers tokenizer, with the same ids as in Kilolayer for any text.

Text that spells a special token, such as "</s>", is ordinary text, as everywhere in Kilolayer; only the mask is recognised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedTokenizer

from kilolayer.auto_classes.module_file import class_in_module, write_module
from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.data.tokenizer import BYTE_BPE_FILE, END, PAD, SHARED_FILE, START, SURROGATE, UNKNOWN
from kilolayer.data.vocabulary import ByteVocabulary, PieceVocabulary, TextVocabulary
from kilolayer.files.paths import kind_of
from kilolayer.generate.fill import MASK, split_at_masks


class KilolayerTokenizer(PreTrainedTokenizer):
    """START a END, or START a END END b END, with any Kilolayer vocabulary.

    vocab_file: for SentencePiece.
    tokenizer_file: for byte-level BPE. Without either, tokens are bytes.
    masks: whether <mask> is a token, as in a masked language model; its id follows the vocabulary's last.
    types: whether the model has token types: 0 up to and including the first END, then 1.
    """

    vocab_files_names = {"vocab_file": SHARED_FILE, "tokenizer_file": BYTE_BPE_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file: str | None = None,
        tokenizer_file: str | None = None,
        masks: bool = False,
        types: bool = False,
        **others: Any,
    ) -> None:
        self.masks = masks
        self.vocabulary = _load(vocab_file, tokenizer_file)
        self._names = self.vocabulary.pieces
        self._ids = {name: token for token, name in enumerate(self._names)}
        special = {"pad": PAD, "unk": UNKNOWN, "bos": START, "eos": END, "cls": START, "sep": END}
        others |= {f"{name}_token": self._names[token] for name, token in special.items()}
        others |= {"mask_token": MASK} if masks else {}
        others |= {"split_special_tokens": True, "special_tokens_pattern": "cls_double_sep"}
        others["auto_map"] = {"AutoTokenizer": [class_in_module(type(self).__name__), None]}
        if types:
            others["model_input_names"] = [*self.model_input_names, "token_type_ids"]
        super().__init__(masks=masks, types=types, **{"clean_up_tokenization_spaces": False, **others})

    @classmethod
    def in_folder(cls, folder: Path, **options: Any) -> Self:
        """Load the file that a vocabulary has written to a folder. options: those of the class and of its base."""
        paths = {name: folder / file for name, file in cls.vocab_files_names.items()}
        return cls(**{name: str(path) for name, path in paths.items() if kind_of(path) is not None}, **options)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary, without the mask, whose id follows."""
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        """The written form of each token, and its id."""
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **others: Any) -> list[str]:
        parts = split_at_masks(text, self.vocabulary) if self.masks else [text]
        first, *rest = (self._cut(part) for part in parts)
        return [*first, *(token for part in rest for token in (MASK, *part))]

    def _cut(self, text: str) -> list[str]:
        ids = self.vocabulary.encode(SURROGATE.sub("\ufffd", text).encode()) if text else []
        return [self._names[token] for token in ids]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, UNKNOWN)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index] if 0 <= index < len(self._names) else self._names[UNKNOWN]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens; special tokens are skipped."""
        return self.vocabulary.decode([self._ids[token] for token in tokens if token in self._ids])

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        special = {*self.all_special_ids}
        parts: list[str] = []
        ordinary: list[int] = []
        for token in ids:
            if token not in special:
                ordinary.append(token)
            elif not skip_special_tokens:
                parts += [self.vocabulary.decode(ordinary), self.convert_ids_to_tokens(token)]
                ordinary = []
        return "".join([*parts, self.vocabulary.decode(ordinary)])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the vocabulary file, and the module that `trust_remote_code=True` loads."""
        folder = Path(save_directory)
        self.vocabulary.save(folder)
        write_module(folder)
        return tuple(str(folder / file) for file in self.vocab_files_names.values() if kind_of(folder / file) is not None)

    def create_token_type_ids_from_sequences(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        """Token types of START a END, or START a END END b END, as a Kilolayer classifier reads them."""
        return [0] * (len(token_ids_0) + 2) + ([] if token_ids_1 is None else [1] * (len(token_ids_1) + 2))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoTokenizer") -> None:
        """Do nothing: the saved files name the class and include the module that defines it."""


def _load(pieces: str | None, byte_level: str | None) -> TextVocabulary:
    if byte_level is not None:
        return BytePieceVocabulary.load(Path(byte_level))
    return ByteVocabulary() if pieces is None else PieceVocabulary.load(Path(pieces), "export the run again")
