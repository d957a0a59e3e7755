"""Options of TorchScale, fairseq and Hugging Face, given to our constructors."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.config import build, option_paths
from kilolayer.errors import UnknownOptionError, nearest
from kilolayer.foreign_options import ABSENT, OURS
from kilolayer.tasks.classify_image.config import ClassifyImageConfig
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.translation.config import TranslationConfig

PAGE = Path(__file__).parents[2] / "docs/torchscale.md"
SIZES: dict[str, Any] = {"vocab_size": 20, "dim": 16, "heads": 2, "ffn_dim": 32}
MODELS: dict[type, dict[str, Any]] = {
    kl.Encoder: {**SIZES, "layers": 2},
    kl.Decoder: {**SIZES, "layers": 2},
    kl.EncoderDecoder: {**SIZES, "encoder_layers": 2, "decoder_layers": 2},
    kl.ImageEncoder: {"image": kl.ImageInput(size=8, patch=4), "dim": 16, "heads": 2, "ffn_dim": 32, "layers": 2},
}


def words(text: str) -> list[str]:
    return text.split()


# The names that torchscale/architecture/config.py reads in version 0.3.0.
BOTH = words("""activation_fn dropout drop_path_rate attention_dropout activation_dropout no_scale_embedding layernorm_embedding
moe_freq moe_top1_expert moe_expert_count moe_gating_use_fp32 moe_eval_capacity_token_fraction moe_second_expert_policy
moe_normalize_gate_prob_before_dropping use_xmoe rel_pos_buckets max_rel_pos deepnorm subln bert_init multiway no_output_layer
layernorm_eps vocab_size checkpoint_activations fsdp ddp_rank xpos_rel_pos xpos_scale_base flash_attention segment_length
dilated_ratio seq_parallel""")
ENCODER = words("""encoder_embed_dim encoder_attention_heads encoder_ffn_embed_dim encoder_layers encoder_normalize_before
normalize_output max_source_positions""")
DECODER = words("""decoder_embed_dim decoder_attention_heads decoder_ffn_embed_dim decoder_layers decoder_normalize_before
max_target_positions share_decoder_input_output_embed""")
TORCHSCALE = {
    kl.Encoder: [*BOTH, *ENCODER, "share_encoder_input_output_embed"],
    kl.Decoder: [*BOTH, *DECODER],
    kl.EncoderDecoder: [*BOTH, *ENCODER, *DECODER, "share_all_embeddings"],
    kl.ImageEncoder: ["img_size", "patch_size", "in_chans"],
}
CASES = [(shape, name) for shape, names in TORCHSCALE.items() for name in names]


def rows() -> dict[str, str]:
    """The option of ours beside each of TorchScale's on the page."""
    table = PAGE.read_text().partition("## Its options")[2]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {name: ours for theirs, ours, *_ in cells for name in re.findall(r"`(\w+)`", theirs)}


@pytest.mark.parametrize(("shape", "name"), CASES)
def test_every_option_of_torchscale_is_on_the_page_and_answered_alike(shape: type, name: str) -> None:
    if name in inspect.signature(shape).parameters:
        return
    ours = rows()[name]
    with pytest.raises(UnknownOptionError, match=f"unknown option '{name}'") as raised:
        shape(**MODELS[shape], **{name: 1})
    if ours == "-":
        assert "remove it" in raised.value.fix or "recompute" in raised.value.fix
    else:
        assert raised.value.fix.startswith(f"{name}: write {re.findall('`(.+?)`', ours)[0]}")


def test_a_model_that_takes_no_images_names_the_one_that_does() -> None:
    with pytest.raises(UnknownOptionError) as raised:
        kl.Encoder(**MODELS[kl.Encoder], img_size=32, fsdp=True)  # pyright: ignore[reportCallIssue]
    assert "img_size: kl.ImageEncoder takes images" in raised.value.fix
    assert "kl.fully_shard(model)" in raised.value.fix


