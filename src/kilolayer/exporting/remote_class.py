"""Export a model that no Transformers class computes: it is loaded by Kilolayer's own classes for Transformers.

They are in `kilolayer.auto_classes`. The Auto classes find them after `import kilolayer.auto_classes`, or by themselves with
`trust_remote_code=True`, through a small module in the exported folder.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import ModuleType

from safetensors.torch import save

from kilolayer import hints
from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.errors import InputError, OptionError
from kilolayer.exporting.card import transformers_use
from kilolayer.exporting.generation import generation_config, special_tokens
from kilolayer.exporting.source import Source
from kilolayer.files.reading import read_bytes
from kilolayer.models.config import ModelConfig
from kilolayer.moe.shard import refuse_part
from kilolayer.tasks.classify.config import ClassifyConfig
from kilolayer.tasks.masked_lm.config import MaskedLMConfig


def remote_files(source: Source, why: str, tokenizer: dict[str, bytes] | None) -> tuple[str, str, dict[str, bytes]]:
    """The class that loads the model, why this one, and the names and contents of all files but the README.

    why: the reason that no Transformers class fits.
    tokenizer: the vocabulary files; None to use Kilolayer's own tokenizer class.
    """
    refuse_part(source.model)
    classes, architecture = import_classes(), architecture_of(source.model.config)
    options = {**special_tokens(source), **source.labels, "architectures": [architecture], "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        classes.KilolayerConfig(source.model.config, **options).save_pretrained(folder)
        if tokenizer is None:
            _save_tokenizer(classes, source, Path(folder))
        files = {path.name: read_bytes(path, most=path.stat().st_size) for path in sorted(Path(folder).iterdir())}
    weights = {f"model.{name}": tensor for name, tensor in source.model.state_dict().items()}
    files |= {**(tokenizer or {}), "model.safetensors": save(weights, metadata={"format": "pt"})}
    if source.model.config.shape != "encoder":
        files["generation_config.json"] = (json.dumps(generation_config(source), indent=1) + "\n").encode()
    return architecture, f"no class of Transformers itself computes this model, because {why}", files


def remote_use(source: Source, out: Path) -> str:
    """Example code with the Auto classes, from raw text to raw text."""
    first = "import kilolayer.auto_classes  # the class of this model; or trust_remote_code=True below\n"
    return first + transformers_use(source, out)


def architecture_of(config: ModelConfig) -> str:
    """The name of the Kilolayer class for a model."""
    if config.shape == "encoder":
        return "KilolayerForMaskedLM" if config.head is None else "KilolayerForSequenceClassification"
    return "KilolayerForCausalLM" if config.shape == "decoder" else "KilolayerForSeq2SeqLM"


def import_classes() -> ModuleType:
    """Import Kilolayer's classes for Transformers; raises if Transformers is not installed."""
    try:
        from kilolayer import auto_classes
    except ImportError:
        raise OptionError(
            "exporting this model needs the package transformers",
            where=hints.argument("to"),
            fix="pip install 'kilolayer[export]'",
        ) from None
    return auto_classes


def _save_tokenizer(classes: ModuleType, source: Source, folder: Path) -> None:
    config = source.run.config
    assert isinstance(config, MaskedLMConfig | ClassifyConfig)
    if config.tokenizer.kind == "wordpiece":
        raise InputError(
            "a run with BERT's WordPiece vocabulary cannot be exported",
            where=str(source.run.folder),
            fix="use it in Kilolayer: kl.load(folder)",
        )
    load_vocabulary(source.run.folder, config.tokenizer).save(folder)
    masks, types = isinstance(config, MaskedLMConfig), (config.model.token_types or 1) > 1
    longest = config.text.length if isinstance(config, MaskedLMConfig) else config.examples.length
    classes.KilolayerTokenizer.in_folder(folder, masks=masks, types=types, model_max_length=longest).save_pretrained(folder)
