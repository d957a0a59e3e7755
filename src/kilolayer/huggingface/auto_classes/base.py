"""The base class of Kilolayer's classes for Transformers: the wrapped model, its initialization, and padding."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kilolayer.errors import InputError, OptionError
from kilolayer.huggingface.auto_classes.borrowed_cache import Kept, new_cache
from kilolayer.huggingface.auto_classes.configuration import KilolayerConfig
from kilolayer.layers.context import Sequences
from kilolayer.layers.initialize import KeyedGenerator, reset
from kilolayer.models.build import build_model
from kilolayer.models.config import ModelConfig, Shape
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.models.model import Model
from kilolayer.moe.shard import refuse_part

Output = TypeVar("Output")

IGNORED = -100
"""The label value that Transformers ignores in a loss."""


class KilolayerPreTrainedModel(PreTrainedModel):
    """Wraps a Kilolayer model as `model`; its weights keep their names below that prefix."""

    config_class = KilolayerConfig
    config: KilolayerConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    # Kilolayer also keeps these in fp32 when a model is converted to a lower precision.
    _keep_in_fp32_modules_strict = {"router", "head"}  # noqa: RUF012

    shapes: ClassVar[tuple[Shape, ...]] = ("encoder", "decoder", "encoder_decoder")
    """The shapes of the models that the class can wrap."""

    def __init__(self, config: KilolayerConfig) -> None:
        super().__init__(config)
        self.model = build_model(self.model_config(config))
        self._names = {module: name for name, module in self.model.named_modules()}
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            for module in self._names:
                module._is_hf_initialized = True  # pyright: ignore[reportArgumentType]
        self.post_init()

    @classmethod
    def model_config(cls, config: KilolayerConfig) -> ModelConfig:
        """The configuration of the wrapped model; raises if it has another shape."""
        found = config.model_config
        if found.image is not None:
            raise OptionError(
                f"{cls.__name__} reads text, and this model images",
                fix="use it by kl.load_model; kl.export writes image encoders that ViT or BEiT compute",
            )
        if found.shape not in cls.shapes:
            raise OptionError(
                f"{cls.__name__} does not support a model of the shape {found.shape!r}",
                fix=f"allowed: {', '.join(cls.shapes)}",
            )
        return found

    @classmethod
    def from_kilolayer(cls, model: Model, **options: Any) -> Self:
        """Wrap a Kilolayer model, sharing its weights. options: those of `KilolayerConfig`."""
        refuse_part(model)
        with torch.device("meta"):
            made = cls(KilolayerConfig(model.config, **options))
        made.model = cast("Any", model)
        made._names = {module: name for name, module in model.named_modules()}
        made.train(model.training)
        return made

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize what no file provided: new heads, and buffers that are not saved. Loaded weights are left unchanged."""
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        loaded = [(tensor, tensor.clone()) for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
        reset(module, KeyedGenerator(self.model.seed, self._names[module]))
        for tensor, value in loaded:
            tensor.copy_(value)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding table of the input tokens: the encoder's, if there is one."""
        table = self.model.source_embedding if isinstance(self.model, EncoderDecoder) else None
        table = self.model.embedding if table is None else table
        if table is None:
            raise InputError("this model has no vocabulary", fix="give inputs_embeds")
        return table

    def kept(self, past_key_values: Kept | None, use_cache: bool | None) -> Kept | None:
        """The cache of a forward pass: the given one, or a new one if wanted; by default none in training."""
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return new_cache(crossed=self.config.is_encoder_decoder) if past_key_values is None and wanted else past_key_values

    def requested_outputs(self, output_hidden_states: bool | None, output_attentions: bool | None) -> dict[str, bool]:
        """Whether the wrapped model returns the states and attention weights of all layers; by default, as configured."""
        states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        weights = self.config.output_attentions if output_attentions is None else output_attentions
        return {"hidden_states": bool(states), "attention_weights": bool(weights)}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: `KilolayerConfig.save_pretrained` names the class and writes the module that defines it."""


def read(table: nn.Module | None, ids: Tensor | None, embeddings: Tensor | None, real: Tensor | None) -> Sequences:
    """Token ids, int64 [batch, length], or embeddings [batch, length, dim], in the form that a stack takes.

    real: bool [batch, length], False at padding; None if the ids determine it, or nothing is padding.
    """
    if (ids is None) == (embeddings is None):
        raise InputError("give either token ids or embeddings")
    if ids is None:
        assert embeddings is not None
        return Sequences(embeddings, real)
    assert table is not None
    pad_id = cast("int | None", table.pad_id)
    return Sequences(table(ids), ids != pad_id if real is None and pad_id is not None else real)


def output(kind: type[Output], **values: Any) -> Output:
    """Build a Transformers output, whose fields are annotated with a legacy tensor type."""
    return kind(**values)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of logits [batch, length, vocabulary] at labels int64 [batch, length] that are not `IGNORED`."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)
