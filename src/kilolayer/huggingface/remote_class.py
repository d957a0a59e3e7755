"""Export a model that no Transformers class computes: it is loaded by Kilolayer's own classes for Transformers.

The exported folder holds them as one module, which needs only torch and Transformers and is loaded with
`trust_remote_code=True`. After `import kilolayer.huggingface.auto_classes`, the Auto classes take those of the package instead.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType

from safetensors.torch import save

from kilolayer import hints
from kilolayer.errors import OptionError
from kilolayer.files.reading import read_bytes
from kilolayer.huggingface.generation import generation_config, special_tokens
from kilolayer.huggingface.source import Source
from kilolayer.models.config import ModelConfig
from kilolayer.moe.shard import refuse_part


def remote_files(source: Source, why: str, tokenizer: dict[str, bytes]) -> tuple[str, str, dict[str, bytes]]:
    """The class that loads the model, why this one, and the names and contents of all files but the README.

    why: the reason that no Transformers class fits. tokenizer: the vocabulary's files.
    """
    refuse_part(source.model)
    if source.model.config.multiway is not None:
        raise OptionError(
            "the inputs of Transformers' classes do not say which positions are of which of the two modalities",
            where="model.multiway",
            fix="save the model by kl.save, and load it by kl.load_model",
        )
    classes, architecture = import_classes(), architecture_of(source.model.config)
    options = {**special_tokens(source), **source.labels, "architectures": [architecture], "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        classes.KilolayerConfig(source.model.config, **options).save_pretrained(folder)
        files = {path.name: read_bytes(path, most=path.stat().st_size) for path in sorted(Path(folder).iterdir())}
    weights = {f"model.{name}": tensor for name, tensor in source.model.state_dict().items()}
    files |= {**tokenizer, "model.safetensors": save(weights, metadata={"format": "pt"})}
    if source.model.config.shape != "encoder":
        files["generation_config.json"] = (json.dumps(generation_config(source), indent=1) + "\n").encode()
    return architecture, f"no class of Transformers itself computes this model, because {why}", files


def architecture_of(config: ModelConfig) -> str:
    """The name of the Kilolayer class for a model."""
    if config.shape == "encoder":
        without_head = "KilolayerModel" if config.vocab_size is None else "KilolayerForMaskedLM"
        return without_head if config.head is None else "KilolayerForSequenceClassification"
    return "KilolayerForCausalLM" if config.shape == "decoder" else "KilolayerForSeq2SeqLM"


def import_classes() -> ModuleType:
    """Import Kilolayer's classes for Transformers; raises if Transformers is not installed."""
    try:
        from kilolayer.huggingface import auto_classes
    except ImportError:
        raise OptionError(
            "exporting this model needs the package transformers",
            where=hints.argument("to"),
            fix="pip install 'kilolayer[export]'",
        ) from None
    return auto_classes
