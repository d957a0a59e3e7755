"""From Kilolayer into a folder of Transformers and back through the Auto classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.huggingface.auto_classes import KilolayerConfig, KilolayerForCausalLM, KilolayerForMaskedLM
from kilolayer.parallel.peers import Peers
from tests.huggingface.auto_classes.small_models import SOURCE, TARGET, bare_model, inputs_of, logits_of, wrapped

AUTO: dict[str, Any] = {
    "encoder_decoder": AutoModelForSeq2SeqLM,
    "decoder": AutoModelForCausalLM,
    "encoder": AutoModelForMaskedLM,
}
SPARSE = kl.MoE(experts=4, top_k=2, every=2, loss_free=0.001)
FORMS: dict[str, dict[str, Any]] = {
    "dense": {"drop_path": 0.2},
    "sparse": {"moe": SPARSE},
    "xpos, shared keys": {"positions": "xpos", "kv_heads": 1, "tie_embeddings": False},
    "learned": {"positions": "learned", "max_length": 9, "pad_id": None, "norm": "rms"},
    "t5": {"positions": "t5"},
    "as imported": {"embedding_norm": True, "output_bias": True, "first_predicted": 2, "activation": "gelu_tanh"},
    "silu": {"activation": "silu"},
}


def round_trip(model: Any, folder: Path) -> Any:
    """Saved and loaded; the same class, no weight missing, left over or filled anew."""
    given = wrapped(model)
    given.save_pretrained(folder)
    loaded, info = AUTO[model.config.shape].from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(given)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not loaded.training
    for (name, ours), (again, theirs) in zip(given.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == again
        assert torch.equal(ours, theirs), name
    for (name, ours), (again, theirs) in zip(given.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == again
        assert torch.equal(ours, theirs), name
    return loaded


@pytest.mark.matrix(30)
@pytest.mark.parametrize("shape", [*AUTO])
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_every_recipe_computes_the_same_after_a_round_trip(recipe: str, shape: str, tmp_path: Path) -> None:
    model = bare_model(shape, recipe, drop_path=0.2)
    loaded = round_trip(model, tmp_path)
    assert torch.equal(loaded(**inputs_of(loaded)).logits, logits_of(model))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("shape", [*AUTO])
@pytest.mark.parametrize("form", [*FORMS])
def test_every_form_computes_the_same_after_a_round_trip(form: str, shape: str, tmp_path: Path) -> None:
    options = FORMS[form]
    if shape == "encoder" and options.get("positions") == "xpos":
        options = {**options, "positions": "rotary"}
    model = bare_model(shape, **options)
    loaded = round_trip(model, tmp_path)
    inputs = inputs_of(loaded)
    if model.config.pad_id is None:  # no padding: a full batch
        inputs = {name: each for name, each in inputs.items() if name != "attention_mask"}
    assert torch.equal(loaded(**inputs).logits, logits_of(model))


def test_token_types_and_what_stands_before_the_scores_go_along(tmp_path: Path) -> None:
    options = {"embedding_norm": True, "token_types": 2, "output_transform": True, "output_bias": True, "first_predicted": 2}
    model = bare_model("encoder", **options)
    loaded, types = round_trip(model, tmp_path), (SOURCE % 2).long()
    wanted = model(SOURCE, types=types)
    assert not torch.equal(wanted.logits, model(SOURCE).logits)
    inputs = {**inputs_of(loaded), "token_type_ids": types}
    assert torch.equal(loaded(**inputs).logits, wanted.logits)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(**inputs).last_hidden_state, wanted.states)
    # A new head stands in the place of all that scored tokens.
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)(**inputs).logits.shape == (2, 3)
    with pytest.raises(InputError, match="no token types"):
        wrapped(bare_model("encoder"))(**inputs)


def test_the_file_has_every_weight_once(tmp_path: Path) -> None:
    model = bare_model("encoder_decoder")
    wrapped(model).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {*file.keys()} == {f"model.{name}" for name in model.state_dict()}
        assert sum(file.get_tensor(name).numel() for name in file.keys()) == sum(p.numel() for p in model.parameters())  # noqa: SIM118
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model"]["recipe"] == {"name": "sub_ln", "cross_gain": True, "init": "derived"}
    assert config["auto_map"]["AutoModelForSeq2SeqLM"] == "modeling_kilolayer.KilolayerForSeq2SeqLM"


def test_a_loaded_model_trains_with_the_drop_path_that_it_was_built_with(tmp_path: Path) -> None:
    model = bare_model("encoder", drop_path=0.4)
    loaded = round_trip(model, tmp_path)
    probabilities = [float(block.feedforward.drop_path.p) for block in loaded.model.encoder.blocks]
    assert probabilities == [float(block.feedforward.drop_path.p) for block in model.encoder.blocks]
    assert max(probabilities) == pytest.approx(0.4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_a_dtype_is_taken_and_routers_stay_precise(dtype: torch.dtype, tmp_path: Path) -> None:
    model = bare_model("decoder", moe=SPARSE)
    wrapped(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    kinds = {name: weight.dtype for name, weight in loaded.named_parameters()}
    assert {kind for name, kind in kinds.items() if "router" in name} == {torch.promote_types(dtype, torch.float32)}
    assert {kind for name, kind in kinds.items() if "router" not in name} == {dtype}
    wanted = model.to(dtype)(SOURCE).logits
    assert torch.equal(loaded(SOURCE, use_cache=False).logits, wanted)


def test_the_states_of_every_shape_are_there_for_automodel(tmp_path: Path) -> None:
    for shape in AUTO:
        model = bare_model(shape)
        wrapped(model).save_pretrained(tmp_path / shape)
        loaded = AutoModel.from_pretrained(tmp_path / shape)
        out = loaded(**inputs_of(loaded), output_hidden_states=True)
        wanted = model(SOURCE, TARGET, hidden_states=True) if shape == "encoder_decoder" else model(SOURCE, hidden_states=True)
        assert torch.equal(out.last_hidden_state, wanted.states)
        layers = out.decoder_hidden_states if shape == "encoder_decoder" else out.hidden_states
        assert len(layers) == 3
        assert all(map(torch.equal, layers, wanted.hidden_states))
        if shape == "encoder_decoder":
            assert torch.equal(out.encoder_last_hidden_state, wanted.memory)
            assert all(map(torch.equal, out.encoder_hidden_states, wanted.encoder_hidden_states))


def test_a_classifier_grows_out_of_a_masked_language_model(tmp_path: Path) -> None:
    body = bare_model("encoder", tie_embeddings=False)
    wrapped(body).save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert {name.split(".")[1] for name in info["missing_keys"]} == {"head"}
    assert info["unexpected_keys"] == {"model.vocabulary.weight"}
    assert loaded(SOURCE, attention_mask=SOURCE != 0).logits.shape == (2, 3)
    for (name, ours), theirs in zip(body.encoder.state_dict().items(), loaded.model.encoder.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    # Xavier's, as Kilolayer starts a head: a deviation of sqrt(2 / (16 + 16)), neither empty memory nor zeros.
    assert 0.15 < float(loaded.model.head.dense.weight.detach().std()) < 0.35
    assert not loaded.model.head.dense.bias.any()


def test_a_class_refuses_a_model_of_another_shape() -> None:
    with pytest.raises(OptionError, match="KilolayerForCausalLM does not support a model of the shape 'encoder'"):
        KilolayerForCausalLM(KilolayerConfig(bare_model("encoder").config))
    with pytest.raises(OptionError, match="has no token scores"):
        KilolayerForMaskedLM(KilolayerConfig(bare_model("encoder", head=kl.Head()).config))


def test_a_part_of_the_experts_is_refused() -> None:
    model = bare_model("decoder", moe=SPARSE)
    for block in model.decoder.blocks:
        if hasattr(block.feedforward.f, "group"):
            block.feedforward.f.group = Peers.__new__(Peers)
    with pytest.raises(InputError, match="only its own part of the experts"):
        wrapped(model)


def test_weights_are_shared_with_the_model_that_is_wrapped() -> None:
    model = bare_model("decoder")
    given = wrapped(model)
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    assert torch.equal(given(SOURCE, use_cache=False).logits, model(SOURCE).logits)
