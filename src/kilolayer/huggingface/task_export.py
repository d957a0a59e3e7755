"""What a task adds to an exported folder: its tokenizer, what its README says, and the options of its search."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from kilolayer.tasks.config import RunConfig

TRUST = "trust_remote_code=True"
LEAST_POSITIONS = 1024
"""Least size of a table written for sinusoidal positions, which are unlimited."""
Config = TypeVar("Config", bound=RunConfig)


class TaskExport(Generic[Config]):
    """The part of a task that adds nothing: weights and configuration, without a tokenizer.

    A registration names a subclass by its path: `export="my_module:MyExport"`.
    """

    pipeline: ClassVar[str] = ""
    """What the models do, in the words of the Hugging Face Hub, such as "text-classification"; empty if it has none."""

    def __init__(self, folder: Path, config: Config) -> None:
        """folder, config: of the run that is exported."""
        self.folder, self.config = folder, config

    @property
    def positions(self) -> int:
        """How many positions the exported model needs, if the model itself has no limit."""
        return LEAST_POSITIONS

    @property
    def word_pieces(self) -> bool:
        """Whether the vocabulary is WordPiece, as in an imported BERT encoder."""
        return False

    @property
    def labels(self) -> list[str]:
        """The names of the classes that the model scores, in order."""
        return []

    @property
    def languages(self) -> list[str]:
        """The codes of the languages that the model reads and writes."""
        return []

    def tokenizer_files(self, left_out: int = 0) -> dict[str, bytes]:
        """Names and contents of the files of the vocabulary for `AutoTokenizer`. left_out: number of first ids dropped."""
        return {}

    def generation(self, positions: int) -> dict[str, Any]:
        """Options of Transformers' `generate`, for a model with a decoder of this many positions."""
        return {}

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        """Example code with Transformers, run in the parent folder. trust: whether the folder has code of its own."""
        auto = f"AutoModel{architecture[architecture.index('For') :] if 'For' in architecture else ''}"
        return (
            f"from transformers import {auto}\n\n"
            f'model = {auto}.from_pretrained("{folder}"{trusted(trust)})\n'
            "print(model.config)"
        )

    def ctranslate2_use(self, folder: str) -> str:
        """Example code with CTranslate2, run in the parent folder."""
        return f'import ctranslate2\n\ntranslator = ctranslate2.Translator("{folder}")'

    def notes(self, software: str) -> list[str]:
        """Lines at the end of the README."""
        return []


def trusted(trust: bool) -> str:
    """The argument of `from_pretrained` for a folder with code of its own."""
    return f", {TRUST}" if trust else ""
