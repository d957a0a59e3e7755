"""Pre-LN translation models as `PegasusForConditionalGeneration`: sinusoidal positions, a shared table, final norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from kilolayer import recipes
from kilolayer.huggingface.foreign_class import ForeignClass, is_plain, shared_misfits
from kilolayer.huggingface.marian import SEQ2SEQ_OPTIONS, seq2seq_entries
from kilolayer.huggingface.weights import Entry, norm
from kilolayer.models.config import ModelConfig
from kilolayer.recipes.base import NORM, Plan


class Pegasus(ForeignClass):
    """x + f(LN(x)) in every sublayer, with a final LN."""

    model_type: ClassVar[str] = "pegasus"
    architecture: ClassVar[str] = "PegasusForConditionalGeneration"
    options: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **SEQ2SEQ_OPTIONS,
        "vocab_size": ("vocab_size",),
        "encoder_layers": ("encoder_layers",),
        "decoder_layers": ("decoder_layers",),
    }

    def misfits(self, config: ModelConfig) -> Iterator[str]:
        if config.shape != "encoder_decoder":
            yield "it is no encoder-decoder"
        if not is_plain(config, Plan(pre_norm=NORM)):
            yield f"its layers are not plain Pre-LN: {config.recipe.equation}"
        if config.final_norm is False:
            yield "it has no final norm"
        if config.positions != "sinusoidal":
            yield f"its positions are {config.positions}, and Pegasus's are sinusoidal"
        if config.tie_embeddings is not True:
            yield "source, target and output do not share one table, and Pegasus's do"
        if config.pad_id is None:
            yield "it has no padding token"
        if config.output_bias:
            yield "it has an output bias"
        yield from shared_misfits(config)

    def foreign_config(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **super().foreign_config(config),
            "encoder_layers": config.depths.encoder,
            "decoder_layers": config.depths.decoder,
            "tie_word_embeddings": True,
            "is_encoder_decoder": True,
        }

    def own_options(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "scale_embeddings": False,
            **super().own_options(theirs),
            "shape": "encoder_decoder",
            "recipe": recipes.PLAIN_PRE,
        }

    def entries(self, config: ModelConfig) -> list[Entry]:
        tops = [entry for side in ("encoder", "decoder") for entry in norm(f"{side}.top_norm", f"model.{side}.layer_norm")]
        return [Entry("embedding.weight", ("model.shared.weight",)), *seq2seq_entries(config, "pre_norm"), *tops]

    def copies(self, config: ModelConfig) -> dict[str, str]:
        names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
        return dict.fromkeys(names, "model.shared.weight")
