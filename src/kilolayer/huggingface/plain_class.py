"""Export to a folder that Transformers' Auto classes load: JSON and safetensors, written without importing Transformers."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kilolayer.errors import InputError
from kilolayer.huggingface.form import NoPlainForm, PlainForm, find_form
from kilolayer.huggingface.generation import generation_config, special_tokens
from kilolayer.huggingface.marian import POSITIONS
from kilolayer.huggingface.remote_class import remote_files
from kilolayer.huggingface.source import Source
from kilolayer.huggingface.weights import to_theirs
from kilolayer.layers.position import sinusoids
from kilolayer.models.config import ModelConfig
from kilolayer.models.image_input import ImageInput

BICUBIC = 3
"""Pillow's number of the filter."""


def huggingface_files(source: Source) -> tuple[str, str, dict[str, bytes]]:
    """The class that loads the model, why this one, and the names and contents of all files but the README."""
    form = find_form(source.model, source.positions, word_pieces=source.task.word_pieces)
    image = source.model.config.image
    if isinstance(form, NoPlainForm) and image is not None:
        raise InputError(
            f"no class of Transformers computes this model, because {form.why}",
            where=str(source.folder),
            fix=_instead(source.model.config),
        )
    if isinstance(form, NoPlainForm):
        return remote_files(source, form.why, source.task.tokenizer_files())
    config = _config(source, form)
    files = {
        "config.json": _json(config),
        "model.safetensors": save(_weights(source, form), metadata={"format": "pt"}),
        **source.task.tokenizer_files(form.left_out),
    }
    if image is not None:
        files["preprocessor_config.json"] = _json(image_processor(image))
    if form.model.config.shape != "encoder":
        files["generation_config.json"] = _json(generation_config(source, form.left_out))
    return config["architectures"][0], form.why, files


def _instead(config: ModelConfig) -> str:
    """What to do with an image model that is not exported."""
    if config.map_head is not None:
        return "use it where Kilolayer is installed: kl.load(folder).segment(images)"
    if config.patch_decoder is not None:
        return "export an image classifier that starts from it (train.start_from), or use it by kl.load(folder)"
    return "use it by kl.load(folder); a model that is exported has a Pre-LN recipe, a class token and learned positions"


def _config(source: Source, form: PlainForm) -> dict[str, Any]:
    seq2seq = form.model.config.shape == "encoder_decoder"
    sized = form.model.config.max_length is None and form.model.config.image is None
    return {
        **form.foreign.foreign_config(form.model.config),
        **special_tokens(source, form.left_out),
        **({"max_position_embeddings": source.positions} if sized else {}),
        **({"forced_eos_token_id": None} if seq2seq else {}),
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


def image_processor(image: ImageInput) -> dict[str, Any]:
    """What Transformers' image processor does before the model: scale, crop, and normalize pixels to -1 to 1.

    None of its classes can scale by the shorter side to a size that is not square: images are then stretched.
    """
    height, width = image.sides
    half = [0.5] * image.channels
    cropped = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    size = {"size": {"shortest_edge": height}, **cropped} if height == width else {"size": {"height": height, "width": width}}
    return {
        "image_processor_type": "CLIPImageProcessor" if height == width else "ViTImageProcessor",
        "do_convert_rgb": image.channels == 3,
        "do_resize": True,
        **size,
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": half,
        "image_std": half,
    }


def _json(table: dict[str, Any]) -> bytes:
    return (json.dumps(table, indent=1) + "\n").encode()