def test_all_unknown_options_are_answered_at_once() -> None:
    with pytest.raises(UnknownOptionError) as raised:
        kl.Decoder(vocab_size=20, decoder_embed_dim=16, deepnorm=True, multiway=True)  # pyright: ignore[reportCallIssue]
    for name in (
        "decoder_embed_dim: write dim;",
        'deepnorm: write recipe="deepnorm";',
        "multiway: only encoders have multiway layers",
    ):
        assert name in raised.value.fix


def test_our_name_for_an_option_is_an_option() -> None:
    for table in (OURS, ABSENT):
        names = " ".join(table.values()).split()
        assert len(names) == len(set(names))
    assert {ours.partition(" = ")[0] for ours in OURS} <= {*option_paths(TranslationConfig), *option_paths(ClassifyImageConfig)}


@pytest.mark.parametrize(
    ("table", "name", "answer"),
    [
        ({"model": {"deepnorm": True}}, "deepnorm", 'write recipe = "deepnorm"'),
        ({"model": {"moe": {"moe_freq": 2}}}, "moe_freq", "write every"),
        ({"model": {"moe_freq": 2}}, "moe_freq", "write moe.every"),
        ({"train": {"warmup_updates": 400}}, "warmup_updates", "write warmup_steps"),
        ({"batches": {"max_tokens": 4096}}, "max_tokens", "write tokens"),
        ({"encoder_embed_dim": 64}, "encoder_embed_dim", "write model.dim"),
        ({"model": {"use_qk_norm": True}}, "use_qk_norm", "write qk_norm"),
        ({"query_key_norm": True}, "query_key_norm", "write model.qk_norm"),
        ({"task": "classify_image", "model": {"patch_size": 4}}, "patch_size", "write image.patch"),
    ],
)
def test_a_configuration_is_answered_in_its_own_words(table: dict[str, Any], name: str, answer: str) -> None:
    with pytest.raises(UnknownOptionError) as raised:
        build(RunConfig, table)
    assert raised.value.fix == f"{name}: {answer}"


# Read by Hugging Face's own code only, or about a token that our tasks know.
NOT_OF_A_MODEL = set(
    words("""self transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward
is_encoder_decoder id2label label2id problem_type is_decoder add_cross_attention bos_token_id eos_token_id forced_eos_token_id
decoder_start_token_id summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn pretraining_tp attention_bias mlp_bias
encoder_layerdrop decoder_layerdrop""")
)


@pytest.mark.parametrize(
    ("config", "shape"),
    [("Bert", kl.Encoder), ("GPT2", kl.Decoder), ("Llama", kl.Decoder), ("Marian", kl.EncoderDecoder)],
)
def test_the_options_of_hugging_faces_models_are_answered(config: str, shape: type) -> None:
    theirs = inspect.signature(getattr(pytest.importorskip("transformers"), f"{config}Config")).parameters
    ours = inspect.signature(shape).parameters
    names = [name for name in theirs if name not in NOT_OF_A_MODEL and name not in ours]
    assert names
    for name in names:
        with pytest.raises(UnknownOptionError, match="known from other libraries"):
            shape(**MODELS[shape], **{name: 1})


def test_what_shares_nothing_with_a_name_is_no_guess() -> None:
    assert nearest("onnx", ["huggingface", "ctranslate2"]) is None
    assert nearest("hugingface", ["huggingface", "ctranslate2"]) == "huggingface"
    assert nearest("encoder", ["dim", "encoder_layers"]) == "encoder_layers"
    with pytest.raises(UnknownOptionError) as raised:
        kl.Encoder(**MODELS[kl.Encoder], colour=1)  # pyright: ignore[reportCallIssue]
    assert raised.value.what == "unknown option 'colour'"
    assert "activation" in raised.value.fix


def test_the_snippets_of_torchscale_have_its_number_of_parameters() -> None:
    page: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)), page)
    found = {name: sum(each.numel() for each in page[name].parameters()) for name in ("encoder", "decoder", "encdec", "deep")}
    # Counted with TorchScale's own modules, each with nn.Embedding(64000, 768) as embed_tokens.
    assert found == {"encoder": 183_452_160, "decoder": 183_452_160, "encdec": 346_119_168, "deep": 268_412_928}
