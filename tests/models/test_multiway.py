"""`model.multiway`: an encoder with norms and projections for each of two modalities, in all that is done with a model."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.huggingface.foreign_class import shared_misfits
from kilolayer.huggingface.remote_class import remote_files
from kilolayer.layers.multiway import Multiway
from kilolayer.optimizers.hidden_matrices import hidden_matrices
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.probe.norm_inputs import norm_inputs
from kilolayer.runs.budget import Work, budget
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.norms import columns_of

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2, "vocab_size": 11}
TOKENS = torch.tensor([[3, 5, 2, 9, 4, 0, 0], [8, 1, 7, 1, 8, 6, 2], [4, 4, 10, 3, 1, 9, 0]])
SPLIT = 3


def build(recipe: Any = "deepnorm", *, multiway: int | None = 2, dtype: Any = torch.float64, **options: Any) -> kl.Encoder:
    """A model, none of whose parameters is at a start, such as 0 or 1, that would hide a mistake."""
    config = kl.ModelConfig(shape="encoder", recipe=recipe, multiway=multiway, **{**SIZES, **options})
    model = kl.build_model(config, dtype=dtype, seed=0)
    assert isinstance(model, kl.Encoder)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(weight)
    return model


@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln"])
def test_torchscale_computes_the_same_with_the_same_weights(recipe: str) -> None:
    torchscale = pytest.importorskip("torchscale.architecture.encoder")
    config = pytest.importorskip("torchscale.architecture.config").EncoderConfig
    options = {"activation_fn": "relu", "dropout": 0.0, "no_output_layer": True, "vocab_size": 11, "multiway": True}
    sizes = {"encoder_embed_dim": 16, "encoder_attention_heads": 2, "encoder_ffn_embed_dim": 24, "encoder_layers": 2}
    named = {"deepnorm": {"deepnorm": True, "subln": False}, "sub_ln": {"subln": True}}[recipe]
    theirs = torchscale.Encoder(config(**options, **sizes, **named)).double()
    ours = build(recipe, vocab_size=None, positions="none", pad_id=None)
    theirs.load_state_dict({name: value for name, value in _torchscale_weights(ours).items() if name in theirs.state_dict()})
    embeddings = torch.randn(2, 7, 16, dtype=torch.float64)
    for split, their_split in ((3, 3), (0, 0), (7, -1)):
        ours.zero_grad()
        theirs.zero_grad()
        found = ours(embeddings=embeddings, split=split).states
        expected = theirs(None, token_embeddings=embeddings, multiway_split_position=their_split)["encoder_out"]
        # TorchScale computes softmax and activation in fp32, whatever the dtype is.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        found.square().sum().backward()
        expected.square().sum().backward()
        gradients = _torchscale_weights(
            ours, of=lambda weight: torch.zeros_like(weight) if weight.grad is None else weight.grad
        )
        for name, weight in theirs.named_parameters():
            given = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(given, gradients[name], rtol=1e-4, atol=1e-5 * max(1.0, float(given.abs().max())))


def _torchscale_weights(model: kl.Encoder, of: Any = lambda weight: weight.detach()) -> dict[str, Tensor]:
    """Our weights, or what `of` makes of them, under TorchScale's names."""
    found = {}
    words = {
        "encoder.blocks": "layers",
        "self_attention.f.output": "self_attn.out_proj",
        "self_attention.f.inner_norm": "self_attn.inner_attn_ln",
        "self_attention.out_norm": "self_attn_layer_norm",
        "self_attention.pre_norm": "self_attn_layer_norm",
        "feedforward.out_norm": "final_layer_norm",
        "feedforward.pre_norm": "final_layer_norm",
        "encoder.top_norm": "layer_norm",
    }
    for name, weight in model.named_parameters():
        value = of(weight)
        for mine, other in words.items():
            name = name.replace(mine, other)
        if "query_key_value" in name:
            for part, letter in zip(value.chunk(3), "qkv", strict=True):
                found[name.replace("self_attention.f.query_key_value", f"self_attn.{letter}_proj")] = part
        elif ".feedforward.f." in name:
            head, _, tail = name.partition(".feedforward.f.")
            part, way, kind = tail.split(".")
            inner = {"input": "fc1", "output": "fc2", "inner_norm": "ffn_layernorm"}[part]
            found[f"{head}.ffn.{way}.{inner}.{kind}"] = value
        else:
            found[name] = value
    return found


