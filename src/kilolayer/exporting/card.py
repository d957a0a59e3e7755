"""The README.md of an exported folder: what the model is, its scores, and example code."""

from __future__ import annotations

from pathlib import Path

from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.data.word_pieces import MASK as WORD_MASK
from kilolayer.exporting.source import Source
from kilolayer.exporting.translator_tokenizer import marian_tag
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.fill import MASK
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.registry import score_digits
from kilolayer.tasks.results import VALIDATION
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.version import VERSION


def card(source: Source, name: str, why: str, use: str) -> str:
    """The text of the README. name: of the class, or the software. why: the reason for it. use: Python code, run in the
    parent folder."""
    config = source.run.config.model
    is_ours = name.startswith("Kilolayer")
    unfinished = "" if source.finished else " The run is not finished."
    title = source.run.registration.title
    what = f"{config.depths.title}, {config.widths}, recipe {config.recipe.title}. Weights of {source.weights}.{unfinished}"
    lines = [
        f"# {source.run.folder.resolve().name}",
        "",
        f"{title[:1].upper()}{title[1:]} trained by Kilolayer {VERSION}: {what}",
        f"For {name}: {why}.",
        *(["It is loaded with `trust_remote_code=True`, or after `import kilolayer.auto_classes`."] if is_ours else []),
        "",
        *_scores(source),
        "```python",
        use,
        "```",
        *_notes(source, name),
    ]
    return "\n".join(lines) + "\n"


def transformers_use(source: Source, out: Path) -> str:
    """Example code with the Auto classes, from raw text to raw text."""
    config, folder = source.run.config, out.name
    if isinstance(config, MaskedLMConfig | ClassifyConfig):
        mask = WORD_MASK if source.word_pieces else MASK
        pipelines = {"masked_lm": ("fill-mask", f"A {mask} text."), "classify": ("text-classification", "A text.")}
        task, text = pipelines[config.task]
        return f'from transformers import pipeline\n\nprint(pipeline("{task}", "{folder}")("{text}"))'
    if not isinstance(config, TranslationConfig):
        return (
            "from transformers import pipeline\n\n"
            f'write = pipeline("text-generation", "{folder}")\n'
            'print(write("A text that goes on")[0]["generated_text"])'
        )
    tag = f"{marian_tag(_target(config))} " if len(config.data.directions) > 1 else ""
    return (
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
        f'tokenizer, model = AutoTokenizer.from_pretrained("{folder}"), AutoModelForSeq2SeqLM.from_pretrained("{folder}")\n'
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


def _scores(source: Source) -> list[str]:
    main = source.run.registration.headline
    rows = [
        f"- {part}: {score['name']} {score['value']:.{score.get('digits', score_digits(key, main))}f} (`{score['signature']}`)"
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
