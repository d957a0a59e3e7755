"""Kilolayer and its peers: one function per system, from a setting to a training step.

All have the same shapes, dropout and padding, compute products in bf16 and update fp32 weights with AdamW; norms, positions and
activations are each system's own. Peers hold fp32 weights under autocast and use torch's fused AdamW; their batch and its masks
are already on the device. A compiled peer uses torch.compile in its default mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from batch import PAD, batch
from jobs import Setting
from ours import LR, kilolayer
from torch import Tensor, nn

Step = Callable[[], Any]


def torchscale(setting: Setting, device: torch.device) -> Step:
    from torchscale.architecture.config import EncoderDecoderConfig  # pyright: ignore[reportMissingImports]
    from torchscale.architecture.encoder_decoder import EncoderDecoder  # pyright: ignore[reportMissingImports]
    from torchscale.component.embedding import PositionalEmbedding, TextEmbedding  # pyright: ignore[reportMissingImports]

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
        dropout=setting.dropout,
        attention_dropout=setting.dropout,
        activation_dropout=setting.dropout,
    )
    with device:
        # Its positions count from 2.
        source_positions, target_positions = (PositionalEmbedding(setting.length + 2, setting.dim) for _ in range(2))
        table = TextEmbedding(setting.vocabulary, setting.dim)
        model = EncoderDecoder(config, table, source_positions, table, target_positions)
    source, target, labels = batch(setting, device)
    if not setting.padded:
        return autocast_step(model, lambda: model(source, target)[0], labels)
    source_padding, target_padding = source == PAD, target == PAD

    def logits() -> Tensor:
        """Calls the two sides as its forward does, which accepts no padding masks."""
        encoded = model.encoder(source, encoder_padding_mask=source_padding)
        return model.decoder(target, self_attn_padding_mask=target_padding, encoder_out=encoded)[0]

    return autocast_step(model, logits, labels)


def torchscale_language(setting: Setting, device: torch.device) -> Step:
    """Its decoder, Sub-LN, with X-MoE in every second layer; the balance loss is weighted as in its examples.

    Its attention is given the padding; its experts do not support it.
    """
    from torchscale.architecture.config import DecoderConfig  # pyright: ignore[reportMissingImports]
    from torchscale.architecture.decoder import Decoder  # pyright: ignore[reportMissingImports]
    from torchscale.component.embedding import PositionalEmbedding, TextEmbedding  # pyright: ignore[reportMissingImports]

    if not torch.distributed.is_initialized():
        # Its sparse layer needs a process group.
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
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
        dropout=setting.dropout,
        attention_dropout=setting.dropout,
        **sparse,
    )
    with device:
        positions = PositionalEmbedding(setting.length + 2, setting.dim)
        model = Decoder(config, TextEmbedding(setting.vocabulary, setting.dim), positions)
    _, target, labels = batch(setting, device)
    padding = target == PAD if setting.padded else None
    balance: list[Tensor] = []

    def logits() -> Tensor:
        found, extra = model(target, self_attn_padding_mask=padding)
        balance[:] = [each for each in extra.get("l_aux", []) if each is not None]
        return found

    return autocast_step(model, logits, labels, more=lambda: 0.01 * sum(balance) if balance else 0.0)


class PlainTransformer(nn.Module):
    """torch.nn.Transformer with one table for source, target and output."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(setting.vocabulary, setting.dim) * setting.dim**-0.5)
        self.positions = nn.Parameter(torch.zeros(setting.length, setting.dim))
        self.dropout = nn.Dropout(setting.dropout)
        self.layers = nn.Transformer(
            setting.dim, setting.heads, setting.layers, setting.layers, setting.ffn_dim, setting.dropout, batch_first=True
        )
        self.causal = nn.Transformer.generate_square_subsequent_mask(setting.length, self.table.device)

    def forward(self, source: Tensor, target: Tensor, masks: dict[str, Tensor]) -> Tensor:
        source, target = (self.dropout(F.embedding(ids, self.table) + self.positions) for ids in (source, target))
        return F.linear(self.layers(source, target, tgt_mask=self.causal, tgt_is_causal=True, **masks), self.table)


