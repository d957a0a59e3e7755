"""Groups for an optimizer of torch: the same update as the trainer's own, by depth, by role and by what decays."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.tasks.train_config import TrainConfig

SMALL: dict[str, Any] = {"vocab_size": 13, "dim": 16, "heads": 2, "ffn_dim": 24, "dtype": torch.float64}
TOKENS = torch.randint(1, 13, (3, 6), generator=torch.Generator().manual_seed(1))


def make(kind: str) -> Any:
    torch.manual_seed(3)
    complete = kl.recipes.get("complete_p", base_width=4, base_depth=1)
    match kind:
        case "complete_p":
            return kl.Decoder(**SMALL, layers=3, recipe=complete, tie_embeddings=False)
        case "sparse":
            return kl.Decoder(**SMALL, layers=2, recipe="sub_ln", moe=kl.MoE(experts=3, top_k=2, every=2))
        case "pair":
            return kl.EncoderDecoder(**SMALL, encoder_layers=2, decoder_layers=3, recipe="x0_residual")
        case _:
            return kl.Encoder(**SMALL, layers=2, recipe=kind, positions="learned", max_length=8)


def loss_of(model: nn.Module) -> torch.Tensor:
    out = model(TOKENS, TOKENS) if isinstance(model, kl.EncoderDecoder) else model(TOKENS)
    return out.logits.square().mean() + out.router_loss


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["complete_p", "sparse", "pair", "rezero", "deepnorm"])
def test_twenty_steps_of_torchs_adamw_are_those_of_the_trainer(kind: str) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.3, "layer_decay": 0.7, "eps": 1e-3}
    ours, theirs = make(kind), make(kind)
    config = TrainConfig(optimizer="adamw", warmup_steps=0, **settings)
    optimizer = make_optimizer(ours, config)
    groups = kl.parameter_groups(theirs, **settings)
    torchs = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2))
    for _ in range(20):
        loss_of(ours).backward()
        optimizer.update(torch.ones(()), torch.tensor(True))
        optimizer.clear()
        loss_of(theirs).backward()
        torchs.step()
        torchs.zero_grad()
    starts = make(kind).parameters()
    for (name, mine), other, start in zip(ours.named_parameters(), theirs.parameters(), starts, strict=True):
        difference, moved = (float((mine - each).abs().max().detach()) for each in (other, start))
        assert difference <= min(1e-10, 1e-6 * moved), name


def test_every_weight_is_in_one_group_and_what_decays_is_a_matrix() -> None:
    model = make("sparse")
    groups = kl.parameter_groups(model, lr=0.1, weight_decay=0.2)
    weights = [weight for group in groups for weight in group["params"]]
    assert set(weights) == set(model.parameters())
    assert len(weights) == len(set(weights))
    names = {weight: name for name, weight in model.named_parameters()}
    decayed = {names[weight] for group in groups if group["weight_decay"] for weight in group["params"]}
    assert decayed == {
        name
        for name, weight in model.named_parameters()
        if name.endswith(("weight", "router.embeddings")) and "norm" not in name
    }
    assert all("eps" not in group for group in groups)


# What multiplies states as a matrix, or holds a row for each token, position or expert.
DECAYED = {"Projection", "VocabularyProjection", "Embedding", "LearnedPositions", "ExpertProjection", "CosineRouter"}
DECAYED |= {"MultiheadAttention", "NonDynamicallyQuantizableLinear", "Linear"}  # those of torch


def adapted(recipe: str) -> nn.Module | None:
    """An encoder of torch with this recipe; None if its layers cannot have it."""
    for first, norm in ((True, nn.LayerNorm(16)), (False, None)):
        layer = nn.TransformerEncoderLayer(16, 2, 24, norm_first=first)
        model = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        with suppress(InputError):
            kl.adapt(model, recipe)
            return model
    return None


@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_no_norm_bias_or_scale_decays_under_any_recipe(recipe: str) -> None:
    ours = kl.Encoder(**SMALL, layers=2, recipe=recipe, moe=kl.MoE(experts=3, every=2), positions="t5")
    for model in filter(None, (ours, adapted(recipe))):
        groups = kl.parameter_groups(model, lr=0.1, weight_decay=0.2)
        decayed = {weight for group in groups if group["weight_decay"] for weight in group["params"]}
        for path, module in model.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                classes = {each.__name__ for each in type(module).__mro__}
                expected = bool(classes & DECAYED) and "bias" not in name and name != "log_temperature"
                assert (weight in decayed) == expected, f"{path}.{name}"


def test_learning_rates_fall_from_the_top_layer_down() -> None:
    model: Any = kl.Decoder(**SMALL, layers=3, recipe="pre_ln", tie_embeddings=False)
    rate = {weight: group["lr"] for group in kl.parameter_groups(model, lr=1.0, layer_decay=0.5) for weight in group["params"]}
    found = [rate[block.feedforward.f.output.weight] for block in model.decoder.blocks]
    assert found == [0.25, 0.5, 1.0]
    assert rate[model.embedding.weight] == 0.125
    assert rate[model.vocabulary.weight] == rate[model.decoder.top_norm.weight] == 1.0


def test_a_recipe_that_changes_eps_gives_it_to_its_groups_alone() -> None:
    groups = kl.parameter_groups(make("complete_p"), lr=1e-3)
    assert all(group["eps"] != 1e-8 for group in groups)
    assert min(group["eps"] for group in groups) == pytest.approx(1e-8 / (16 / 4 * 3))


def test_frozen_weights_are_left_out_and_odd_values_refused() -> None:
    model = make("sparse")
    kl.freeze_experts(model)
    kept = [weight for group in kl.parameter_groups(model, lr=1.0) for weight in group["params"]]
    assert all(weight.requires_grad for weight in kept)
    with pytest.raises(InputError, match="no trainable weights"):
        kl.parameter_groups(model.requires_grad_(False), lr=1.0)
    odd: list[dict[str, Any]] = [
        *({"lr": value} for value in (0.0, "1e-3", None)),
        *({"lr": 1.0, name: value} for name, value in (("layer_decay", 1.5), ("weight_decay", -1.0), ("eps", 0.0))),
    ]
    for wrong in odd:
        with pytest.raises(OptionError):
            kl.parameter_groups(model, **wrong)


def test_parameters_in_the_place_of_the_model_are_refused() -> None:
    with pytest.raises(InputError, match="needs a model"):
        kl.parameter_groups(nn.Linear(2, 2).parameters(), lr=1e-3)  # pyright: ignore[reportArgumentType]
