"""What TorchScale, fairseq, Hugging Face and torch call our options, for the error about an option that is theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable

OURS = {
    "model.dim": "encoder_embed_dim decoder_embed_dim embed_dim hidden_size d_model n_embd",
    "model.heads": "encoder_attention_heads decoder_attention_heads attention_heads num_attention_heads num_heads n_head nhead",
    "model.ffn_dim": "encoder_ffn_embed_dim decoder_ffn_embed_dim encoder_ffn_dim decoder_ffn_dim intermediate_size n_inner "
    "d_ff dim_feedforward",
    "model.layers": "encoder_layers decoder_layers num_hidden_layers num_layers n_layer",
    "model.encoder_layers": "num_encoder_layers",
    "model.decoder_layers": "num_decoder_layers",
    "model.kv_heads": "num_key_value_heads",
    "model.activation": "activation_fn activation_function hidden_act feed_forward_proj",
    "model.qk_norm": "query_key_norm use_qk_norm",
    "model.norm_eps": "layernorm_eps layer_norm_eps layer_norm_epsilon rms_norm_eps",
    "model.dropout": "hidden_dropout_prob resid_pdrop embd_pdrop dropout_rate",
    "model.attention_dropout": "attention_probs_dropout_prob attn_pdrop",
    "model.activation_dropout": "relu_dropout",
    "model.drop_path": "drop_path_rate",
    "model.pad_id": "pad_token_id padding_idx",
    "model.vocab_size": "decoder_vocab_size",
    "model.max_length": "max_source_positions max_target_positions max_position_embeddings n_positions",
    'model.positions = "learned"': "encoder_learned_pos decoder_learned_pos",
    'model.positions = "none"': "no_token_positional_embeddings",
    'model.positions = "t5"': "rel_pos_buckets max_rel_pos relative_attention_num_buckets relative_attention_max_distance",
    'model.positions = "xpos"': "xpos_rel_pos xpos_scale_base",
    'model.positions = "rotary"': "rope_theta rope_parameters rope_scaling",
    "model.positions": "embed_positions position_embedding_type",
    "model.embedding_norm": "layernorm_embedding",
    "model.scale_embeddings": "scale_embedding",
    "model.scale_embeddings = false": "no_scale_embedding",
    "model.tie_embeddings": "tie_word_embeddings",
    "model.tie_embeddings = true": "share_all_embeddings share_encoder_input_output_embed share_encoder_decoder_embeddings",
    'model.tie_embeddings = true, or "output" in an encoder-decoder': "share_decoder_input_output_embed",
    "model.token_types": "type_vocab_size",
    "model.head.outputs": "num_labels",
    "model.head.dropout": "classifier_dropout",
    "model.final_norm": "normalize_output",
    "model.image.size": "img_size image_size",
    "model.image.patch": "patch_size",
    "model.image.channels": "in_chans num_channels",
    'model.recipe = "deepnorm"': "deepnorm",
    'model.recipe = "sub_ln"': "subln",
    'model.recipe = "pre_ln", or "post_ln"': "encoder_normalize_before decoder_normalize_before norm_first "
    "do_layer_norm_before",
    'model.recipe = { name = "...", init = "bert" }': "bert_init initializer_range init_std",
    "model.moe.experts": "moe_expert_count num_local_experts num_experts",
    "model.moe.every": "moe_freq",
    "model.moe.top_k": "num_experts_per_tok",
    "model.moe.top_k = 1": "moe_top1_expert",
    'model.moe.router = "xmoe"': "use_xmoe",
    "model.moe.second": "moe_second_expert_policy",
    "model.moe.balance": "router_aux_loss_coef moe_gate_loss_wt",
    "train.lr": "learning_rate",
    "train.steps": "max_update max_steps",
    "train.epochs": "max_epoch num_train_epochs",
    "train.warmup_steps": "warmup_updates",
    "train.warmup_share": "warmup_ratio",
    "train.accumulate": "update_freq gradient_accumulation_steps",
    "train.clip_norm": "max_grad_norm",
    "train.schedule": "lr_scheduler lr_scheduler_type",
    "train.label_smoothing": "label_smoothing_factor",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_eps adam_epsilon",
    "train.log_every": "log_interval logging_steps",
    "train.valid_every": "validate_interval_updates eval_steps",
    "train.save_every": "save_interval_updates save_steps",
    "train.keep": "save_total_limit keep_interval_updates",
    'train.recompute = "layer"': "gradient_checkpointing",
    "batches.tokens": "max_tokens",
}
"""Our option, with its value where it has one, and their names for it."""

ABSENT = {
    "only encoders have multiway layers; remove it": "multiway",
    "there is no dilated attention (LongNet); remove it": "segment_length dilated_ratio seq_parallel",
    'in a run, set train.shard = "full"; in your own loop, kl.fully_shard(model); remove it': "fsdp",
    "torchrun tells each process its rank; remove it": "ddp_rank",
    "kl.ImageEncoder takes images; the others take patches that you embed, as embeddings=; remove it": "img_size image_size "
    "patch_size in_chans num_channels",
    'in a run, set train.recompute = "layer"; in your own loop, kl.fast(model, recompute="layer")': "checkpoint_activations",
    "the fastest attention that torch has here is used without an option; remove it": "flash_attention attn_implementation",
    "the states below the output are in .states of what the model returns; remove it": "no_output_layer",
    "the router always computes in fp32; remove it": "moe_gating_use_fp32",
    "gates are always normalized before tokens are dropped; remove it": "moe_normalize_gate_prob_before_dropping",
    "in evaluation no token is dropped; remove it (moe.capacity is the limit in training)": "moe_eval_capacity_token_fraction",
    "the model makes its own embedding table of vocab_size tokens; remove it": "embed_tokens output_projection",
    "the width of a head is dim / heads; remove it": "head_dim d_kv",
    "a cache is an argument of the forward pass, from model.new_cache(); remove it": "use_cache",
}
"""What to do about an option that has no counterpart here, and its names."""

CLASSES = {"moe": "kl.MoE", "head": "kl.Head", "image": "kl.ImageInput"}


def answers(names: Iterable[str], valid: Iterable[str], *, keywords: bool) -> dict[str, str]:
    """Those of the unknown `names` that other libraries have, each with what to write in its place.

    valid: the options that there are. keywords: as arguments of a constructor, not as names in a configuration.
    """
    there = set(valid)
    return {name: text for name in names if (text := _answer(name, there, keywords))}


def _answer(name: str, valid: set[str], keywords: bool) -> str:
    for ours, theirs in OURS.items():
        if name in theirs.split() and (path := _from_here(ours, valid)):
            return f"write {_as_keyword(path) if keywords else path}"
    return next((text for text, theirs in ABSENT.items() if name in theirs.split()), "")


def _from_here(ours: str, valid: set[str]) -> str:
    """The option's name as seen from the table that has these options; "" if it is not in or below that table."""
    path, equals, value = ours.partition(" = ")
    parts = path.split(".")
    start = next((index for index, part in enumerate(parts) if part in valid), None)
    return "" if start is None else ".".join(parts[start:]) + equals + value


def _as_keyword(path: str) -> str:
    """`moe.top_k = 1` as Python has it: `moe=kl.MoE(top_k=1)`."""
    name, _, value = path.partition(" = ")
    outer, _, inner = name.partition(".")
    if inner:
        return f"{outer}={CLASSES[outer]}({inner}={value or '...'})"
    value = re.sub(r"\b(true|false)\b", lambda word: word[0].title(), value)
    value = re.sub(r"\{ name = (\S+), (\w+) = (\S+) \}", r"kl.recipes.get(\1, \2=\3)", value)
    return f"{outer}={value}" if value else outer
