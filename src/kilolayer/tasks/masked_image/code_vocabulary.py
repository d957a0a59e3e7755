"""The tokenizer whose codes a run predicts: its vocabulary, of which the run folder keeps a copy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kilolayer import config as configuration
from kilolayer.errors import InputError, OptionError
from kilolayer.files.tensors import load_tensors, serialize
from kilolayer.files.writing import write
from kilolayer.models.build import build_model
from kilolayer.models.fit import expected_weights, find_misfit
from kilolayer.models.image_tokenizer import ImageTokenizer
from kilolayer.models.image_tokenizer_config import ImageTokenizerConfig
from kilolayer.runs.run import Run

CONFIG, WEIGHTS = "tokenizer.toml", "tokenizer.safetensors"
FIX = "restore the run's own tokenizer files"


class CodeVocabulary:
    """A trained image tokenizer that does not change any more."""

    def __init__(self, model: ImageTokenizer) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.config = model.config
        self.digest = _digest(model)

    @classmethod
    def of_run(cls, folder: Path) -> CodeVocabulary:
        """The tokenizer that a run of the task `image_tokenizer` has trained."""
        try:
            model = Run.open(folder, ["image_tokenizer"]).load_model(torch.device("cpu"))
        except InputError as error:
            raise error.at("target.tokenizer") from None
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> CodeVocabulary:
        """The copy in a run folder."""
        try:
            table = configuration.load(folder / CONFIG)
            config = configuration.build(ImageTokenizerConfig, table.get("model", {}), "model")
        except OptionError as error:
            raise InputError(error.what, where=str(folder / CONFIG), fix=FIX) from None
        model = build_model(config, device="cpu", seed=0)
        assert isinstance(model, ImageTokenizer)

        def check(outline: Mapping[str, Tensor]) -> None:
            if misfit := find_misfit(model.state_dict(), outline):
                raise InputError(f"the weights do not fit {CONFIG}: {misfit}", where=str(folder / WEIGHTS), fix=FIX)

        model.load_state_dict(load_tensors(folder / WEIGHTS, expected=expected_weights(config), check=check, fix=FIX))
        return cls(model)

    def save(self, folder: Path) -> None:
        """Write tokenizer.toml, the table [model], and tokenizer.safetensors, the weights and codes."""
        write(folder / CONFIG, configuration.dump({"model": configuration.table_of(self.config)}))
        write(folder / WEIGHTS, b"".join(serialize(self.model.state_dict())))

    def encode(self, images: Tensor) -> Tensor:
        """The codes of images [batch, channels, height, width], from -1 to 1: int64 [batch, patches], on their device."""
        return self.model.to(images.device).encode(images)

    def decode(self, codes: Tensor) -> Tensor:
        """The images of codes, int64 [batch, patches]: fp32 [batch, channels, height, width], from -1 to 1."""
        return self.model.to(codes.device).decode(codes)


def _digest(model: ImageTokenizer) -> str:
    """A hash of the configuration and all tensors."""
    found = hashlib.sha256(json.dumps(configuration.table_of(model.config), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
