"""Tiny models of torch and of Transformers in fp64, without dropout, and how each is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

DIM, HEADS, FFN, WORDS, LAYERS = 16, 2, 32, 20, 2
SOURCE = torch.tensor([[5, 6, 7, 9, 11], [9, 8, 7, 1, 1]])
TARGET = torch.tensor([[2, 12, 13, 14], [2, 15, 1, 1]])
SOURCE_REAL, TARGET_REAL = SOURCE != 1, TARGET != 1
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=torch.float64).sin().reshape(2, 3, 8, 8)
STATES = torch.linspace(-3, 3, 2 * 5 * DIM, dtype=torch.float64).mul(7).sin().reshape(2, 5, DIM)
OTHERS = torch.linspace(-3, 3, 2 * 4 * DIM, dtype=torch.float64).mul(11).cos().reshape(2, 4, DIM)
CAUSAL = torch.ones(4, 4, dtype=torch.bool).triu(1)


def bert(cls: str = "BertModel", **options: Any) -> Any:
    config = transformers.BertConfig(**_bert_options(), **options)
    return getattr(transformers, cls)(config).double()


def roberta() -> Any:
    return transformers.RobertaModel(transformers.RobertaConfig(**_bert_options())).double()


def bart(cls: str = "BartModel") -> Any:
    return getattr(transformers, cls)(transformers.BartConfig(**_bart_options(), activation_function="relu")).double()


def marian(cls: str = "MarianModel") -> Any:
    config = transformers.MarianConfig(**_bart_options(), activation_function="relu", decoder_start_token_id=2)
    return getattr(transformers, cls)(config).double()


def gpt2(cls: str = "GPT2Model", **options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=FFN,
        n_positions=16,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=2,
        eos_token_id=2,
        **options,
    )
    return getattr(transformers, cls)(config).double()


def llama(cls: str = "LlamaModel") -> Any:
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        intermediate_size=FFN,
        max_position_embeddings=16,
    )
    return getattr(transformers, cls)(config).double()


def t5(cls: str = "T5Model", **options: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=DIM,
        d_kv=8,
        d_ff=FFN,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **options,
    )
    return getattr(transformers, cls)(config).double()


def vit(cls: str = "ViTModel") -> Any:
    config = transformers.ViTConfig(
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return getattr(transformers, cls)(config).double()


def torch_encoder(norm_first: bool = False, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        DIM, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64, **options
    )
    top = nn.LayerNorm(DIM, dtype=torch.float64) if norm_first else None
    return nn.TransformerEncoder(layer, LAYERS, norm=top, enable_nested_tensor=not norm_first and "activation" not in options)


def torch_decoder(norm_first: bool = False) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(
        DIM, HEADS, FFN, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    return nn.TransformerDecoder(layer, LAYERS, norm=nn.LayerNorm(DIM, dtype=torch.float64) if norm_first else None)


def torch_transformer(norm_first: bool = False) -> nn.Transformer:
    sizes: dict[str, Any] = {"num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "dim_feedforward": FFN}
    encoder = torch_encoder(norm_first)
    return nn.Transformer(
        DIM,
        HEADS,
        **sizes,
        dropout=0.0,
        batch_first=True,
        norm_first=norm_first,
        dtype=torch.float64,
        custom_encoder=encoder,
        custom_decoder=torch_decoder(norm_first),
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    "nn.TransformerEncoder": torch_encoder,
    "nn.TransformerDecoder": torch_decoder,
    "nn.Transformer": torch_transformer,
    "BERT": bert,
    "RoBERTa": roberta,
    "BART": bart,
    "Marian": marian,
    "nn.TransformerEncoder, norm_first": lambda: torch_encoder(norm_first=True),
    "nn.TransformerDecoder, norm_first": lambda: torch_decoder(norm_first=True),
    "nn.Transformer, norm_first": lambda: torch_transformer(norm_first=True),
    "GPT-2": gpt2,
    "Llama": llama,
    "T5": t5,
    "ViT": vit,
}


def run(model: Any) -> tuple[Tensor, Tensor]:
    """The states of the last stack, [batch, length, dim], and which of them are real."""
    match type(model).__name__:
        case "TransformerEncoder":
            return model(STATES, src_key_padding_mask=~SOURCE_REAL), SOURCE_REAL
        case "TransformerDecoder":
            return model(OTHERS, STATES, tgt_mask=CAUSAL, memory_key_padding_mask=~SOURCE_REAL), TARGET_REAL
        case "Transformer":
            masks = {"src_key_padding_mask": ~SOURCE_REAL, "memory_key_padding_mask": ~SOURCE_REAL}
            return model(STATES, OTHERS, tgt_mask=CAUSAL, **masks), TARGET_REAL
        case "BertModel" | "RobertaModel":
            return model(SOURCE, attention_mask=SOURCE_REAL.long()).last_hidden_state, SOURCE_REAL
        case "BartModel" | "MarianModel" | "T5Model":
            masks = {"attention_mask": SOURCE_REAL.long()}
            return model(SOURCE, decoder_input_ids=TARGET, use_cache=False, **masks).last_hidden_state, TARGET_REAL
        case "GPT2Model" | "LlamaModel":
            return model(TARGET, use_cache=False).last_hidden_state, TARGET_REAL
        case name:
            assert name == "ViTModel"
            states = model(IMAGES).last_hidden_state
            return states, torch.ones(states.shape[:2], dtype=torch.bool)


def _bert_options() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": FFN,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 1,
    }


def _bart_options() -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "d_model": DIM,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": FFN,
        "decoder_ffn_dim": FFN,
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "forced_eos_token_id": None,
    }
