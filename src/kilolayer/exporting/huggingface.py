"""Export to a folder that Transformers' Auto classes load: JSON and safetensors, written without importing Transformers."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kilolayer.convert.huggingface.marian import POSITIONS
from kilolayer.convert.huggingface.weights import to_theirs
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.data.word_pieces import WordPieceVocabulary
from kilolayer.exporting.form import NoPlainForm, PlainForm, find_form
from kilolayer.exporting.generation import generation_config, special_tokens
from kilolayer.exporting.remote_class import remote_files
from kilolayer.exporting.source import Source
from kilolayer.exporting.text_tokenizer import encoder_files, text_files
from kilolayer.exporting.translator_tokenizer import marian_files
from kilolayer.exporting.word_tokenizer import word_files
from kilolayer.layers.position import sinusoids
from kilolayer.tasks.causal_lm.config import CausalLMConfig
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.translation.config import TranslationConfig


def huggingface_files(source: Source) -> tuple[str, str, dict[str, bytes]]:
    """The class that loads the model, why this one, and the names and contents of all files but the README."""
    form = find_form(source.model, source.positions, word_pieces=source.word_pieces)
    if isinstance(form, NoPlainForm):
        return remote_files(source, form.why, tokenizer_files(source))
    config = _config(source, form)
    files = {
        "config.json": _json(config),
        "model.safetensors": save(_weights(source, form), metadata={"format": "pt"}),
        **tokenizer_files(source, form.left_out),
    }
    if form.model.config.shape != "encoder":
        files["generation_config.json"] = _json(generation_config(source, form.left_out))
    return config["architectures"][0], form.why, files


def tokenizer_files(source: Source, left_out: int = 0) -> dict[str, bytes]:
    """The vocabulary for `AutoTokenizer`. left_out: number of first ids dropped."""
    run, config = source.run, source.run.config
    if isinstance(config, TranslationConfig):
        return marian_files(Tokenizers.load(run.folder), config, left_out)
    assert isinstance(config, CausalLMConfig | MaskedLMConfig | ClassifyConfig)
    vocabulary = load_vocabulary(run.folder, config.tokenizer)
    if isinstance(config, CausalLMConfig):
        return text_files(vocabulary, config, left_out)
    return word_files(vocabulary, config) if isinstance(vocabulary, WordPieceVocabulary) else encoder_files(vocabulary, config)


def _config(source: Source, form: PlainForm) -> dict[str, Any]:
    seq2seq = form.model.config.shape == "encoder_decoder"
    return {
        **form.foreign.foreign_config(form.model.config),
        **special_tokens(source, form.left_out),
        **({"max_position_embeddings": source.positions, "forced_eos_token_id": None} if seq2seq else {}),
        **source.labels,
        "dtype": "float32",
    }


def _weights(source: Source, form: PlainForm) -> dict[str, Tensor]:
    found = to_theirs(form.foreign.entries(form.model.config), form.model.state_dict())
    if form.model.config.shape == "encoder_decoder":
        # The class could compute the sinusoids itself, but at another precision; storing ours keeps the scores closest.
        table = sinusoids(torch.arange(source.positions), form.model.config.dim, torch.float32)
        found |= {name: table.clone() for name in POSITIONS}
    return found


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=1) + "\n").encode()
