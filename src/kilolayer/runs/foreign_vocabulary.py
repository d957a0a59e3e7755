"""The vocabulary of an imported model, renumbered: padding 0, unknown 1, start 2, end 3, then all other tokens.

A special token that the model does not have gets a zero row and is never predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kilolayer.config import Table
from kilolayer.data.byte_piece_files import SPECIAL, read_byte_pieces
from kilolayer.data.byte_pieces import BytePieceVocabulary
from kilolayer.data.marian_pieces import read_marian_pieces
from kilolayer.data.tokenizer import END, PAD, load_tokenizers
from kilolayer.data.word_pieces import WordPieceVocabulary, read_word_pieces
from kilolayer.errors import InputError, shown
from kilolayer.huggingface.imported import Imported
from kilolayer.models.config import ModelConfig
from kilolayer.tasks.task import Vocabulary

Kind = Literal["byte_bpe", "wordpiece", "marian"]
KINDS: dict[str, Kind] = {"bert": "wordpiece", "gpt2": "byte_bpe", "opt": "byte_bpe", "qwen3": "byte_bpe", "marian": "marian"}


@dataclass(frozen=True)
class ForeignVocabulary:
    """rows: for each of our ids, the row in the imported tables; None if there is none, which only the first ids can have."""

    kind: Kind
    folder: Path
    rows: list[int | None]

    @property
    def table(self) -> Table:
        """The values of the [tokenizer] table."""
        return {"path": str(self.folder), **({} if self.kind == "marian" else {"kind": self.kind})}

    def load(self) -> Vocabulary:
        """Load the vocabulary."""
        match self.kind:
            case "byte_bpe":
                return BytePieceVocabulary.load(self.folder)
            case "wordpiece":
                return WordPieceVocabulary.load(self.folder)
            case "marian":
                return load_tokenizers(self.folder)

    def renumbered(self, config: ModelConfig) -> ModelConfig:
        """The model configuration with one table row for each of our ids."""
        sizes: dict[str, Any] = {"vocab_size": len(self.rows), "pad_id": PAD if config.shape == "encoder_decoder" else None}
        if config.source_vocab_size is not None:
            raise InputError(
                "source and target have separate vocabularies",
                where=str(self.folder),
                fix="the model can be imported with kl.from_huggingface, but no run can start from it",
            )
        return replace(config, **sizes, first_predicted=0 if config.head else self.rows.count(None))


def read_vocabulary(imported: Imported) -> ForeignVocabulary:
    """Read the vocabulary in a folder; each of its tokens must have a row in the tables."""
    folder, theirs, kind = imported.folder, imported.theirs, KINDS[imported.form.model_type]
    end = theirs.get("eos_token_id")
    rows: list[int | None]
    match kind:
        case "wordpiece":
            rows = [*read_word_pieces(folder).ids]
        case "byte_bpe":
            if imported.form.model_type == "qwen3" and not (folder / "tokenizer.json").exists():
                raise InputError(
                    "Qwen3's vocab.json does not say how text is cut into words",
                    where=str(folder),
                    fix="put tokenizer.json beside it",
                )
            pieces = read_byte_pieces(folder)
            special = [pieces.others.get(name) for name in SPECIAL[:END]]
            # Only the first ids can be excluded from prediction: if one of the three is missing, all are left out.
            rows = [*(special if None not in special else [None] * END), end, *pieces.ids]
        case "marian":
            pieces = read_marian_pieces(folder)
            start = theirs.get("decoder_start_token_id", theirs.get("pad_token_id"))
            pad = theirs.get("pad_token_id")
            # Marian uses padding as the start token; its row is then that of the start.
            first = [None if pad == start else pad, pieces.numbers["<unk>"], start, end]
            rows = [*first, *(pieces.numbers[piece] for piece in pieces.pieces[END + 1 :])]
    size = imported.config.vocab_size or 0
    missing = rows[:END].count(None)
    for token, row in enumerate(rows):
        if (row is not None or token >= missing) and (type(row) is not int or not 0 <= row < size):
            raise InputError(
                f"the vocabulary has a token {shown(row)}, and the model {size} tokens",
                where=str(folder),
                fix="put the model's own tokenizer beside it, and eos_token_id into config.json",
            )
    return ForeignVocabulary(kind, folder, rows)
