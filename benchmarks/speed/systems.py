"""Kilolayer and its peers: one function a system, from a setting to a training step.

All take the same shapes, dropout 0 and no padding, compute products in bf16 and update fp32 weights by AdamW; norms, positions
and activations are as each system has them. Peers hold fp32 weights under autocast and use torch's fused AdamW; their batch
lies on the device already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jobs import Setting
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.data.batches import Batch
from kilolayer.data.windows import TextBatch
from kilolayer.layers.stack import Stack
from kilolayer.training.config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.optimizer import Optimizer
from kilolayer.training.step import Stepper

LR = 1e-4
Step = Callable[[], Any]


def kilolayer(setting: Setting, device: torch.device) -> Step:
    """The trainer's own step: bf16 weights with fp32 masters, compiled layers, recorded as a graph; on a CPU plain."""
    options: dict[str, Any] = {
        "layers": setting.layers,
        "dim": setting.dim,
        "heads": setting.heads,
        "ffn_dim": setting.ffn_dim,
        "vocab_size": setting.vocabulary,
        "recipe": kl.recipes.get(setting.recipe),
        "pad_id": None,
    }
    if setting.experts:
        options["moe"] = kl.MoE(experts=setting.experts)
    translates = setting.task == "translation"
    shape = "encoder_decoder" if translates else "decoder"
    model = kl.build_model(kl.ModelConfig(shape=shape, **options), device=device, seed=1)
    if setting.twin:
        widen(model.stacks()[0], kl.ModelConfig(shape=shape, **options | {"ffn_dim": 2 * setting.ffn_dim}), device)
    source, target, labels = batch(setting, torch.device("cpu"))
    read = Batch(source, target, labels, labels.numel()) if translates else TextBatch(target, labels, labels.numel())
    if model.config.recipe.calibration() is not None:
        kl.calibrate(model, tuple(part.to(device) for part in read.parts[:-1]))
    config = TrainConfig(optimizer="adamw", weight_decay=0.01, precision="bf16", label_smoothing=0.0)
    optimizer = Optimizer(model.train(), config, model.lower(torch.bfloat16))
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), device, say=_refuse)

    def step() -> None:
        fault = stepper.step([read], LR).fault
        if fault is not None:
            _refuse(f"{fault} is not finite, and the update was left out")

    return step


def widen(stack: Stack, config: kl.ModelConfig, device: torch.device) -> None:
    """Put layers of another configuration in the place of every second one."""
    wide = kl.build_model(config, device=device, seed=1).stacks()[0]
    for index in range(1, len(stack.blocks), 2):
        stack.blocks[index] = wide.blocks[index]


def _refuse(message: str) -> None:
    """The trainer would go on more slowly, or with less work; that must not be measured."""
    raise RuntimeError(message)


def torchscale(setting: Setting, device: torch.device) -> Step:
    from torchscale.architecture.config import EncoderDecoderConfig
    from torchscale.architecture.encoder_decoder import EncoderDecoder
    from torchscale.component.embedding import PositionalEmbedding, TextEmbedding

    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "layers": setting.layers,
            "embed_dim": setting.dim,
            "attention_heads": setting.heads,
            "ffn_embed_dim": setting.ffn_dim,
        }.items()
    }
    config = EncoderDecoderConfig(
        **sides,
        deepnorm=True,
        activation_fn="relu",
        vocab_size=setting.vocabulary,
        share_all_embeddings=True,
        no_scale_embedding=False,
    )
    with device:
        # Its positions count from 2.
        source_positions, target_positions = (PositionalEmbedding(setting.length + 2, setting.dim) for _ in range(2))
        table = TextEmbedding(setting.vocabulary, setting.dim)
        model = EncoderDecoder(config, table, source_positions, table, target_positions)
    source, target, labels = batch(setting, device)
    return autocast_step(model, lambda: model(source, target)[0], labels)


def torchscale_language(setting: Setting, device: torch.device) -> Step:
    """Its decoder, Sub-LN, with X-MoE in every second layer; the balance loss as its examples weigh it."""
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder
    from torchscale.component.embedding import PositionalEmbedding, TextEmbedding

    if not torch.distributed.is_initialized():
        # Its sparse layer asks a process group for its size.
        backend = "nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    sparse = {"moe_freq": 2, "moe_expert_count": setting.experts, "use_xmoe": True} if setting.experts else {}
    config = DecoderConfig(
        decoder_layers=setting.layers,
        decoder_embed_dim=setting.dim,
        decoder_attention_heads=setting.heads,
        decoder_ffn_embed_dim=setting.ffn_dim,
        subln=True,
        activation_fn="relu",
        vocab_size=setting.vocabulary,
        share_decoder_input_output_embed=True,
        **sparse,
    )
    with device:
        positions = PositionalEmbedding(setting.length + 2, setting.dim)
        model = Decoder(config, TextEmbedding(setting.vocabulary, setting.dim), positions)
    _, target, labels = batch(setting, device)
    balance: list[Tensor] = []

    def logits() -> Tensor:
        found, extra = model(target)
        balance[:] = [each for each in extra.get("l_aux", []) if each is not None]
        return found

    return autocast_step(model, logits, labels, more=lambda: 0.01 * sum(balance) if balance else 0.0)