def nn_transformer(setting: Setting, device: torch.device, compiled: bool = False, captured: bool = False) -> Step:
    """compiled: layer by layer, so that all layers of a side share what was compiled for the first.

    captured: also the whole step, from the forward pass to the update, as one CUDA graph.
    """
    with device:
        model = PlainTransformer(setting)
    source, target, labels = batch(setting, device)
    masks: dict[str, Tensor] = {}
    if setting.padded:
        behind_source, behind_target = (
            torch.zeros(ids.shape, device=device).masked_fill_(ids == PAD, float("-inf")) for ids in (source, target)
        )
        masks = {
            "src_key_padding_mask": behind_source,
            "memory_key_padding_mask": behind_source,
            "tgt_key_padding_mask": behind_target,
        }
    if compiled:
        for layers in (model.layers.encoder.layers, model.layers.decoder.layers):
            for index, layer in enumerate(layers):
                # Not layer.compile(): the compiler silently skips a forward defined in torch.nn.
                layers[index] = torch.compile(layer)  # pyright: ignore[reportArgumentType]
    return autocast_step(model, lambda: model(source, target, masks), labels, captured=captured)


def marian(setting: Setting, device: torch.device) -> Step:
    from transformers import MarianConfig, MarianMTModel

    with device:
        model = MarianMTModel(MarianConfig(**marian_options(setting)))
    source, target, labels = batch(setting, device)
    masks = {"attention_mask": source != PAD, "decoder_attention_mask": target != PAD} if setting.padded else {}
    return autocast_step(model, lambda: model(source, decoder_input_ids=target, use_cache=False, **masks).logits, labels)


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
        "dropout": setting.dropout,
        "attention_dropout": setting.dropout,
        "activation_dropout": setting.dropout,
        "pad_token_id": PAD,
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
        resid_pdrop=setting.dropout,
        embd_pdrop=setting.dropout,
        attn_pdrop=setting.dropout,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue], every configuration of Transformers takes it
    )
    with device:
        model = GPT2LMHeadModel(config)
    _, target, labels = batch(setting, device)
    mask = target != PAD if setting.padded else None
    return autocast_step(model, lambda: model(target, attention_mask=mask, use_cache=False).logits, labels, compiled)


def x_transformers(setting: Setting, device: torch.device, compiled: bool = False) -> Step:
    from x_transformers import Decoder, TransformerWrapper  # pyright: ignore[reportMissingImports]

    with device:
        layers = Decoder(
            dim=setting.dim,
            depth=setting.layers,
            heads=setting.heads,
            attn_dim_head=setting.dim // setting.heads,
            ff_mult=setting.ffn_dim // setting.dim,
            attn_flash=True,
            attn_dropout=setting.dropout,
            attn_sublayer_dropout=setting.dropout,
            ff_sublayer_dropout=setting.dropout,
        )
        model = TransformerWrapper(
            num_tokens=setting.vocabulary,
            max_seq_len=setting.length,
            attn_layers=layers,
            tie_embedding=True,
            emb_dropout=setting.dropout,
        )
    _, target, labels = batch(setting, device)
    mask = target != PAD if setting.padded else None
    return autocast_step(model, lambda: model(target, mask=mask), labels, compiled)


def autocast_step(
    model: nn.Module,
    logits: Callable[[], Tensor],
    labels: Tensor,
    compiled: bool = False,
    more: Callable[[], Tensor | float] = lambda: 0.0,
    captured: bool = False,
) -> Step:
    """Forward and loss under bf16 autocast, backward, update. compiled: forward and loss as one, in torch's default mode.

    more: what the last forward adds to the loss. captured: after three ordinary steps, all of it as one CUDA graph.
    """
    captured = captured and labels.is_cuda
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LR, weight_decay=0.01, fused=True, capturable=captured)

    def mean_loss() -> Tensor:
        with torch.autocast(labels.device.type, torch.bfloat16, cache_enabled=not captured):
            return F.cross_entropy(logits().flatten(0, 1), labels.flatten(), ignore_index=PAD) + more()

    loss = torch.compile(mean_loss) if compiled else mean_loss

    def step() -> Tensor:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return captured_step(step) if captured else step


def captured_step(step: Step) -> Step:
    """The step as a CUDA graph, which is captured at the first call."""
    recorded: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []

    def replay() -> Tensor:
        if not recorded:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            recorded.append((graph, loss))
        graph, loss = recorded[0]
        graph.replay()
        return loss

    return replay


SYSTEMS: dict[str, Callable[[Setting, torch.device], Step]] = {
    "kilolayer": kilolayer,
    "torchscale": torchscale,
    "torchscale language": torchscale_language,
    "nn.Transformer": nn_transformer,
    "nn.Transformer compiled": lambda setting, device: nn_transformer(setting, device, compiled=True),
    "nn.Transformer in one graph": lambda setting, device: nn_transformer(setting, device, compiled=True, captured=True),
    "marian": marian,
    "gpt2": gpt2,
    "gpt2 compiled": lambda setting, device: gpt2(setting, device, compiled=True),
    "x-transformers": x_transformers,
    "x-transformers compiled": lambda setting, device: x_transformers(setting, device, compiled=True),
}
