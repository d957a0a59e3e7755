"""Kilolayer's vocabularies as a tokenizer of Transformers: the same ids as in Kilolayer, whatever the text is.

Text that spells a special token, as "</s>", is ordinary text, as everywhere in Kilolayer; the mask alone is looked for, by the
tokenizer of a masked language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizer

from kilolayer.auto_classes.module_file import class_in_module, write_module
from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.data.tokenizer import (
    BYTE_BPE_FILE,
    END,
    PAD,
    SHARED_FILE,
    SIDE_FILES,
    START,
    SURROGATE,
    UNKNOWN,
    Tokenizer,
    Tokenizers,
)
from kilolayer.data.vocabulary import ByteVocabulary, PieceVocabulary, TextVocabulary
from kilolayer.files.paths import kind_of
from kilolayer.generate.fill import MASK, split_at_masks

Form = Literal["source", "text", "masked", "sentences"]
# What Transformers calls it: a tag and the end; nothing; start and end, of two sentences START a END END b END.
PATTERNS: dict[Form, str] = {
    "source": "prefix_suffix",
    "text": "none",
    "masked": "cls_double_sep",
    "sentences": "cls_double_sep",
}


class KilolayerTokenizer(PreTrainedTokenizer):
    """Any vocabulary of Kilolayer.

    form: "source" of a translator, "text" of a language model, "masked" of a masked one, "sentences" of a classifier.
    language: of several that a translator writes, the one to write. The files are those that a run keeps; without one, tokens
    are bytes.
    """

    vocab_files_names = {  # noqa: RUF012
        "vocab_file": SHARED_FILE,
        "tokenizer_file": BYTE_BPE_FILE,
        "source_file": SIDE_FILES[0],
        "target_file": SIDE_FILES[1],
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        form: Form = "text",
        vocab_file: str | None = None,
        tokenizer_file: str | None = None,
        source_file: str | None = None,
        target_file: str | None = None,
        language: str | None = None,
        **others: Any,
    ) -> None:
        self.form: Form = form
        self.vocabulary = _load(form, vocab_file, tokenizer_file, source_file, target_file)
        both = self.vocabulary
        self._reads, self._writes = (both.source, both.target) if isinstance(both, Tokenizers) else (both, both)
        self._choose(self._reads)
        special = {"pad": PAD, "unk": UNKNOWN, "bos": END if form == "text" else START, "eos": END}
        special |= {"cls": START, "sep": END} if PATTERNS[form] == "cls_double_sep" else {}
        for name, token in special.items():
            others[f"{name}_token"] = self._names[token]
        if form == "masked":
            others["mask_token"] = MASK
        side = "left" if form == "text" else "right"
        others = {"padding_side": side, "truncation_side": side, "clean_up_tokenization_spaces": False, **others}
        others |= {"split_special_tokens": True, "special_tokens_pattern": PATTERNS[form]}
        others["auto_map"] = {"AutoTokenizer": [class_in_module(type(self).__name__), None]}
        self.prefix_tokens = [self._reads.tag_id(language)] if language and isinstance(self._reads, Tokenizer) else []
        self.suffix_tokens = [END]
        super().__init__(form=form, language=language, **others)

    @classmethod
    def in_folder(cls, folder: Path, form: Form, **options: Any) -> Self:
        """Of the files that a vocabulary has written into a folder; options: those of the class and of its base."""
        paths = {name: folder / file for name, file in cls.vocab_files_names.items()}
        return cls(form, **{name: str(path) for name, path in paths.items() if kind_of(path) is not None}, **options)

    def _choose(self, side: Tokenizer | TextVocabulary) -> None:
        """From here on, texts are of this side."""
        self._names = side.pieces()
        self._ids = {name: token for token, name in enumerate(self._names)}
        self._side = side

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary; the mask stands behind them."""
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        """How each token is written, and its id."""
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **others: Any) -> list[str]:
        if self.form != "masked":
            return [self._names[token] for token in _encode(self._side, text)]
        assert not isinstance(self._side, Tokenizer)
        parts = split_at_masks(text, self._side)
        first, *rest = ([self._names[token] for token in _encode(self._side, part)] for part in parts)
        return [*first, *(token for part in rest for token in (MASK, *part))]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, UNKNOWN)

    def _convert_id_to_token(self, index: int) -> str:
        return self._names[index] if 0 <= index < len(self._names) else self._names[UNKNOWN]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of some tokens; special ones leave no trace."""
        return _decode(self._writes, [self._ids[token] for token in tokens if token in self._ids])

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
                parts += [_decode(self._writes, ordinary), self.convert_ids_to_tokens(token)]
                ordinary = []
        return "".join([*parts, _decode(self._writes, ordinary)])

    def _switch_to_input_mode(self) -> None:
        self._choose(self._reads)

    def _switch_to_target_mode(self) -> None:
        self._choose(self._writes)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the vocabulary's files, and the module that `trust_remote_code=True` reads."""
        folder = Path(save_directory)
        self.vocabulary.save(folder)
        write_module(folder)
        return tuple(str(folder / file) for file in self.vocab_files_names.values() if kind_of(folder / file) is not None)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoTokenizer") -> None:
        """Nothing: what is saved names the class, and has the module that it is in."""


def _load(
    form: Form, shared: str | None, byte_level: str | None, source: str | None, target: str | None
) -> Tokenizers | TextVocabulary:
    if form == "source":
        if source is not None and target is not None:
            return Tokenizers(Tokenizer.load(Path(source)), Tokenizer.load(Path(target)))
        both = Tokenizer.load(Path(shared or SHARED_FILE))
        return Tokenizers(both, both)
    if byte_level is not None:
        return BytePieceVocabulary.load(Path(byte_level))
    return ByteVocabulary() if shared is None else PieceVocabulary.load(Path(shared), "export the run again")


def _encode(side: Tokenizer | TextVocabulary, text: str) -> Sequence[int]:
    if isinstance(side, Tokenizer):
        return side.encode([text])[0]
    return side.encode(SURROGATE.sub("\ufffd", text).encode()).tolist()


def _decode(side: Tokenizer | TextVocabulary, ids: list[int]) -> str:
    return side.decode([ids])[0] if isinstance(side, Tokenizer) else side.decode(ids)