class PlainTransformer(nn.Module):
    """torch.nn.Transformer between one table for source, target and output."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(setting.vocabulary, setting.dim) * setting.dim**-0.5)
        self.positions = nn.Parameter(torch.zeros(setting.length, setting.dim))
        self.layers = nn.Transformer(
            setting.dim, setting.heads, setting.layers, setting.layers, setting.ffn_dim, dropout=0.0, batch_first=True
        )
        self.causal = nn.Transformer.generate_square_subsequent_mask(setting.length, self.table.device)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source, target = (F.embedding(ids, self.table) + self.positions for ids in (source, target))
        return F.linear(self.layers(source, target, tgt_mask=self.causal, tgt_is_causal=True), self.table)


def nn_transformer(setting: Setting, device: torch.device) -> Step:
    with device:
        model = PlainTransformer(setting)
    source, target, labels = batch(setting, device)
    return autocast_step(model, lambda: model(source, target), labels)


def marian(setting: Setting, device: torch.device) -> Step:
    from transformers import MarianConfig, MarianMTModel

    with device:
        model = MarianMTModel(MarianConfig(**marian_options(setting)))
    source, target, labels = batch(setting, device)
    return autocast_step(model, lambda: model(source, decoder_input_ids=target, use_cache=False).logits, labels)


def marian_options(setting: Setting) -> dict[str, Any]:
    """A Post-LN encoder-decoder with sinusoidal positions and one table."""
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "layers": setting.layers,
            "attention_heads": setting.heads,
            "ffn_dim": setting.ffn_dim,
        }.items()
    }
    return {
        **sides,
        "d_model": setting.dim,
        "vocab_size": setting.vocabulary,
        "max_position_embeddings": 256,
        "activation_function": "relu",
        "scale_embedding": True,
        "dropout": 0.0,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        "eos_token_id": 3,
        "forced_eos_token_id": None,
        "attn_implementation": "sdpa",
    }


def gpt2(setting: Setting, device: torch.device, compiled: bool = False) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=setting.vocabulary,
        n_positions=setting.length,
        n_embd=setting.dim,
        n_layer=setting.layers,
        n_head=setting.heads,
        n_inner=setting.ffn_dim,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    with device:
        model = GPT2LMHeadModel(config)
    _, target, labels = batch(setting, device)
    return autocast_step(model, lambda: model(target, use_cache=False).logits, labels, compiled)


def x_transformers(setting: Setting, device: torch.device, compiled: bool = False) -> Step:
    from x_transformers import Decoder, TransformerWrapper

    with device:
        layers = Decoder(
            dim=setting.dim,
            depth=setting.layers,
            heads=setting.heads,
            attn_dim_head=setting.dim // setting.heads,
            ff_mult=setting.ffn_dim // setting.dim,
            attn_flash=True,
        )
        model = TransformerWrapper(
            num_tokens=setting.vocabulary, max_seq_len=setting.length, attn_layers=layers, tie_embedding=True
        )
    _, target, labels = batch(setting, device)
    return autocast_step(model, lambda: model(target), labels, compiled)


def autocast_step(
    model: nn.Module,
    logits: Callable[[], Tensor],
    labels: Tensor,
    compiled: bool = False,
    more: Callable[[], Tensor | float] = lambda: 0.0,
) -> Step:
    """Forward and loss under bf16 autocast, backward, update. compiled: forward and loss as one, in torch's default mode.

    more: what the last forward adds to the loss.
    """
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LR, weight_decay=0.01, fused=True)

    def mean_loss() -> Tensor:
        with torch.autocast(labels.device.type, torch.bfloat16):
            return F.cross_entropy(logits().flatten(0, 1), labels.flatten()) + more()

    loss = torch.compile(mean_loss) if compiled else mean_loss

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target and labels, int64 [rows, length]: random, without special tokens; a language model has no source."""
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(4, setting.vocabulary, (2, setting.rows, setting.length + 1), generator=noise).to(device)
    return ids[0, :, 1:].contiguous(), ids[1, :, :-1].contiguous(), ids[1, :, 1:].contiguous()


SYSTEMS: dict[str, Callable[[Setting, torch.device], Step]] = {
    "kilolayer": kilolayer,
    "torchscale": torchscale,
    "torchscale language": torchscale_language,
    "nn.Transformer": nn_transformer,
    "marian": marian,
    "gpt2": gpt2,
    "gpt2 compiled": lambda setting, device: gpt2(setting, device, compiled=True),
    "x-transformers": x_transformers,
    "x-transformers compiled": lambda setting, device: x_transformers(setting, device, compiled=True),
}
