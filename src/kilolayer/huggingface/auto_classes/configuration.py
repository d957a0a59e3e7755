"""The configuration of a Kilolayer model, as Transformers stores it in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from kilolayer.config import build, table_of
from kilolayer.huggingface.auto_classes.module_file import write_module
from kilolayer.models.config import ModelConfig

CLASSES: dict[str, dict[str, str]] = {
    "encoder_decoder": {"AutoModelForSeq2SeqLM": "KilolayerForSeq2SeqLM"},
    "decoder": {"AutoModelForCausalLM": "KilolayerForCausalLM"},
    "encoder": {
        "AutoModelForMaskedLM": "KilolayerForMaskedLM",
        "AutoModelForSequenceClassification": "KilolayerForSequenceClassification",
    },
}
"""By shape: the Auto classes that support it, and the class that each of them resolves to."""
MODULE = "modeling_kilolayer"
"""The name of the module that is saved next to a model."""


class KilolayerConfig(PreTrainedConfig):
    """The [model] table of a configuration, and what Transformers needs besides.

    model: a table as in `kilolayer.ModelConfig` and TOML, from which the sizes that Transformers asks for are read.
    pad_token_id and so on: the special tokens of the vocabulary that the model was trained with.
    """

    model_type: ClassVar[str] = "kilolayer"

    def __init__(
        self,
        model: Mapping[str, Any] | ModelConfig | None = None,
        *,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        use_cache: bool = True,
        **others: Any,
    ) -> None:
        given = model if isinstance(model, ModelConfig) else build(ModelConfig, model or {}, "model")
        self.model = table_of(given)
        self.pad_token_id = given.pad_id if pad_token_id is None else pad_token_id
        self.bos_token_id, self.eos_token_id = bos_token_id, eos_token_id
        self.decoder_start_token_id, self.use_cache = decoder_start_token_id, use_cache
        others["is_encoder_decoder"] = given.shape == "encoder_decoder"
        if given.head is not None and others.get("id2label") is None:
            others.setdefault("num_labels", given.head.outputs)
        if given.head is not None and given.head.outputs == 1:
            others.setdefault("problem_type", "regression")
        super().__init__(**others)

    @property
    def model_config(self) -> ModelConfig:
        """The table as a `ModelConfig`."""
        return build(ModelConfig, self.model, "model")

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table; None for an encoder that reads only embeddings."""
        return self.model_config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.model_config.dim

    @property
    def num_attention_heads(self) -> int:
        """Heads of each attention."""
        return self.model_config.heads

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder, which the key-value cache needs; of an encoder, its own."""
        depths = self.model_config.depths
        return depths.decoder or depths.encoder

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **others: Any) -> None:
        """Write config.json, and the module that `trust_remote_code=True` loads."""
        found = {"AutoConfig": type(self).__name__, "AutoModel": "KilolayerModel", **CLASSES[self.model_config.shape]}
        self.auto_map = {auto: f"{MODULE}.{name}" for auto, name in found.items()}
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_module(Path(save_directory), f"{MODULE}.py", type(self.model_config.recipe), self.model_config.norm)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **others)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` names the class and writes the module that defines it."""
