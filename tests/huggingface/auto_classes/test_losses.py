"""Labels to losses, and a training step as Transformers' trainers take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from tests.huggingface.auto_classes.small_models import SOURCE, bare_model, wrapped

LABELS = torch.tensor([[11, 12, 13, 3], [14, 3, -100, -100]])


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log p over the labels that count, one by one."""
    found = [
        -logits[row, index].double().log_softmax(-1)[label]
        for row, line in enumerate(labels.tolist())
        for index, label in enumerate(line)
        if label != -100
    ]
    return torch.stack(found).mean()


def test_a_translators_loss_is_that_of_its_labels() -> None:
    model = wrapped(bare_model("encoder_decoder"))
    out = model(SOURCE, attention_mask=SOURCE != 0, labels=LABELS)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(LABELS), torch.tensor([[2, 11, 12, 13], [2, 14, 3, 0]]))
    logits = model(SOURCE, attention_mask=SOURCE != 0, decoder_input_ids=torch.tensor([[2, 11, 12, 13], [2, 14, 3, 0]])).logits
    torch.testing.assert_close(out.loss.double(), by_hand(logits, LABELS), atol=1e-5, rtol=1e-5)


def test_a_language_models_loss_is_of_the_token_after_each() -> None:
    model = wrapped(bare_model("decoder"))
    labels = SOURCE.masked_fill(SOURCE == 0, -100)
    out = model(SOURCE, attention_mask=SOURCE != 0, labels=labels)
    torch.testing.assert_close(out.loss.double(), by_hand(out.logits[:, :-1], labels[:, 1:]), atol=1e-5, rtol=1e-5)


def test_a_masked_language_models_loss_is_of_the_hidden_tokens() -> None:
    model = wrapped(bare_model("encoder"))
    labels = torch.full_like(SOURCE, -100)
    labels[0, 2], labels[1, 0] = 9, 4
    out = model(SOURCE, attention_mask=SOURCE != 0, labels=labels)
    torch.testing.assert_close(out.loss.double(), by_hand(out.logits, labels), atol=1e-5, rtol=1e-5)


def test_a_classifiers_loss_is_of_classes_or_of_numbers() -> None:
    model = wrapped(bare_model("encoder", head=kl.Head(outputs=3)))
    out = model(SOURCE, attention_mask=SOURCE != 0, labels=torch.tensor([2, 0]))
    torch.testing.assert_close(out.loss.double(), by_hand(out.logits[:, None], torch.tensor([[2], [0]])), atol=1e-5, rtol=1e-5)
    number = wrapped(bare_model("encoder", head=kl.Head(outputs=1)))
    assert number.config.problem_type == "regression"
    out = number(SOURCE, attention_mask=SOURCE != 0, labels=torch.tensor([1.5, -2.0]))
    wanted = ((out.logits[0, 0] - 1.5) ** 2 + (out.logits[1, 0] + 2.0) ** 2) / 2
    torch.testing.assert_close(out.loss, wanted)


@pytest.mark.parametrize("shape", ["encoder_decoder", "decoder", "encoder"])
def test_every_weight_learns_and_routers_are_evened_out_while_training(shape: str) -> None:
    model: Any = wrapped(bare_model(shape, "dlcl", moe=kl.MoE(experts=2, top_k=2, every=1), tie_embeddings=False))
    inputs = {"input_ids": SOURCE, "attention_mask": SOURCE != 0}
    labels = LABELS if shape == "encoder_decoder" else SOURCE.masked_fill(SOURCE == 0, -100)
    plain = model.eval()(**inputs, labels=labels).loss
    training = model.train()(**inputs, labels=labels)
    bare = (
        model.model(SOURCE, model.prepare_decoder_input_ids_from_labels(LABELS))
        if shape == "encoder_decoder"
        else model.model(SOURCE)
    )
    torch.testing.assert_close(training.loss - plain, bare.router_loss, atol=1e-5, rtol=1e-4)
    assert training.get("past_key_values") is None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training.loss.backward()
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in model.parameters())
    optimizer.step()
    assert model(**inputs, labels=labels).loss < training.loss
