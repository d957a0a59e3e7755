"""Load Transformers checkpoints as Kilolayer models, without Transformers: BEiT, BERT, GPT-2, Marian, OPT, Qwen3, ViT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.huggingface.beit import Beit
from kilolayer.huggingface.bert import Bert
from kilolayer.huggingface.foreign_class import ForeignClass
from kilolayer.huggingface.gpt2 import GPT2
from kilolayer.huggingface.marian import Marian
from kilolayer.huggingface.opt import OPT
from kilolayer.huggingface.qwen3 import Qwen3
from kilolayer.huggingface.vit import ViT
from kilolayer.huggingface.weights import check_tensors, to_ours, to_theirs, under_own_name
from kilolayer.models.adapt.pretrained import ENTRY
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.device import check_device, check_dtype
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.fit import expected_weights
from kilolayer.models.pretrained_folder import CONFIG, read_config, read_tensors

FORMS: dict[str, ForeignClass] = {form.model_type: form for form in (Beit(), Bert(), GPT2(), Marian(), OPT(), Qwen3(), ViT())}
# Old parameter names, in checkpoints converted from TensorFlow.
OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}


@dataclass(frozen=True)
class Imported:
    """A Hugging Face folder: its config.json, and its weights, read when first used."""

    folder: Path
    theirs: Mapping[str, Any]
    form: ForeignClass

    @classmethod
    def open(cls, folder: Path) -> Imported:
        """Read config.json; raises if the model is not supported."""
        theirs = read_config(folder)
        kind = theirs.get("model_type")
        if not isinstance(kind, str) or kind not in FORMS:
            raise InputError(
                f"the model type is {shown(kind)}", where=str(folder / CONFIG), fix=f"known: {', '.join(sorted(FORMS))}"
            )
        form = FORMS[kind]
        found = cls(folder, {**form.defaults, **theirs}, form)
        found._check()
        if theirs.get("architectures") == [form.readable[-1]]:  # a base model has no output that could be untied
            return cls(folder, {**found.theirs, "tie_word_embeddings": True}, form)
        return found

    def _check(self) -> None:
        where = str(self.folder / CONFIG)
        entry = self.theirs.get(ENTRY)
        if isinstance(entry, dict) and not entry.get("plain"):
            raise InputError(
                "this model was saved with a recipe, without which its weights are another function",
                where=where,
                fix="load it with kl.load_model; to import it, call kl.bake on that model and save it again",
            )
        for name, value in self.form.required.items():
            if self.theirs.get(name, value) != value:
                raise InputError(f"{name} is {shown(self.theirs[name])}", where=where, fix=f"only {shown(value)} is supported")
        architectures = self.theirs.get("architectures") or []
        for name in architectures if isinstance(architectures, list) else [architectures]:
            if name not in self.form.readable:
                raise InputError(
                    f"the architecture is {shown(name)}",
                    where=where,
                    fix=f"known: {', '.join(self.form.readable)}; or save only its base model: "
                    "model.base_model.save_pretrained(folder)",
                )

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The weights under Transformers' names, with the prefix of the class with an output."""
        found = {}
        for name, tensor in read_tensors(self.folder, expected_weights(self._config(None))).items():
            for old, new in OLD_NAMES.items():
                name = f"{name.removesuffix(old)}{new}" if name.endswith(old) else name
            whole = name.startswith((self.form.prefix, *self.form.outputs))
            found[name if whole else f"{self.form.prefix}{name}"] = tensor
        return found

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of the equivalent Kilolayer model."""
        return self._config(self.tensors)

    def _config(self, tensors: Mapping[str, Tensor] | None) -> ModelConfig:
        """The configuration that config.json specifies; tensors: with what these determine besides."""
        try:
            options = self.form.own_options(self.theirs)
            if tensors is not None:
                options |= self.form.options_of_weights(tensors, self.theirs)
            return ModelConfig.of(options["shape"], options)
        except (InputError, OptionError) as error:
            raise error.at(str(self.folder / CONFIG)) from None
        except (TypeError, KeyError):
            raise InputError(
                "a value is missing, or has the wrong type", where=str(self.folder / CONFIG), fix="correct the file"
            ) from None

    def weights(self) -> dict[str, Tensor]:
        """The weights of that model under Kilolayer's names."""
        entries = self.form.entries(self.config)
        wanted = {name for entry in entries for name in entry.theirs}
        kept = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name in wanted or re.fullmatch(self.form.unread, name) is None
        }
        try:
            found = under_own_name(entries, kept, copies=self.form.copies(self.config))
            # Built only now that each of its layers is known to have tensors.
            check_tensors(found, to_theirs(entries, build_model(self.config, device="meta", seed=0).state_dict()))
        except InputError as error:
            raise error.at(str(self.folder)) from None
        return to_ours(entries, found)

    def spare_weights(self) -> dict[str, Tensor]:
        """Weights that the model has no parameter for but another can use: BERT's pooler, as the first matrix of a head."""
        entries = [
            entry for entry in self.form.spare_entries(self.config) if all(name in self.tensors for name in entry.theirs)
        ]
        return to_ours(entries, self.tensors)


def from_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Encoder | Decoder | EncoderDecoder:
    """Load the model in a folder written by Transformers' `save_pretrained` as a Kilolayer model, in evaluation mode.

    Supports BERT (the base model, with the masked-language-model head, or with a classifier), GPT-2, Marian, OPT, Qwen3, ViT
    (the base model, or with a classifier) and BEiT without relative position bias (also with visual tokens), from safetensors.
    Nothing is unpickled or downloaded, and Transformers is not needed. Token ids are those of the folder's own tokenizer;
    pixels are normalized as its image processor does.
    """
    target = check_device(device)
    check_dtype(dtype)
    imported = Imported.open(as_path(folder, "the folder of the model"))
    model = build_model(imported.config, device="meta", seed=0)
    # Assigned, not copied, so that no time is spent on initializing weights that are loaded.
    model.load_state_dict({name: weight.to(target, dtype) for name, weight in imported.weights().items()}, assign=True)
    return model.eval()
