"""Learning rates by layer, against torch's own optimizers with a group of parameters for each rate."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.optimizers.weight_factors import layer_rates
from kilolayer.tasks.train_config import TrainConfig
from tests.optimizers.random_steps import take_steps

SIZES: dict[str, Any] = {"vocab_size": 9, "dim": 8, "heads": 2, "ffn_dim": 12}
KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "radam": partial(torch.optim.RAdam, decoupled_weight_decay=True)}
DECAY = 0.7
YES, ONE = torch.tensor(True), torch.tensor(1.0)


def encoder() -> kl.Encoder:
    torch.manual_seed(3)
    moe = kl.MoE(experts=3, every=3)
    return kl.Encoder(
        **SIZES, layers=3, recipe="pre_ln", positions="learned", max_length=5, head=kl.Head(), moe=moe, token_types=2
    )


def factors_by_name(model: torch.nn.Module, decay: float) -> dict[str, float]:
    rates = layer_rates(model, decay)
    return {name: rates.get(weight, 1.0) for name, weight in model.named_parameters()}


def written_out(name: str, depths: dict[str, int]) -> float:
    """The factor, from the name of a weight."""
    owner, *path = name.split(".")
    if owner in ("embedding", "source_embedding", "token_types"):
        return DECAY ** max(depths.values())
    if owner in depths and path[0] in ("positions", "input_norm"):
        return DECAY ** depths[owner]
    if owner in depths and (path[0] == "blocks" or path[:2] == ["stream", "norms"]):
        path = path[path[0] == "stream" :]
        return DECAY ** (depths[owner] - (int(path[1]) + 1))
    return 1.0


@pytest.mark.parametrize(
    ("model", "depths"),
    [
        (encoder(), {"encoder": 3}),
        (kl.Encoder(**SIZES, layers=2, positions="t5"), {"encoder": 2}),
        (kl.Decoder(**SIZES, layers=4, recipe="sub_ln", tie_embeddings=False), {"decoder": 4}),
        (kl.EncoderDecoder(**SIZES, encoder_layers=4, decoder_layers=2, tie_embeddings=False), {"encoder": 4, "decoder": 2}),
        (kl.EncoderDecoder(**SIZES, encoder_layers=2, decoder_layers=3, recipe="dlcl"), {"encoder": 2, "decoder": 3}),
        (kl.Decoder(**SIZES, layers=3, recipe="rezero"), {"decoder": 3}),
        (kl.Decoder(**SIZES, layers=2, recipe="peri_ln"), {"decoder": 2}),
    ],
    ids=["encoder with head", "encoder", "decoder", "encoder-decoder", "DLCL, one table", "ReZero", "normed input"],
)
def test_the_rate_falls_from_the_top_to_the_embedding(model: torch.nn.Module, depths: dict[str, int]) -> None:
    found = factors_by_name(model, DECAY)
    assert found == pytest.approx({name: written_out(name, depths) for name in found})
    assert set(factors_by_name(model, 1.0).values()) == {1.0}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sums", [False, True])
def test_each_layer_moves_as_a_group_of_torchs_optimizer(kind: Any, sums: bool) -> None:
    config = TrainConfig(optimizer=kind, lr=0.1, eps=1e-6, weight_decay=0.3, layer_decay=DECAY)
    model, peer = encoder(), encoder()
    peer.load_state_dict(model.state_dict())
    ours = make_optimizer(model, config, sums=sums)

    def update() -> None:
        ours.collect()
        ours.update(ONE, YES)
        ours.clear()

    def decayed(name: str, weight: Tensor) -> float:
        return 0.3 if weight.dim() > (2 if ".experts." in name else 1) else 0.0

    rates = {name: 0.1 * written_out(name, {"encoder": 3}) for name, _ in peer.named_parameters()}
    groups = [{"params": [w], "lr": rates[n], "weight_decay": decayed(n, w)} for n, w in peer.named_parameters()]
    take_steps(model, update, 8)
    take_steps(peer, KINDS[kind](groups, betas=(0.9, 0.98), eps=1e-6, foreach=False).step, 8)
    torch.testing.assert_close(dict(model.named_parameters()), dict(peer.named_parameters()), rtol=1e-5, atol=1e-6)


def test_rounded_weights_follow_their_masters_at_their_own_rates() -> None:
    config = TrainConfig(optimizer="adamw", lr=0.1, eps=1e-6, weight_decay=0.3, layer_decay=DECAY)
    for sums in (False, True):
        model, peer = encoder(), encoder()
        peer.load_state_dict(model.state_dict())
        precise = model.cast_weights(torch.bfloat16)
        ours, theirs = make_optimizer(model, config, precise, sums=sums), make_optimizer(peer, config, sums=sums)
        for each, optimizer in ((model, ours), (peer, theirs)):
            generator = torch.Generator().manual_seed(5)
            for _ in range(4):
                for parameter in each.parameters():
                    gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
                    parameter.grad = gradient.to(parameter.dtype)
                optimizer.collect()
                optimizer.update(ONE, YES)
                optimizer.clear()
        torch.testing.assert_close(ours.precise(), theirs.precise(), rtol=1e-6, atol=1e-6)
        for name, weight in model.named_parameters():
            assert torch.equal(weight, ours.precise()[name].to(weight.dtype))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sums", [False, True])
def test_the_norms_of_updates_know_the_rates(kind: Any, sums: bool) -> None:
    model = encoder()
    optimizer = make_optimizer(model, TrainConfig(optimizer=kind, lr=0.1, weight_decay=0.3, layer_decay=DECAY), sums=sums)
    for _ in range(7):
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.collect()
        found = optimizer.update(ONE, YES, measures=True)
        optimizer.clear()
        found = {
            name: float(norm)
            for group, norms in zip(optimizer.groups, found or [], strict=True)
            for name, norm in zip(group.names, norms, strict=True)
        }
        changed = {name: float((weight.detach() - before[name]).norm()) for name, weight in model.named_parameters()}
        assert found == pytest.approx(changed, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_norms_between_the_layers_of_dlcl_belong_to_what_they_follow_or_feed(norm: str) -> None:
    model = kl.Encoder(**SIZES, layers=3, recipe=kl.recipes.get("dlcl", norm=norm))
    found = factors_by_name(model, DECAY)
    rates = [found[f"encoder.stream.norms.{index}.weight"] for index in range(3)]
    # Pre: LN_k normalizes the output of layer k. Post: the norm of a sum feeds the layer above, and the last one the top.
    assert rates == pytest.approx([DECAY**2, DECAY, 1] if norm == "pre" else [DECAY, 1, 1])
    assert found["encoder.stream.weight"] == 1