def test_modalities_start_from_draws_of_their_own() -> None:
    model = kl.build_model({"shape": "encoder", **SIZES, "multiway": 2}, seed=3)
    pairs = [module for module in model.modules() if isinstance(module, Multiway)]
    assert len(pairs) == 2 * (2 + 2 + 2)  # in each layer two norms, and two projections in attention and in the network
    for pair in pairs:
        for (name, first), (_, second) in zip(pair.A.named_parameters(), pair.B.named_parameters(), strict=True):
            assert torch.equal(first, second) == (first.dim() == 1), name
    first, second = (model.get_parameter(f"encoder.blocks.0.feedforward.f.input.{way}.weight") for way in "AB")
    assert first.std().item() == pytest.approx(second.std().item(), rel=0.2)


@pytest.mark.parametrize("positions", ["t5", "rotary", "none"])
def test_two_modalities_of_the_same_weights_are_one(positions: Any) -> None:
    both, one = build(positions=positions), build(positions=positions, multiway=None)
    weights = one.state_dict()
    both.load_state_dict({name: weights[name.replace(".A.", ".").replace(".B.", ".")] for name in both.state_dict()})
    torch.testing.assert_close(both(TOKENS, split=SPLIT).logits, one(TOKENS).logits, rtol=1e-12, atol=1e-12)


def test_embeddings_and_tokens_together_are_one_sequence() -> None:
    model = build(positions="learned", max_length=7)
    patches = torch.randn(3, 4, 16, dtype=torch.float64)
    assert model.embedding is not None
    found = model(TOKENS, embeddings=patches)
    embedded = torch.cat([patches, model.embedding(TOKENS)], dim=1)
    real = torch.cat([torch.ones(3, 4, dtype=torch.bool), TOKENS != 0], dim=1)
    expected = model(embeddings=embedded, mask=real, split=4)
    assert torch.equal(found.logits, expected.logits)
    assert found.logits.shape == (3, 11, 11)
    assert not torch.equal(found.logits, model(embeddings=embedded, split=4).logits)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "split is None"),
        ({"split": 8}, "here 0 to 7"),
        ({"split": -1}, "here 0 to 7"),
        ({"split": torch.tensor([1, 2, 3])}, "here 0 to 7"),
        ({"embeddings": torch.zeros(3, 4, 16, dtype=torch.float64), "split": 5}, "remove split"),
        ({"embeddings": torch.zeros(2, 4, 16, dtype=torch.float64)}, "of 2 sequences, and tokens of 3"),
    ],
)
def test_a_wrong_split_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        build()(TOKENS, **options)


