"""Qwen3: read into a decoder of ours and written from one, with the scores and gradients of Transformers in fp64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3 import modeling_qwen3

import kilolayer as kl
from kilolayer.errors import KilolayerError
from kilolayer.huggingface.form import NoPlainForm, PlainForm, find_form
from kilolayer.huggingface.imported import FORMS
from kilolayer.huggingface.weights import to_theirs

VOCABULARY = 29
FP64: Any = {"rtol": 1e-10, "atol": 1e-10}
TOKENS = torch.tensor([[5, 7, 9, 11, 3, 8], [6, 8, 3, 4, 12, 2]])
OURS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "layers": 2,
    "dim": 16,
    "heads": 4,
    "ffn_dim": 24,
    "norm": "rms",
    "qk_norm": True,
    "positions": "rotary",
    "activation": "swiglu",
    "scale_embeddings": False,
    "pad_id": None,
}


@pytest.fixture(autouse=True)
def _in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers computes norms and angles in fp32 whatever the dtype; here by the same equations in fp64."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()

    def angles(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64) / self.config.head_dim
        found = position_ids[..., None] / 10_000**steps
        twice = torch.cat([found, found], dim=-1)
        return twice.cos().to(x), twice.sin().to(x)

    torch.manual_seed(0)
    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_qwen3.Qwen3RotaryEmbedding, "forward", angles)


def config(**options: Any) -> Qwen3Config:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    return Qwen3Config(vocab_size=VOCABULARY, **{**sizes, "num_key_value_heads": 2, **options})


@torch.no_grad()
def perturbed(model: nn.Module) -> nn.Module:
    """In fp64 and for evaluation, with weights of which none is 0 or 1."""
    for parameter in model.double().eval().parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3}, {"num_key_value_heads": 1}],
    ids=str,
)
def test_scores_and_gradients_are_alike(options: dict[str, Any], tmp_path: Path) -> None:
    theirs: Any = perturbed(Qwen3ForCausalLM(config(**options)))
    theirs.save_pretrained(tmp_path)
    ours: Any = kl.from_huggingface(tmp_path, dtype=torch.float64)
    assert ours.config.recipe == kl.recipes.get("pre_ln", bias=False)
    expected, actual = theirs(TOKENS).logits, ours(TOKENS).logits
    torch.testing.assert_close(actual, expected, **FP64)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    found = to_theirs(FORMS["qwen3"].entries(ours.config), gradients(ours))
    wanted = {name: gradient for name, gradient in gradients(theirs).items() if name in found}
    assert wanted.keys() == found.keys()
    torch.testing.assert_close(found, wanted, **FP64)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_the_base_model_has_the_same_states(tmp_path: Path) -> None:
    theirs: Any = perturbed(Qwen3Model(config(tie_word_embeddings=True)))
    theirs.save_pretrained(tmp_path)
    ours: Any = kl.from_huggingface(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(ours(TOKENS).states, theirs(TOKENS)[0], **FP64)


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "tie_embeddings": True, "norm_eps": 1e-3}], ids=str)
def test_a_decoder_of_ours_is_written_as_qwen3(options: dict[str, Any], tmp_path: Path) -> None:
    model: Any = perturbed(kl.Decoder(**OURS, **options, recipe=kl.recipes.get("pre_ln", bias=False)))
    form = find_form(model, 32)
    assert isinstance(form, PlainForm)
    assert form.foreign.architecture == "Qwen3ForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(form.foreign.foreign_config(form.model.config)))
    weights = to_theirs(form.foreign.entries(model.config), form.model.state_dict())
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read: Any = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
    theirs, loading = read
    assert not any(loading[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(model(TOKENS).logits, theirs(TOKENS).logits, **FP64)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", [{"kind": "byte_bpe", "vocab_size": 290}, {"kind": "bytes"}], ids=["byte_bpe", "bytes"])
def test_a_trained_run_is_exported_with_its_tokenizer(tokenizer: dict[str, Any], tmp_path: Path) -> None:
    text = "".join(f"The number {count} is followed by {count + 1}.\n" for count in range(200))
    (tmp_path / "text.txt").write_text(text)
    run: Any = kl.train(
        {"task": "causal_lm", "text": {"train": str(tmp_path / "text.txt"), "length": 32, "test_share": 0.1}},
        run=tmp_path / "run",
        model={name: value for name, value in OURS.items() if name not in ("vocab_size", "pad_id")}
        | {"kv_heads": 2, "recipe": {"name": "pre_ln", "bias": False}},
        tokenizer=tokenizer,
        batches={"tokens": 128},
        train={"steps": 3, "warmup_steps": 1, "device": "cpu", "threads": 1},
    )
    kl.export(run, to="huggingface", out=tmp_path / "exported")
    written = json.loads((tmp_path / "exported/config.json").read_text())
    assert (written["architectures"], written["max_position_embeddings"]) == (["Qwen3ForCausalLM"], 1024)
    again: Any = kl.from_huggingface(tmp_path / "exported")
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "exported")
    torch.testing.assert_close(again(TOKENS).logits, theirs(TOKENS).logits)
    started: Any = kl.train(
        {"task": "causal_lm", "text": {"train": str(tmp_path / "text.txt"), "length": 32}, "batches": {"tokens": 128}},
        run=tmp_path / "second",
        train={"start_from": str(tmp_path / "exported"), "steps": 1, "device": "cpu", "threads": 1, "lr": 1e-9},
    )
    assert run.generate(["The number 7"])
    ids = torch.tensor([run.tokenizer.encode(b"The number 7").tolist()])
    torch.testing.assert_close(
        started.model(ids).logits[..., 3:].log_softmax(-1), run.model(ids).logits[..., 3:].log_softmax(-1), rtol=0, atol=1e-4
    )


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "only a rope_theta of 10,000"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "only rope_type default"),
        ({"rope_parameters": 5}, "only rope_type default"),
        ({"rope_parameters": None, "rope_theta": 1e6}, "only a rope_theta of 10,000"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is"),
        ({"head_dim": 8}, "heads that have the width of the model together"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention"),
        ({"layer_types": 7}, "wrong type"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "the architecture is"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"head_dim": "wide", "num_attention_heads": 10**12}, "head_dim is 'wide'"),
    ],
    ids=str,
)
def test_what_our_models_lack_is_refused_with_the_reason(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    Qwen3ForCausalLM(config()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    with pytest.raises(KilolayerError) as caught:
        kl.from_huggingface(tmp_path)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recipe": "pre_ln"}, "its projections have biases"),
        ({"recipe": "sub_ln"}, "not plain Pre-LN"),
        ({"qk_norm": False}, "not normalized"),
        ({"activation": "silu"}, "activation is silu"),
        ({"dropout": 0.1}, "dropout"),
        ({"final_norm": False}, "no final norm"),
        ({"positions": "xpos"}, "positions are xpos"),
    ],
    ids=str,
)
def test_what_qwen3_lacks_is_told(options: dict[str, Any], reason: str) -> None:
    form = find_form(kl.Decoder(**{**OURS, "recipe": kl.recipes.get("pre_ln", bias=False), **options}), 32)
    assert isinstance(form, NoPlainForm)
    assert reason in form.why
