"""Folders of Hugging Face become models of ours that compute the same; what is none of ours is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2LMHeadModel,
    GPT2Model,
    MarianMTModel,
    OPTForCausalLM,
    OPTModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
)

import kilolayer as kl
from kilolayer.errors import KilolayerError
from kilolayer.huggingface.bert import Bert
from tests.fixtures.foreign_models import LENGTH, bert_config, gpt2_config, marian_config, opt_config, spread

VOCABULARY = 29
FP64 = {"rtol": 1e-10, "atol": 1e-10}
TOKENS = torch.tensor([[5, 7, 9, 11, 3, 8], [6, 8, 3, 4, 12, 2]])
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    torch.manual_seed(0)


def imported(model: PreTrainedModel, folder: Path, **options: Any) -> Any:
    """Saved by Transformers, read by us, in fp64."""
    model.save_pretrained(folder, **options)
    return kl.from_huggingface(folder, dtype=torch.float64)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForPreTraining])
@pytest.mark.parametrize("options", [{}, {"hidden_act": "relu", "type_vocab_size": 3}, {"tie_word_embeddings": False}], ids=str)
def test_bert_scores_masked_tokens_alike(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = spread(kind(bert_config(VOCABULARY, **options)))
    ours = imported(theirs, tmp_path)
    found = theirs(TOKENS, attention_mask=MASK.long(), token_type_ids=TYPES, output_hidden_states=True)
    expected = found.logits if kind is BertForMaskedLM else found.prediction_logits
    actual = ours(TOKENS, mask=MASK, types=TYPES, hidden_states=True)
    torch.testing.assert_close(actual.logits[MASK], expected[MASK], **FP64)
    for mine, other in zip(actual.hidden_states, found.hidden_states, strict=True):
        torch.testing.assert_close(mine[MASK], other[MASK], **FP64)
    without = theirs(TOKENS).logits if kind is BertForMaskedLM else theirs(TOKENS).prediction_logits
    torch.testing.assert_close(ours(TOKENS).logits, without, **FP64)


def test_bert_alone_and_with_a_classifier(tmp_path: Path) -> None:
    alone = spread(BertModel(bert_config(VOCABULARY)))
    ours = imported(alone, tmp_path / "alone")
    torch.testing.assert_close(ours(TOKENS, types=TYPES).states, alone(TOKENS, token_type_ids=TYPES)[0], **FP64)
    classifier = spread(BertForSequenceClassification(bert_config(VOCABULARY, num_labels=3)))
    ours = imported(classifier, tmp_path / "classifier")
    assert not ours.training
    assert ours.config.head.dropout == classifier.dropout.p
    torch.testing.assert_close(ours(TOKENS, types=TYPES).logits, classifier(TOKENS, token_type_ids=TYPES).logits, **FP64)


def test_berts_gradients_are_ours(tmp_path: Path) -> None:
    theirs = spread(BertForMaskedLM(bert_config(VOCABULARY)))
    ours = imported(theirs, tmp_path)
    direction = torch.randn(2, 6, VOCABULARY, dtype=torch.float64)
    (theirs(TOKENS, token_type_ids=TYPES).logits * direction).sum().backward()
    (ours(TOKENS, types=TYPES).logits * direction).sum().backward()
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{}, {"activation_function": "relu", "n_inner": 20, "layer_norm_epsilon": 1e-3}, {"tie_word_embeddings": False}],
    ids=str,
)
def test_gpt2_scores_and_gradients_are_alike(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = spread(GPT2LMHeadModel(gpt2_config(VOCABULARY, **options)))
    ours = imported(theirs, tmp_path)
    expected, actual = theirs(TOKENS).logits, ours(TOKENS).logits
    torch.testing.assert_close(actual, expected, **FP64)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    assert_same_gradients(ours, theirs)


def test_gpt2_without_its_output_and_in_several_files(tmp_path: Path) -> None:
    theirs = spread(GPT2Model(gpt2_config(VOCABULARY)))
    ours = imported(theirs, tmp_path, max_shard_size="5KB")
    assert not (tmp_path / "model.safetensors").exists()
    torch.testing.assert_close(ours(TOKENS).states, theirs(TOKENS)[0], **FP64)


@pytest.mark.parametrize("options", [{}, {"do_layer_norm_before": False}, {"activation_function": "gelu"}], ids=str)
def test_opt_scores_alike(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = spread(OPTForCausalLM(opt_config(VOCABULARY, **options)))
    ours = imported(theirs, tmp_path)
    expected = theirs(TOKENS, attention_mask=MASK.long()).logits
    torch.testing.assert_close(ours(TOKENS, mask=MASK).logits[MASK], expected[MASK], **FP64)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_function": "swish"},
        {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCABULARY},
    ],
    ids=["one table", "two tables"],
)
def test_marian_scores_alike(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = spread(MarianMTModel(marian_config(VOCABULARY, **options)))
    ours = imported(theirs, tmp_path)
    target = torch.cat([torch.full((2, 1), VOCABULARY - 1), TOKENS[:, :4]], dim=1)
    found = theirs(TOKENS, attention_mask=MASK.long(), decoder_input_ids=target)
    # Marian starts with the padding token, which is to be read here.
    actual = ours(TOKENS, target, source_mask=MASK, target_mask=torch.ones_like(target).bool())
    # Its sinusoids are rounded to fp32.
    torch.testing.assert_close(actual.logits, found.logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("config", "dropout"), [({"hidden_dropout_prob": 0.2}, 0.2), ({"classifier_dropout": 0.3}, 0.3)])
def test_a_classifier_has_the_dropout_of_its_folder(config: dict[str, float], dropout: float, tmp_path: Path) -> None:
    theirs = BertForSequenceClassification(bert_config(VOCABULARY, **config))
    assert imported(theirs, tmp_path).config.head.dropout == theirs.dropout.p == dropout


def test_an_encoder_that_predicts_a_number_says_so(tmp_path: Path) -> None:
    ours = imported(BertForSequenceClassification(bert_config(VOCABULARY, num_labels=1)), tmp_path)
    assert BertConfig(**Bert().foreign_config(ours.config)).problem_type == "regression"
    several = ours.config.head.__class__(outputs=2)
    assert BertConfig(**Bert().foreign_config(replace(ours.config, head=several))).problem_type is None


@pytest.mark.parametrize(
    "theirs",
    [
        BertModel(bert_config(VOCABULARY)),
        GPT2LMHeadModel(gpt2_config(VOCABULARY)),
        OPTForCausalLM(opt_config(VOCABULARY)),
        MarianMTModel(marian_config(VOCABULARY)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_an_option_that_is_left_out_has_the_value_of_transformers(theirs: PreTrainedModel, tmp_path: Path) -> None:
    whole = imported(theirs, tmp_path)
    usual = type(theirs.config)().to_dict()
    options = json.loads((tmp_path / "config.json").read_text())
    kept = {name: value for name, value in options.items() if name == "model_type" or usual.get(name, not value) != value}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert kl.from_huggingface(tmp_path).config == whole.config


@pytest.mark.parametrize(
    "theirs",
    [
        BertModel(bert_config(VOCABULARY, tie_word_embeddings=False)),
        GPT2Model(gpt2_config(VOCABULARY, tie_word_embeddings=False)),
        OPTModel(opt_config(VOCABULARY, tie_word_embeddings=False)),
        Qwen3Model(Qwen3Config(vocab_size=VOCABULARY, hidden_size=16, head_dim=8, num_attention_heads=2,
                               num_key_value_heads=2, intermediate_size=24, num_hidden_layers=1)),
    ],
    ids=lambda model: type(model).__name__,
)  # fmt: skip
def test_a_base_model_has_no_output_that_could_be_its_own(theirs: Any, tmp_path: Path) -> None:
    ours = imported(spread(theirs), tmp_path)
    torch.testing.assert_close(ours(TOKENS).states, theirs(TOKENS)[0], rtol=1e-6, atol=1e-6)


def assert_same_gradients(ours: torch.nn.Module, theirs: PreTrainedModel) -> None:
    """Under their names, by a table of ours that was held to the values before; tied weights once."""
    from kilolayer.huggingface.imported import FORMS
    from kilolayer.huggingface.weights import to_theirs

    gradients = {name: _gradient(each) for name, each in ours.named_parameters()}
    found = to_theirs(FORMS[theirs.config.model_type].entries(ours.config), gradients)
    expected = {name: _gradient(each) for name, each in theirs.named_parameters() if name in found}
    assert expected.keys() == found.keys()
    torch.testing.assert_close(found, expected, **FP64)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_names_of_old_checkpoints_are_known(tmp_path: Path) -> None:
    theirs = spread(BertForMaskedLM(bert_config(VOCABULARY)))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
           for name, each in tensors.items()}  # fmt: skip
    assert old.keys() != tensors.keys()
    old["bert.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    safetensors.torch.save_file(old, path)
    ours = kl.from_huggingface(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(ours(TOKENS).logits, theirs(TOKENS).logits, **FP64)


def edited(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return edit


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def without_a_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (edited(hidden_act="mish"), "the activation is 'mish'"),
        (edited(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        (edited(is_decoder=True), "is_decoder is True"),
        (edited(model_type="mamba"), "type is 'mamba'"),
        (edited(hidden_size=32), "the shape"),
        (edited(hidden_size="wide"), "dim"),
        (edited(num_hidden_layers=3), "is missing"),
        (edited(architectures=["BertForQuestionAnswering"]), "the architecture is 'BertForQuestionAnswering'"),
        (pickled, "pickles are not read"),
        (cut_off, "not a safetensors file"),
        (without_a_tensor, "bert.encoder.layer.1.output.dense.bias is missing"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ],
    ids=lambda value: None if callable(value) else value,
)
def test_what_is_none_of_ours_is_refused_by_name(damage: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    BertForMaskedLM(bert_config(VOCABULARY)).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(KilolayerError, match=what) as error:
        kl.from_huggingface(tmp_path)
    assert str(tmp_path) in error.value.where
    assert error.value.fix


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(KilolayerError, match="the folder of the model is 3, not a path"):
        kl.from_huggingface(3)  # pyright: ignore[reportArgumentType]


def test_a_model_of_another_kind_of_output_is_refused(tmp_path: Path) -> None:
    BertForTokenClassification(bert_config(VOCABULARY)).save_pretrained(tmp_path)
    with pytest.raises(KilolayerError, match="BertForTokenClassification"):
        kl.from_huggingface(tmp_path)


@pytest.mark.slow
def test_transformers_is_not_imported_and_nothing_is_fetched(tmp_path: Path) -> None:
    spread(GPT2LMHeadModel(gpt2_config(VOCABULARY))).save_pretrained(tmp_path)
    code = (
        "import sys, kilolayer as kl; kl.from_huggingface(sys.argv[1]);"
        "assert not {'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
