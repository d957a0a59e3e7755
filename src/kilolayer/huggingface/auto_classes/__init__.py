"""Kilolayer's models as Hugging Face Transformers classes.

After `import kilolayer.huggingface.auto_classes` the Auto classes find them.
Transformers is imported here and nowhere else in the package.
"""

from __future__ import annotations

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )
except ImportError as error:
    raise ImportError("kilolayer.huggingface.auto_classes needs Transformers: pip install 'kilolayer[export]'") from error

from kilolayer.huggingface.auto_classes.configuration import KilolayerConfig
from kilolayer.huggingface.auto_classes.encoders import KilolayerForMaskedLM, KilolayerForSequenceClassification
from kilolayer.huggingface.auto_classes.language_model import KilolayerForCausalLM
from kilolayer.huggingface.auto_classes.states import KilolayerModel
from kilolayer.huggingface.auto_classes.translator import KilolayerForSeq2SeqLM

__all__ = [
    "KilolayerConfig",
    "KilolayerForCausalLM",
    "KilolayerForMaskedLM",
    "KilolayerForSeq2SeqLM",
    "KilolayerForSequenceClassification",
    "KilolayerModel",
]

AutoConfig.register(KilolayerConfig.model_type, KilolayerConfig, exist_ok=True)
AutoModel.register(KilolayerConfig, KilolayerModel, exist_ok=True)
AutoModelForCausalLM.register(KilolayerConfig, KilolayerForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(KilolayerConfig, KilolayerForMaskedLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(KilolayerConfig, KilolayerForSeq2SeqLM, exist_ok=True)
AutoModelForSequenceClassification.register(KilolayerConfig, KilolayerForSequenceClassification, exist_ok=True)
