"""A folder that Transformers loads by its Auto classes: JSON and safetensors, written without importing it."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kilolayer.convert.huggingface.marian import POSITIONS
from kilolayer.convert.huggingface.opt import OPT
from kilolayer.convert.huggingface.weights import to_theirs
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.errors import InputError
from kilolayer.exporting.form import NoPlainForm, PlainForm, find_form
from kilolayer.exporting.generation import generation_config, special_tokens
from kilolayer.exporting.remote_class import remote_files
from kilolayer.exporting.source import Source
from kilolayer.exporting.text_tokenizer import text_files
from kilolayer.exporting.translator_tokenizer import marian_files
from kilolayer.layers.position import sinusoids
from kilolayer.tasks.causal_lm.config import CausalLMConfig
from kilolayer.tasks.causal_lm.task import CausalLMTask
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig
from kilolayer.tasks.translation.config import TranslationConfig


def huggingface_files(source: Source) -> tuple[str, str, dict[str, bytes]]:
    """The class that loads the model, why this one, and all files but the README: names and contents."""
    form = find_form(source.model, source.positions)
    if isinstance(form, NoPlainForm):
        own = isinstance(source.run.config, MaskedLMConfig | ClassifyConfig)
        return remote_files(source, form.why, None if own else tokenizer_files(source))
    files = {
        "config.json": _json(_config(source, form)),
        "generation_config.json": _json(generation_config(source)),
        "model.safetensors": save(_weights(source, form), metadata={"format": "pt"}),
        **tokenizer_files(source),
    }
    return form.foreign.architecture, form.why, files


def tokenizer_files(source: Source) -> dict[str, bytes]:
    """The vocabulary for `AutoTokenizer`."""
    run = source.run
    if isinstance(run.config, TranslationConfig):
        return marian_files(Tokenizers.load(run.folder), run.config)
    if isinstance(run.config, CausalLMConfig):
        return text_files(CausalLMTask.load_vocabulary(run.config, run.folder), run.config)
    raise InputError(
        f"the vocabulary of the task {run.config.task!r} has no form elsewhere",
        where=str(run.folder),
        fix="translation and causal_lm have one",
    )


def _config(source: Source, form: PlainForm) -> dict[str, Any]:
    return {
        **form.foreign.foreign_config(form.model.config),
        "max_position_embeddings": source.positions,
        **special_tokens(source),
        **({} if isinstance(form.foreign, OPT) else {"forced_eos_token_id": None}),
        "dtype": "float32",
    }


def _weights(source: Source, form: PlainForm) -> dict[str, Tensor]:
    found = to_theirs(form.foreign.entries(form.model.config), form.model.state_dict())
    if not isinstance(form.foreign, OPT):
        # The class can compute them, in another precision: with ours, the scores are closest.
        table = sinusoids(torch.arange(source.positions), form.model.config.dim, torch.float32)
        found |= {name: table.clone() for name in POSITIONS}
    return found


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=1) + "\n").encode()
