"""Attention weights on request, and PEFT's adapters by the type of a task, as with Transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.huggingface.auto_classes import KilolayerModel
from tests.huggingface.auto_classes.small_models import SOURCE, TARGET, bare_model, inputs_of, logits_of, wrapped

TASKS: dict[str, tuple[str, dict[str, Any], torch.Tensor]] = {
    "CAUSAL_LM": ("decoder", {}, SOURCE),
    "SEQ_2_SEQ_LM": ("encoder_decoder", {}, TARGET),
    "SEQ_CLS": ("encoder", {"head": kl.Head(outputs=2)}, torch.tensor([0, 1])),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.matrix(3)
@pytest.mark.parametrize("task", TASKS)
def test_adapters_for_a_task_train_and_nothing_else_does(task: str) -> None:
    peft = pytest.importorskip("peft")
    shape, options, labels = TASKS[task]
    model = bare_model(shape, **options)
    before = logits_of(model)
    given = wrapped(model)
    inputs = inputs_of(given)
    config = peft.LoraConfig(r=2, target_modules=["query_key_value", "output"], exclude_modules=["head.output"], task_type=task)
    tuned = peft.get_peft_model(given, config)
    torch.testing.assert_close(tuned(**inputs).logits, before)
    tuned(**inputs, labels=labels).loss.backward()
    trained = {name for name, weight in tuned.named_parameters() if weight.grad is not None}
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    if task != "SEQ_CLS":
        written = tuned.generate(input_ids=SOURCE[:1], max_new_tokens=3, do_sample=False)
        assert torch.equal(written, wrapped(bare_model(shape)).generate(SOURCE[:1], max_new_tokens=3, do_sample=False))


@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder_decoder"])
def test_attention_weights_are_the_models_own(shape: str) -> None:
    model = bare_model(shape)
    given = wrapped(model)
    inputs = inputs_of(given)
    if shape == "encoder_decoder":
        own = model(SOURCE, TARGET, attention_weights=True)
        expected = {"decoder_attentions": own.attention, "cross_attentions": own.cross_attention}
        expected["encoder_attentions"] = own.encoder_attention
    else:
        expected = {"attentions": model(SOURCE, attention_weights=True).attention}
    for each in (given, KilolayerModel.from_kilolayer(model)):
        found = each(**inputs, output_attentions=True)
        for name, weights in expected.items():
            assert len(found[name]) == 2
            for ours, theirs in zip(weights, found[name], strict=True):
                torch.testing.assert_close(theirs, ours)
    assert not {*expected} & given(**inputs).keys()
    if shape == "encoder_decoder":
        read = given.get_encoder()(SOURCE, inputs["attention_mask"], output_attentions=True)
        rest = {name: value for name, value in inputs.items() if name != "input_ids"}
        again = given(**rest, encoder_outputs=read)
        torch.testing.assert_close(again.logits, given(**inputs).logits)
        assert again.encoder_hidden_states is None
