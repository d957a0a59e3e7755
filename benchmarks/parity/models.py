"""Translation models of the authors' releases and of Kilolayer for the loop in loop.py: same sizes, tied table and dropout."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

PAD = 0
LONGEST = 512
"""The longest sentence that learned positions have a place for."""


@dataclass(frozen=True)
class Size:
    """The size of a model: `layers` per side."""

    layers: int
    vocabulary: int
    dim: int = 128
    heads: int = 4
    ffn_dim: int = 512
    dropout: float = 0.1


@dataclass(frozen=True)
class System:
    """A library and a method. options: of the recipe (Kilolayer). positions: sinusoidal, or learned."""

    library: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"

    def build(self, size: Size) -> nn.Module:
        """The model, on torch's default device; its forward takes source and target ids and returns logits."""
        kinds = {"torchscale": TorchScale, "rezero": AuthorsReZero, "fixup": AuthorsFixup, "kilolayer": Kilolayer}
        return kinds[self.library](self, size)


class Kilolayer(nn.Module):
    def __init__(self, system: System, size: Size) -> None:
        super().__init__()
        import kilolayer as kl

        self.model = kl.EncoderDecoder(
            vocab_size=size.vocabulary,
            dim=size.dim,
            heads=size.heads,
            ffn_dim=size.ffn_dim,
            encoder_layers=size.layers,
            decoder_layers=size.layers,
            dropout=size.dropout,
            positions=system.positions,
            max_length=LONGEST if system.positions == "learned" else None,
            recipe=kl.recipes.get(system.method, **system.options),
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [rows, length] each to logits [rows, target length, vocabulary]."""
        return self.model(source, target).logits


TORCHSCALE_METHODS: dict[str, dict[str, Any]] = {
    "post_ln": {"encoder_normalize_before": False, "decoder_normalize_before": False, "subln": False},
    "pre_ln": {"encoder_normalize_before": True, "decoder_normalize_before": True, "subln": False},
    "deepnorm": {"deepnorm": True, "subln": False},
    "sub_ln": {"encoder_normalize_before": True, "decoder_normalize_before": True, "subln": True},
}


class TorchScale(nn.Module):
    """TorchScale's encoder and decoder with the options of its translation example, `mt_base`, and its padding masks.

    Its configuration class leaves the decoder Pre-LN with `deepnorm=True` unless told otherwise; the example has Post-LN.
    """

    def __init__(self, system: System, size: Size) -> None:
        super().__init__()
        from torchscale.architecture.config import EncoderDecoderConfig  # pyright: ignore[reportMissingImports]
        from torchscale.architecture.decoder import Decoder  # pyright: ignore[reportMissingImports]
        from torchscale.architecture.encoder import Encoder  # pyright: ignore[reportMissingImports]
        from torchscale.component.embedding import PositionalEmbedding, TextEmbedding  # pyright: ignore[reportMissingImports]

        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in {
                "layers": size.layers,
                "embed_dim": size.dim,
                "attention_heads": size.heads,
                "ffn_embed_dim": size.ffn_dim,
            }.items()
        }
        method = TORCHSCALE_METHODS[system.method]
        config = EncoderDecoderConfig(
            **sides,
            **method,
            activation_fn="relu",
            vocab_size=size.vocabulary,
            share_all_embeddings=True,
            no_scale_embedding=False,
            dropout=size.dropout,
        )
        if system.method == "deepnorm":
            config.encoder_normalize_before = config.decoder_normalize_before = False
        table = TextEmbedding(size.vocabulary, size.dim, padding_idx=PAD)
        places = [SinusoidalPositions(size.dim) for _ in range(2)]
        if system.positions == "learned":
            places = [PositionalEmbedding(LONGEST + 2, size.dim) for _ in range(2)]
            for each in places:
                nn.init.normal_(each.weight, std=size.dim**-0.5)  # as fairseq does

        output = nn.Linear(size.dim, size.vocabulary, bias=False)
        output.weight = table.weight
        self.encoder = Encoder(config, table, places[0], is_encoder_decoder=True)
        self.decoder = Decoder(config, table, places[1], output, is_encoder_decoder=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [rows, length] each to logits [rows, target length, vocabulary]."""
        encoded = self.encoder(source, encoder_padding_mask=source == PAD)
        return self.decoder(target, self_attn_padding_mask=target == PAD, encoder_out=encoded)[0]


class AuthorsReZero(nn.Module):
    """The layers of the package `rezero`, by ReZero's authors, around the embeddings that the other models have."""

    def __init__(self, system: System, size: Size) -> None:
        super().__init__()
        from rezero.transformer import RZTXDecoderLayer, RZTXEncoderLayer  # pyright: ignore[reportMissingImports]

        def layers(make: type[nn.Module]) -> nn.ModuleList:
            return nn.ModuleList(make(size.dim, size.heads, size.ffn_dim, size.dropout) for _ in range(size.layers))

        self.table = nn.Embedding(size.vocabulary, size.dim, padding_idx=PAD)
        nn.init.normal_(self.table.weight, std=size.dim**-0.5)
        self.table.weight.data[PAD] = 0
        self.positions = SinusoidalPositions(size.dim)
        self.dropout = nn.Dropout(size.dropout)
        self.encoder, self.decoder = layers(RZTXEncoderLayer), layers(RZTXDecoderLayer)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [rows, length] each to logits [rows, target length, vocabulary]."""
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        x, memory = self._embed(target), self._embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=source == PAD)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=future, memory_key_padding_mask=source == PAD)
        return nn.functional.linear(x.transpose(0, 1), self.table.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        """int64 [rows, length] to [length, rows, dim]."""
        x = self.table(ids) * math.sqrt(self.table.embedding_dim)
        return self.dropout(x + self.positions(ids)).transpose(0, 1)


class AuthorsFixup(nn.Module):
    """The layers of github.com/hongyi-zhang/Fixup, by R-Fixup's authors, between the embeddings that the other models have.

    Its cross-attention starts as in a model of 12 sublayers, whatever the depth: an oversight that is kept here.
    """

    def __init__(self, system: System, size: Size) -> None:
        super().__init__()
        theirs = fixup_modules()
        options = {"attention_dropout": 0.0, "relu_dropout": 0.0, "dropout": size.dropout}
        for side in ("encoder", "decoder"):
            options |= {f"{side}_layers": size.layers, f"{side}_embed_dim": size.dim, f"{side}_attention_heads": size.heads}
            options |= {f"{side}_ffn_embed_dim": size.ffn_dim, f"{side}_normalize_before": False}
        own = SimpleNamespace(**options)
        self.table = theirs.Embedding(size.vocabulary, size.dim, PAD)
        self.positions = SinusoidalPositions(size.dim)
        self.dropout = nn.Dropout(size.dropout)
        self.encoder = nn.ModuleList(theirs.TransformerZeroEncoderLayer(own) for _ in range(size.layers))
        self.decoder = nn.ModuleList(theirs.TransformerZeroDecoderLayer(own) for _ in range(size.layers))
        self.encoder_top = nn.Sequential(theirs.LayerShift(), theirs.LayerScale())
        self.decoder_top = theirs.LayerShift()

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """int64 [rows, length] each to logits [rows, target length, vocabulary]."""
        memory, padding = self._embed(source), source == PAD
        for layer in self.encoder:
            memory = layer(memory, padding)
        memory, x = self.encoder_top(memory), self._embed(target)
        for layer in self.decoder:
            x, _ = layer(x, memory, padding, None)
        return nn.functional.linear(self.decoder_top(x).transpose(0, 1), self.table.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        """int64 [rows, length] to [length, rows, dim]."""
        x = self.table(ids) * math.sqrt(self.table.embedding_dim)
        return self.dropout(x + self.positions(ids)).transpose(0, 1)


@cache
def fixup_modules() -> Any:
    """transformer_zero.py of Fixup's authors, without the fairseq of 2019, of which its layers need one function.

    The folder `fairseq` of a clone must be on the PYTHONPATH.
    """
    folder = next(path for path in map(Path, sys.path) if (path / "fairseq/models/transformer_zero.py").exists())
    unused = ("AdaptiveSoftmax", "CharacterTokenEmbedder", "LearnedPositionalEmbedding", "MultiheadAttention")
    bases = ("FairseqIncrementalDecoder", "FairseqEncoder", "FairseqLanguageModel", "FairseqModel")
    contents: dict[str, Any] = {
        "fairseq": {},
        "fairseq.options": {},
        "fairseq.utils": {"fill_with_neg_inf": lambda each: each.float().fill_(-math.inf).type_as(each)},
        "fairseq.modules": dict.fromkeys((*unused, "SinusoidalPositionalEmbedding")),
        "fairseq.models": dict.fromkeys(bases, nn.Module)
        | dict.fromkeys(("register_model", "register_model_architecture"), lambda *_: lambda each: each),
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        vars(module).update(values)
        sys.modules[name] = module
        if "." in name:
            setattr(sys.modules["fairseq"], name.partition(".")[2], module)
    attention = importlib.import_module("fairseq.modules.multihead_attention_zero").MultiheadAttentionZero
    vars(sys.modules["fairseq.modules"])["MultiheadAttentionZero"] = attention
    views = attention.in_proj_qkv
    attention.in_proj_qkv = lambda *inputs: [part.clone() for part in views(*inputs)]  # it multiplies in place
    return importlib.import_module("fairseq.models.transformer_zero")


class SinusoidalPositions(nn.Module):
    """Sinusoids of the position, which TorchScale's example takes from fairseq: half of the columns sines, half cosines."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, ids: Tensor, **_: Any) -> Tensor:
        """ids [rows, length] to [1, length, dim]."""
        half = self.dim // 2
        rates = torch.exp(torch.arange(half, device=ids.device) * -(math.log(10_000) / (half - 1)))
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[None]
