"""Load Transformers checkpoints as Kilolayer models, without Transformers: BERT, GPT-2, Marian, OPT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kilolayer.convert.adapt.pretrained import ENTRY
from kilolayer.convert.huggingface.bert import Bert
from kilolayer.convert.huggingface.folder import CONFIG, read_config, read_tensors
from kilolayer.convert.huggingface.foreign_class import ForeignClass
from kilolayer.convert.huggingface.gpt2 import GPT2
from kilolayer.convert.huggingface.marian import Marian
from kilolayer.convert.huggingface.opt import OPT
from kilolayer.convert.huggingface.weights import to_ours
from kilolayer.errors import InputError, OptionError, shown
from kilolayer.files.paths import as_path
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder import Encoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.place import check_dtype, check_place

FORMS: dict[str, ForeignClass] = {form.model_type: form for form in (Bert(), GPT2(), Marian(), OPT())}
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
        for name in self.theirs.get("architectures") or ():
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
        for name, tensor in read_tensors(self.folder).items():
            for old, new in OLD_NAMES.items():
                name = f"{name.removesuffix(old)}{new}" if name.endswith(old) else name
            whole = name.startswith((self.form.prefix, *self.form.outputs))
            found[name if whole else f"{self.form.prefix}{name}"] = tensor
        return found

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of the equivalent Kilolayer model."""
        try:
            options = {**self.form.own_options(self.theirs), **self.form.options_of_weights(self.tensors)}
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
            found = to_ours(entries, kept, copies=self.form.copies(self.config))
        except InputError as error:
            raise error.at(str(self.folder)) from None
        return self._checked(found)

    def spare_weights(self) -> dict[str, Tensor]:
        """Weights that the model has no place for but another can use: BERT's pooler, as the first matrix of a head."""
        entries = [
            entry for entry in self.form.spare_entries(self.config) if all(name in self.tensors for name in entry.theirs)
        ]
        return {entry.ours: entry.to_ours([self.tensors[name] for name in entry.theirs]) for entry in entries}

    def _checked(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in build_model(self.config, device="meta", seed=0).state_dict().items():
            if weights[name].shape != tensor.shape:
                raise InputError(
                    f"{name} has the shape {list(weights[name].shape)} in the weights and {list(tensor.shape)} by {CONFIG}",
                    where=str(self.folder),
                    fix="the two files do not belong together: download both again",
                )
        return weights


def from_huggingface(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Encoder | Decoder | EncoderDecoder:
    """Load the model in a folder written by Transformers' `save_pretrained` as a Kilolayer model, in evaluation mode.

    Supports BERT (the base model, with the masked-language-model head, or with a classifier), GPT-2, Marian and OPT, from
    safetensors. Nothing is unpickled or downloaded, and Transformers is not needed. Token ids are those of the folder's own
    tokenizer.
    """
    place = check_place(device)
    check_dtype(dtype)
    imported = Imported.open(as_path(folder, "the folder of the model"))
    model = build_model(imported.config, device="meta", seed=0)
    # Assigned, not copied, so that no time is spent on initializing weights that are loaded.
    model.load_state_dict({name: weight.to(place, dtype) for name, weight in imported.weights().items()}, assign=True)
    return model.eval()
