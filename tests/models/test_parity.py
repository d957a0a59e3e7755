"""Independent parity: Hugging Face's models, with their weights in ours, in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

import kilolayer as kl
from kilolayer.huggingface.bert import Bert
from kilolayer.huggingface.foreign_class import ForeignClass
from kilolayer.huggingface.gpt2 import GPT2
from kilolayer.huggingface.marian import Marian
from kilolayer.layers.attention import SelfAttention
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.mask import Mask
from kilolayer.layers.options import LayerOptions
from kilolayer.layers.position import RelativeBias, Rotary
from kilolayer.recipes.base import Plan

DIM, HEADS, FFN_DIM, LAYERS, VOCABULARY, PAD = 24, 4, 40, 3, 29, 0
# Where both sides compute in fp64 they differ by the order of summation alone: about 1e-15 at these sizes.
FP64 = {"rtol": 1e-12, "atol": 1e-12}
# Hugging Face rounds Llama's rotary tables and norms to fp32 whatever the model's dtype.
FP32_INSIDE = {"rtol": 1e-5, "atol": 1e-5}

Read = Callable[[Tensor], Tensor]
Tensors = dict[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def value(parameter: Tensor) -> Tensor:
    return parameter.detach()


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def perturbed(model: Model) -> Model:
    """The model in fp64 and eval mode, no bias at 0 and no norm at 1: a parameter that goes astray shows."""
    model.double().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def with_weights(ours: Model, tensors: Tensors) -> Model:
    """Our model in fp64 with these weights; strict, so that none keeps its own."""
    ours.double().eval().load_state_dict(tensors)
    return ours


def assert_same_gradients(ours: nn.Module, tensors: Tensors) -> None:
    torch.testing.assert_close({name: gradient(each) for name, each in ours.named_parameters()}, tensors, **FP64)


def joined(name: str, parts: Iterable[nn.Module], read: Read) -> Tensors:
    """The weights and biases of linear maps or norms, under each other, as ours of this name."""
    parts = list(parts)
    return {f"{name}.{kind}": torch.cat([read(getattr(part, kind)) for part in parts]) for kind in ("weight", "bias")}


def in_our_names(form: ForeignClass, config: kl.ModelConfig, theirs: nn.Module, read: Read) -> Tensors:
    """Their weights, or what is read off them, by the table that imports and exports go by."""
    named = dict(theirs.named_parameters())
    return {entry.ours: entry.to_ours([read(named[name]) for name in entry.theirs]) for entry in form.entries(config)}


def ours_of(form: ForeignClass, theirs: PreTrainedModel, **options: Any) -> Any:
    """Our model by their configuration, with their weights."""
    found = form.own_options(theirs.config.to_dict()) | options
    config = kl.ModelConfig.of(found["shape"], found)
    return with_weights(kl.build_model(config), in_our_names(form, config, theirs, value))


def llama_attention_in_our_names(attention: LlamaAttention, read: Read) -> Tensors:
    qkv = joined("query_key_value", (attention.q_proj, attention.k_proj, attention.v_proj), read)
    return qkv | joined("output", [attention.o_proj], read)


def llama_feedforward_in_our_names(mlp: LlamaMLP, read: Read) -> Tensors:
    return joined("input", (mlp.gate_proj, mlp.up_proj), read) | joined("output", [mlp.down_proj], read)


def llama_in_our_names(llama: LlamaForCausalLM, read: Read) -> Tensors:
    trunk = llama.model
    tensors = {"embedding.weight": read(trunk.embed_tokens.weight), "decoder.top_norm.weight": read(trunk.norm.weight)}
    for index, layer in enumerate(trunk.layers):
        block = f"decoder.blocks.{index}"
        tensors[f"{block}.self_attention.pre_norm.weight"] = read(layer.input_layernorm.weight)
        tensors[f"{block}.feedforward.pre_norm.weight"] = read(layer.post_attention_layernorm.weight)
        attention = llama_attention_in_our_names(layer.self_attn, read)
        feedforward = llama_feedforward_in_our_names(layer.mlp, read)
        tensors |= {f"{block}.self_attention.f.{name}": each for name, each in attention.items()}
        tensors |= {f"{block}.feedforward.f.{name}": each for name, each in feedforward.items()}
    return tensors


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def right_padded(lengths: list[int]) -> Tensor:
    """Bool [batch, length], True at real positions."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def left_padded(lengths: list[int]) -> Tensor:
    return right_padded(lengths).flip(1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# --- Post-LN encoder: BERT ---


def bert_config(**options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN_DIM,
        max_position_embeddings=16,
        layer_norm_eps=1e-3,  # large enough to show where it is added
        attn_implementation="eager",
        **options,
    )


def bert_and_ours() -> tuple[BertForMaskedLM, kl.Encoder]:
    bert = perturbed(BertForMaskedLM(bert_config()))
    return bert, ours_of(Bert(), bert, output_transform=True, output_bias=True)


def test_post_ln_encoder_is_bert() -> None:
    bert, ours = bert_and_ours()
    tokens, mask, types = random_tokens(3, 9), left_padded([9, 5, 2]), torch.randint(2, (3, 9))
    mask[0, 4] = False
    # BERT counts padding among its positions, and ours does not.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask.long(), "token_type_ids": types, "position_ids": positions}
    expected = bert(tokens, **inputs, output_hidden_states=True)
    actual = ours(tokens, mask=mask, types=types, hidden_states=True)
    torch.testing.assert_close(actual.logits, expected.logits, **FP64)
    torch.testing.assert_close(actual.hidden_states, tuple(expected.hidden_states), **FP64)


def test_post_ln_encoder_has_berts_gradients() -> None:
    bert, ours = bert_and_ours()
    tokens, mask, types = random_tokens(3, 9), right_padded([9, 5, 2]), torch.randint(2, (3, 9))
    direction = torch.randn(3, 9, VOCABULARY, dtype=torch.float64) * mask[..., None]
    (bert(tokens, attention_mask=mask.long(), token_type_ids=types).logits * direction).sum().backward()
    (ours(tokens, mask=mask, types=types).logits * direction).sum().backward()
    assert_same_gradients(ours, in_our_names(Bert(), ours.config, bert, gradient))


@pytest.mark.parametrize("outputs", [1, 3], ids=["number", "classes"])
def test_fine_tuning_has_berts_gradients(outputs: int) -> None:
    bert = perturbed(BertForSequenceClassification(bert_config(num_labels=outputs)))
    ours = ours_of(Bert(), bert, head=kl.Head(outputs=outputs, dropout=0.1))  # off, as BERT's, outside of training
    tokens, mask = random_tokens(3, 9), right_padded([9, 5, 2])
    labels = torch.tensor([0.25, 4.5, 3.0]).double() if outputs == 1 else torch.tensor([2, 0, 1])
    expected = bert(tokens, attention_mask=mask.long(), labels=labels)
    expected.loss.backward()
    logits = ours(tokens, mask=mask).logits
    torch.testing.assert_close(logits, expected.logits, **FP64)
    loss = F.mse_loss(logits[:, 0], labels) if outputs == 1 else F.cross_entropy(logits, labels)
    loss.backward()
    assert_same_gradients(ours, in_our_names(Bert(), ours.config, bert, gradient))


# --- Pre-LN decoder: GPT-2 ---


def gpt2_and_ours() -> tuple[GPT2LMHeadModel, kl.Decoder]:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=FFN_DIM,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-3,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    gpt2 = perturbed(GPT2LMHeadModel(config))
    return gpt2, ours_of(GPT2(), gpt2)


def test_pre_ln_decoder_is_gpt2() -> None:
    gpt2, ours = gpt2_and_ours()
    tokens = torch.randint(VOCABULARY, (3, 16))
    torch.testing.assert_close(ours(tokens).logits, gpt2(tokens).logits, **FP64)


def test_pre_ln_decoder_is_gpt2_behind_left_padding() -> None:
    gpt2, ours = gpt2_and_ours()
    tokens, mask = random_tokens(3, 9), left_padded([9, 5, 2])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = gpt2(tokens, attention_mask=mask.long(), position_ids=positions).logits
    torch.testing.assert_close(ours(tokens, mask=mask).logits[mask], expected[mask], **FP64)


@torch.no_grad()
@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 3, 1]])
def test_pre_ln_decoder_is_gpt2_step_by_step(steps: list[int]) -> None:
    gpt2, ours = gpt2_and_ours()
    tokens = random_tokens(3, sum(steps))
    cache = ours.new_cache(capacity=sum(steps))
    logits = torch.cat([ours(part, cache=cache).logits for part in tokens.split(steps, dim=1)], dim=1)
    torch.testing.assert_close(logits, gpt2(tokens).logits, **FP64)


