"""What a translator adds to an exported folder."""

from __future__ import annotations

from typing import Any, ClassVar

from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.huggingface.generation import search_options
from kilolayer.huggingface.task_export import LEAST_POSITIONS, TaskExport, trusted
from kilolayer.huggingface.translator_tokenizer import marian_files, marian_tag
from kilolayer.tasks.translation.config import TranslationConfig

MOST_POSITIONS = 4096


class TranslatorExport(TaskExport[TranslationConfig]):
    """Its tokenizer is Marian's, with a tag for the target language if there are several."""

    pipeline: ClassVar[str] = "translation"

    @property
    def directions(self) -> list[Direction]:
        """The directions of the run, in order."""
        return [Direction.parse(each) for each in self.config.data.directions]

    @property
    def positions(self) -> int:
        """As many as the run itself may read and write, within bounds."""
        search = self.config.search
        longest = max(search.max_source_length, search.max_length(search.max_source_length))
        return min(max(longest, LEAST_POSITIONS), MOST_POSITIONS)

    @property
    def languages(self) -> list[str]:
        return sorted({each for pair in self.directions for each in (pair.source, pair.target)})

    def tokenizer_files(self, left_out: int = 0) -> dict[str, bytes]:
        length = self.config.search.max_source_length
        return marian_files(Tokenizers.load(self.folder), self.directions, length, left_out)

    def generation(self, positions: int) -> dict[str, Any]:
        return {**search_options(self.config.search), "max_new_tokens": positions - 1}

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        arguments = f'"{folder}"{trusted(trust)}'
        tag = f"{marian_tag(self.directions[0].target)} " if len(self.directions) > 1 else ""
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f"tokenizer = AutoTokenizer.from_pretrained({arguments})\n"
            f"model = AutoModelForSeq2SeqLM.from_pretrained({arguments})\n"
            f'batch = tokenizer(["{tag}A sentence."], return_tensors="pt", padding=True)\n'
            f"found = model.generate(**batch, max_new_tokens={self._limit('batch.input_ids.shape[1]')})\n"
            "print(tokenizer.batch_decode(found, skip_special_tokens=True))"
        )

    def ctranslate2_use(self, folder: str) -> str:
        search = self.config.search
        tag = f'["<2{self.directions[0].target}>"] + ' if len(self.directions) > 1 else ""
        shared = Tokenizers.load(self.folder).shared
        reader = f'sentencepiece.SentencePieceProcessor("{folder}/tokenizer.model")'
        writer = "pieces" if shared else f'sentencepiece.SentencePieceProcessor("{folder}/tokenizer.target.model")'
        beam = search.width if search.method == "beam" else 1
        penalty = 1.0 if search.length_penalty is None else search.length_penalty
        return (
            "import ctranslate2, sentencepiece\n\n"
            f'pieces, translator = {reader}, ctranslate2.Translator("{folder}")\n'
            f'source = {tag}pieces.encode("A sentence.", out_type=str)\n'
            f"found = translator.translate_batch([source], beam_size={beam}, length_penalty={penalty:g}, "
            f"max_decoding_length={self._limit('(len(source) + 1)')})\n"
            f"print({writer}.decode(found[0].hypotheses[0]))"
        )

    def notes(self, software: str) -> list[str]:
        factor, extra = self.config.search.max_length_factor, self.config.search.max_length_extra
        notes = ["", f"Kilolayer cuts a translation at {factor:g} x source length + {extra} tokens, as above."]
        if len(self.directions) > 1:
            tags = ", ".join(sorted({each.target for each in self.directions}))
            form = "`<2de>`, a separate token," if software == "CTranslate2" else "`>>de<<`"
            notes.append(f"The target language is given by {form} before the source; the model knows {tags}.")
        return notes

    def _limit(self, length: str) -> str:
        """The run's maximum output length, as an expression in the source length, end token included."""
        search = self.config.search
        return f"int({search.max_length_factor:g} * {length}) + {search.max_length_extra}"
