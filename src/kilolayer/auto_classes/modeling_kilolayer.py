"""The classes that load this folder, from the package that they are in.

Hugging Face Transformers reads this file with `trust_remote_code=True`; Kilolayer must be installed: pip install kilolayer.
"""

from kilolayer.auto_classes import (
    KilolayerConfig,
    KilolayerForCausalLM,
    KilolayerForMaskedLM,
    KilolayerForSeq2SeqLM,
    KilolayerForSequenceClassification,
    KilolayerModel,
    KilolayerTokenizer,
)

__all__ = [
    "KilolayerConfig",
    "KilolayerForCausalLM",
    "KilolayerForMaskedLM",
    "KilolayerForSeq2SeqLM",
    "KilolayerForSequenceClassification",
    "KilolayerModel",
    "KilolayerTokenizer",
]
