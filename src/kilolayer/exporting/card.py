"""The README.md of an exported folder: what the model is, its scores, and example code."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.data.word_pieces import MASK as WORD_MASK
from kilolayer.exporting.source import Source
from kilolayer.exporting.translator_tokenizer import marian_tag
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.fill import MASK
from kilolayer.report.scores_section import show_score
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.results import VALIDATION
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.version import VERSION

PIPELINES = {
    "translation": "translation",
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "classify": "text-classification",
}
"""The Hugging Face Hub's names of what each task's models do."""
TRUST = "trust_remote_code=True"
TRUSTED = f"Loading needs `{TRUST}`: the class is in a file of this folder, which needs only torch and Transformers."
CODE = re.compile("[a-z]{2,3}")
"""The codes of languages that the Hugging Face Hub knows."""


def card(source: Source, name: str, why: str, use: str) -> str:
    """The text of the README. name: of the class, or the software. why: the reason for it. use: Python code, run in the
    parent folder."""
    config = source.run.config.model
    unfinished = "" if source.finished else " The run is not finished."
    title = source.run.registration.title
    what = f"{config.depths.title}, {config.widths}, recipe {config.recipe.title}. Weights of {source.weights}.{unfinished}"
    lines = [
        *_header(source, name),
        f"# {source.run.folder.resolve().name}",
        "",
        f"{title[:1].upper()}{title[1:]} trained by Kilolayer {VERSION}: {what}",
        f"For {name}: {why}.",
        *([TRUSTED] if TRUST in use else []),
        "",
        *_scores(source),
        "```python",
        use,
        "```",
        *_notes(source, name),
    ]
    return "\n".join(lines) + "\n"


def transformers_use(source: Source, out: Path, *, trust: bool = False) -> str:
    """Example code with the Auto classes, from raw text to raw text. trust: whether the folder has code of its own."""
    config, trusted = source.run.config, f", {TRUST}" if trust else ""
    folder, task = f'"{out.name}"', PIPELINES[config.task]
    if isinstance(config, MaskedLMConfig | ClassifyConfig):
        mask = WORD_MASK if source.word_pieces else MASK
        text = f"A {mask} text." if isinstance(config, MaskedLMConfig) else "A text."
        return f'from transformers import pipeline\n\nprint(pipeline("{task}", {folder}{trusted})("{text}"))'
    if not isinstance(config, TranslationConfig):
        return (
            "from transformers import pipeline\n\n"
            f'write = pipeline("{task}", {folder}{trusted})\n'
            'print(write("A text that goes on")[0]["generated_text"])'
        )
    tag = f"{marian_tag(_target(config))} " if len(config.data.directions) > 1 else ""
    return (
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({folder}{trusted})\n"
        f"model = AutoModelForSeq2SeqLM.from_pretrained({folder}{trusted})\n"
        f'batch = tokenizer(["{tag}A sentence."], return_tensors="pt", padding=True)\n'
        f"found = model.generate(**batch, max_new_tokens={_limit(config.search, 'batch.input_ids.shape[1]')})\n"
        "print(tokenizer.batch_decode(found, skip_special_tokens=True))"
    )


def ctranslate2_use(source: Source, out: Path) -> str:
    """Example code for CTranslate2."""
    config, folder = source.run.config, out.name
    assert isinstance(config, TranslationConfig)
    tag = f'["<2{_target(config)}>"] + ' if len(config.data.directions) > 1 else ""
    shared = Tokenizers.load(source.run.folder).shared
    reader = f'sentencepiece.SentencePieceProcessor("{folder}/tokenizer.model")'
    writer = "pieces" if shared else f'sentencepiece.SentencePieceProcessor("{folder}/tokenizer.target.model")'
    beam = config.search.width if config.search.method == "beam" else 1
    penalty = 1.0 if config.search.length_penalty is None else config.search.length_penalty
    return (
        "import ctranslate2, sentencepiece\n\n"
        f'pieces, translator = {reader}, ctranslate2.Translator("{folder}")\n'
        f'source = {tag}pieces.encode("A sentence.", out_type=str)\n'
        f"found = translator.translate_batch([source], beam_size={beam}, length_penalty={penalty:g}, "
        f"max_decoding_length={_limit(config.search, '(len(source) + 1)')})\n"
        f"print({writer}.decode(found[0].hypotheses[0]))"
    )


def _limit(search: SearchConfig, length: str) -> str:
    """The run's maximum output length, as an expression in the source length, end token included."""
    return f"int({search.max_length_factor:g} * {length}) + {search.max_length_extra}"


def _target(config: TranslationConfig) -> str:
    return Direction.parse(config.data.directions[0]).target


def _header(source: Source, name: str) -> list[str]:
    """What the Hugging Face Hub reads: YAML, in which JSON's lists and texts are valid."""
    config = source.run.config
    header = {
        "library_name": "ctranslate2" if name == "CTranslate2" else "transformers",
        "pipeline_tag": PIPELINES[config.task],
        "tags": ["kilolayer", config.model.recipe.name],
    }
    if isinstance(config, TranslationConfig):
        pairs = [Direction.parse(each) for each in config.data.directions]
        header["language"] = sorted({each for pair in pairs for each in (pair.source, pair.target) if CODE.fullmatch(each)})
    return ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", ""]


def _scores(source: Source) -> list[str]:
    main = source.run.registration.headline
    rows = [
        f"- {part}: {score['name']} {show_score(key, score, main)} (`{score['signature']}`)"
        for part, table in source.scores.items()
        if part.startswith("test") or part == VALIDATION
        for key, score in table.items()
        if "value" in score
    ]
    return [*rows, ""] if rows else []


def _notes(source: Source, name: str) -> list[str]:
    config = source.run.config
    if not isinstance(config, TranslationConfig):
        return []
    factor, extra = config.search.max_length_factor, config.search.max_length_extra
    notes = ["", f"Kilolayer cuts a translation at {factor:g} x source length + {extra} tokens, as above."]
    if len(config.data.directions) > 1:
        tags = ", ".join(sorted({Direction.parse(each).target for each in config.data.directions}))
        form = "`<2de>`, a separate token," if name == "CTranslate2" else "`>>de<<`"
        notes.append(f"The target language is given by {form} before the source; the model knows {tags}.")
    return notes