def test_pre_ln_decoder_has_gpt2s_gradients() -> None:
    gpt2, ours = gpt2_and_ours()
    tokens = random_tokens(3, 9)
    next_token_loss(gpt2(tokens).logits, tokens).backward()
    next_token_loss(ours(tokens).logits, tokens).backward()
    assert_same_gradients(ours, in_our_names(GPT2(), ours.config, gpt2, gradient))


# --- Post-LN encoder-decoder: Marian ---


def marian_sinusoids(length: int, dim: int) -> Tensor:
    """Marian's table by Marian's formula, not rounded to fp32."""
    angles = np.array([[position / 10_000 ** (2 * pair / dim) for pair in range(dim // 2)] for position in range(length)])
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def marian_and_ours() -> tuple[MarianMTModel, kl.EncoderDecoder]:
    config = MarianConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS - 1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN_DIM,
        decoder_ffn_dim=FFN_DIM,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        pad_token_id=PAD,
        decoder_start_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=2,
        attn_implementation="eager",
    )
    marian = MarianMTModel(config)
    positions = [marian.model.encoder.embed_positions, marian.model.decoder.embed_positions]
    precise = marian_sinusoids(16, DIM)
    for table in positions:
        torch.testing.assert_close(table.weight.data, precise.float())
    perturbed(marian)
    for table in positions:
        table.weight.data.copy_(precise)
    return marian, ours_of(Marian(), marian)


def padded_pairs() -> tuple[Tensor, Tensor]:
    """Sources [3, 9] padded to the right and targets [3, 7] without padding."""
    return random_tokens(3, 9).masked_fill(~right_padded([9, 5, 1]), PAD), random_tokens(3, 7)


def test_post_ln_encoder_decoder_is_marian() -> None:
    marian, ours = marian_and_ours()
    source, target = padded_pairs()
    expected = marian(source, attention_mask=(source != PAD).long(), decoder_input_ids=target)
    actual = ours(source, target)
    real = source != PAD
    torch.testing.assert_close(actual.memory[real], expected.encoder_last_hidden_state[real], **FP64)
    torch.testing.assert_close(actual.logits, expected.logits, **FP64)


def test_post_ln_encoder_decoder_is_marian_with_padded_targets() -> None:
    marian, ours = marian_and_ours()
    source, target = padded_pairs()
    real = right_padded([7, 3, 5])
    target = target.masked_fill(~real, PAD)
    expected = marian(
        source,
        attention_mask=(source != PAD).long(),
        decoder_input_ids=target,
        decoder_attention_mask=real.long(),
    )
    torch.testing.assert_close(ours(source, target).logits[real], expected.logits[real], **FP64)


@torch.no_grad()
@pytest.mark.parametrize("steps", [[1] * 7, [3, 1, 2, 1]])
def test_post_ln_encoder_decoder_is_marian_step_by_step(steps: list[int]) -> None:
    marian, ours = marian_and_ours()
    source, target = padded_pairs()
    memory, cache = ours.encode(source), ours.new_cache(capacity=7)
    logits = torch.cat([ours.decode(part, memory, cache=cache).logits for part in target.split(steps, dim=1)], dim=1)
    expected = marian(source, attention_mask=(source != PAD).long(), decoder_input_ids=target)
    torch.testing.assert_close(logits, expected.logits, **FP64)


def test_post_ln_encoder_decoder_has_marians_gradients() -> None:
    marian, ours = marian_and_ours()
    source, target = padded_pairs()
    logits = marian(source, attention_mask=(source != PAD).long(), decoder_input_ids=target).logits
    next_token_loss(logits, target).backward()
    next_token_loss(ours(source, target).logits, target).backward()
    assert_same_gradients(ours, in_our_names(Marian(), ours.config, marian, gradient))


# --- Rotary grouped-query attention, SwiGLU and RMSNorm: Llama ---


def llama_config(kv_heads: int) -> LlamaConfig:
    # SDPA, not eager: Llama's eager attention rounds its softmax to fp32.
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=FFN_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        hidden_act="silu",
        rms_norm_eps=1e-2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )


def llama_options(kv_heads: int) -> LayerOptions:
    return LayerOptions(
        dim=DIM, heads=HEADS, kv_heads=kv_heads, ffn_dim=FFN_DIM, activation="swiglu", norm="rms", positions="rotary"
    )


def llama_rotary_tables(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Llama's cosines and sines [1, length, head width] by its own formula, not rounded to fp32."""
    pairs = torch.arange(0, DIM // HEADS, 2, dtype=torch.float64)
    angles = (positions[..., None] / 10_000 ** (pairs / (DIM // HEADS))).repeat(1, 1, 2)
    rounded = LlamaRotaryEmbedding(config)(angles, positions)
    torch.testing.assert_close((angles.cos(), angles.sin()), rounded, **FP32_INSIDE)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_rotary_self_attention_is_llamas(kv_heads: int) -> None:
    config, options = llama_config(kv_heads), llama_options(kv_heads)
    theirs = perturbed(LlamaAttention(config, layer_idx=0))
    ours = with_weights(SelfAttention(options, Plan()), llama_attention_in_our_names(theirs, value))
    x, positions = torch.randn(2, 40, DIM, dtype=torch.float64), torch.arange(40)[None]
    # With a mask of its own, Hugging Face repeats the key heads instead of leaving the grouping to SDPA, as we do.
    allowed = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    expected, _ = theirs(x, llama_rotary_tables(config, positions), allowed)
    rotation = Rotary(options.head_dim, decays=False)(positions, x.dtype)
    torch.testing.assert_close(ours(x, Mask(causal=True), rotation), expected, **FP64)


def test_swiglu_feedforward_is_llamas() -> None:
    theirs = perturbed(LlamaMLP(llama_config(kv_heads=HEADS)))
    ours = with_weights(FeedForward(llama_options(kv_heads=HEADS), Plan()), llama_feedforward_in_our_names(theirs, value))
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), **FP64)


def test_pre_ln_decoder_is_llama_behind_left_padding() -> None:
    llama = perturbed(LlamaForCausalLM(llama_config(kv_heads=2)))
    ours = kl.Decoder(
        VOCABULARY,
        DIM,
        HEADS,
        FFN_DIM,
        LAYERS,
        "pre_ln",
        kv_heads=2,
        activation="swiglu",
        norm="rms",
        norm_eps=1e-2,
        positions="rotary",
        pad_id=PAD,
        tie_embeddings=True,
        scale_embeddings=False,
    )
    with_weights(ours, llama_in_our_names(llama, value))
    mask = left_padded([9, 5, 2])
    tokens = random_tokens(3, 9).masked_fill(~mask, PAD)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = llama(tokens, attention_mask=mask.long(), position_ids=positions).logits
    torch.testing.assert_close(ours(tokens).logits[mask], expected[mask], **FP32_INSIDE)


# --- Relative bias: T5 ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (300, 300), (1, 300), (5, 200)])
def test_relative_bias_is_t5s(causal: bool, queries: int, keys: int) -> None:
    config = T5Config(d_model=DIM, num_heads=HEADS, d_kv=DIM // HEADS, is_decoder=causal)
    theirs = perturbed(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
    ours = with_weights(RelativeBias(HEADS, causal, DIM), {"weight": value(theirs.relative_attention_bias.weight)})
    expected = theirs.compute_bias(queries, keys, past_seen_tokens=keys - queries)
    positions = torch.arange(keys)[None]
    torch.testing.assert_close(ours(positions[:, keys - queries :], positions), expected, rtol=0, atol=0)