def test_a_split_without_two_modalities_is_refused() -> None:
    with pytest.raises(InputError, match="remove split"):
        build(multiway=None)(TOKENS, split=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"multiway": 3}, "multiway"),
        ({"shape": "decoder"}, "of which modality a generated token is"),
        ({"shape": "encoder_decoder"}, "of which modality a generated token is"),
        ({"moe": {"experts": 4}}, "experts replace these networks"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        kl.ModelConfig(**{"shape": "encoder", **SIZES, "multiway": 2, **options})


def test_each_modality_has_a_table_of_positions_as_long_as_its_part() -> None:
    model = build(positions="learned", max_length=4)
    model(TOKENS, split=3)
    with pytest.raises(InputError, match="5 positions is longer than the 4"):
        model(TOKENS, split=5)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = build("sub_ln", positions="learned", max_length=7, qk_norm=True)
    loaded = kl.load_model(kl.save(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert torch.equal(loaded(TOKENS, split=SPLIT).logits, model(TOKENS, split=SPLIT).logits)


def test_copies_do_not_share_a_split() -> None:
    model = build()
    other = copy.deepcopy(model)
    expected = model(TOKENS, split=SPLIT).logits
    for mine, copied in zip(model.encoder.layers(), other.encoder.layers(), strict=True):
        assert mine.split is not copied.split
        assert all(pair.split is copied.split for pair in copied.modules() if isinstance(pair, Multiway))
    assert torch.equal(other(TOKENS, split=SPLIT).logits, expected)


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("recipe", "options", "max_length"),
    [
        ("deepnorm", {}, None),
        ("deepnorm", {"qk_norm": True, "embedding_norm": True}, None),
        ({"name": "admin", "weight": "trainable"}, {"positions": "learned", "max_length": 7}, None),
        ({"name": "admin", "weight": "trainable"}, {}, 7),
    ],
    ids=str,
)
def test_folded(recipe: Any, options: dict[str, Any], max_length: int | None) -> None:
    model = build(recipe, **options)
    plain = kl.fold(model, max_length=max_length)
    assert plain.config.recipe.name == "post_ln"
    real = TOKENS != 0
    for split in (0, SPLIT, 7):
        found, expected = (each(TOKENS, split=split).logits[real] for each in (plain, model))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_calibrated_over_both_modalities() -> None:
    model = build("admin")
    kl.calibrate(model, {"tokens": TOKENS, "split": SPLIT})
    branches: list[float] = []
    for sublayer in model.encoder.sublayers():
        sublayer.branch.register_forward_hook(
            lambda _module, _inputs, output: branches.append(float(output[TOKENS != 0].var(correction=0)))
        )
    scales = [float(sublayer.skip.weight.flatten()[0]) for sublayer in model.encoder.sublayers()]  # pyright: ignore
    for sublayer in model.encoder.sublayers():
        sublayer.skip.weight.fill_(1.0)  # pyright: ignore
    with torch.no_grad():
        model(TOKENS, split=SPLIT)
    expected = [1.0, *(sum(branches[: index + 1]) ** 0.5 for index in range(3))]
    assert scales == pytest.approx(expected, rel=1e-9)


def test_optimizers_know_the_weights_of_both() -> None:
    model = build(dtype=torch.float32)
    matrices = hidden_matrices(model)
    assert sum(len(each.rows) for each in matrices.values()) == 2 * 2 * (3 + 1 + 1 + 1)
    groups = kl.parameter_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.5)
    of_weight = {id(weight): group for group in groups for weight in group["params"]}
    for name, weight in model.named_parameters():
        group = of_weight[id(weight)]
        assert group["weight_decay"] == (0.1 if weight.dim() > 1 else 0.0), name
        if ".blocks." in name:
            assert group["lr"] == (0.5 if "blocks.0" in name else 1.0), name
    for rule in ("adam", "muon"):
        optimizer = make_optimizer(model, TrainConfig(optimizer=rule))  # pyright: ignore
        columns = torch.cat(columns_of(model, optimizer)).bincount(minlength=3)
        assert columns.tolist() == [24, 24, 1]


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_it_learns_also_from_batches_of_one_modality(rule: str) -> None:
    torch.manual_seed(0)
    model = build("pre_ln", dtype=torch.float32)
    optimizer = make_optimizer(model, TrainConfig(optimizer=rule, lr=2e-2))  # pyright: ignore
    labels = TOKENS.flip(1)

    def step(split: int) -> float:
        loss = nn.functional.cross_entropy(model(TOKENS, split=split).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.collect()
        optimizer.update(torch.tensor(1.0), torch.tensor(True))
        optimizer.clear()
        return float(loss.detach())

    losses = [step(split) for split in (SPLIT, 0, 7) * 15]
    assert all(losses[-1 - index] < 0.5 * losses[2 - index] for index in range(3)), losses


def test_the_input_of_each_norm_is_measured_by_modality() -> None:
    model = build("pre_ln")
    found = norm_inputs(model, lambda each: each(TOKENS, split=SPLIT).logits.square().mean())["encoder"]
    seen: dict[str, Tensor] = {}
    norm = model.encoder.layers()[1].feedforward.pre_norm
    norm.register_forward_pre_hook(lambda _module, inputs: seen.update(x=inputs[0]))
    model(TOKENS, split=SPLIT)
    real = TOKENS != 0
    for way, part in (("A", slice(None, SPLIT)), ("B", slice(SPLIT, None))):
        expected = float(seen["x"].detach()[:, part][real[:, part]].square().mean().sqrt())
        assert found[f"feedforward.pre_norm.{way}"][1] == pytest.approx(expected)


def test_the_plan_counts_both_and_what_a_position_uses() -> None:
    options = {"shape": "encoder", **SIZES, "positions": "learned", "max_length": 10}
    alone, both = (kl.ModelConfig(**options, multiway=ways) for ways in (None, 2))
    work = Work(batch=3, length=10, precision="fp32")
    one, two = budget(alone, work), budget(both, work)
    assert two.parameters == sum(weight.numel() for weight in kl.build_model(both).parameters())
    assert two.parameters == 2 * one.parameters - one.parts["embedding"]
    assert two.active_parameters == one.active_parameters == one.parameters
    assert two.forward_flops_per_token == one.forward_flops_per_token
    assert two.training.activations == pytest.approx(one.training.activations, rel=0.25)


def test_an_export_says_why_there_is_none() -> None:
    model = build()
    assert "it has weights for each of two modalities (multiway)" in list(shared_misfits(model.config))
    with pytest.raises(OptionError, match="which positions are of which"):
        remote_files(SimpleNamespace(model=model), "", {})  # pyright: ignore[reportArgumentType]
