"""Heads that score pixels, against a recomputation from the state dict by torch's functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.layers.convolution import Convolution, Doubling
from kilolayer.runs.budget import Work, budget
from kilolayer.speed.fast_stack import FastStack

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 6}
GRID = (4, 6)


def segmenter(kind: str, dtype: torch.dtype = torch.float64, class_token: bool = True, **options: Any) -> kl.ImageEncoder:
    torch.manual_seed(0)
    head: dict[str, Any] = {"kind": kind, "classes": 5, "dropout": 0.0}
    head |= {"channels": 8} if kind == "upernet" else {}
    image = kl.ImageInput(size="16x24", patch=4, class_token=class_token)
    model = kl.ImageEncoder(image, **{**SIZES, **options}, map_head=head, dtype=dtype)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def pictures(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, 16, 24, dtype=dtype, generator=torch.Generator().manual_seed(1))


def naive_upernet(weights: dict[str, Tensor], states: list[Tensor]) -> Tensor:
    """The equations of models/upernet.py on states [patches, dim] of one image."""

    def convolve(name: str, x: Tensor) -> Tensor:
        kernel = weights[f"{name}.0.weight"]
        y = F.conv2d(x, kernel, weights[f"{name}.0.bias"], padding=kernel.shape[-1] // 2)
        return F.relu(F.group_norm(y, 2, weights[f"{name}.1.weight"], weights[f"{name}.1.bias"]))

    def doubled(name: str, x: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride=2)

    def at(x: Tensor, size: Any) -> Tensor:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)

    maps = []
    for index, state in enumerate(states):
        normed = F.layer_norm(state, (16,), weights[f"norms.{index}.weight"], weights[f"norms.{index}.bias"])
        maps.append(normed.T.reshape(1, 16, *GRID))
    finest = doubled("scalings.0.0", maps[0])
    finest = F.gelu(F.group_norm(finest, 4, weights["scalings.0.1.weight"], weights["scalings.0.1.bias"]))
    maps = [doubled("scalings.0.3", finest), doubled("scalings.1", maps[1]), maps[2], F.max_pool2d(maps[3], 2, ceil_mode=True)]
    assert [tuple(each.shape[2:]) for each in maps] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    pooled = [convolve(f"pooled.{i}", F.adaptive_avg_pool2d(maps[3], side)) for i, side in enumerate((1, 2, 3, 6))]
    top = convolve("top", torch.cat([maps[3], *(at(each, (2, 3)) for each in pooled)], dim=1))
    third = convolve("laterals.2", maps[2]) + at(top, (4, 6))
    second = convolve("laterals.1", maps[1]) + at(third, (8, 12))
    first = convolve("laterals.0", maps[0]) + at(second, (16, 24))
    smooth = [convolve(f"smooths.{i}", each) for i, each in enumerate((first, second, third))]
    fused = convolve("fuse", torch.cat([at(each, (16, 24)) for each in (*smooth, top)], dim=1))
    return F.conv2d(fused, weights["output.weight"], weights["output.bias"])[0]


@pytest.mark.parametrize("class_token", [True, False])
def test_upernet_reads_the_states_of_four_depths(class_token: bool) -> None:
    model = segmenter("upernet", class_token=class_token)
    assert model.map_head is not None
    assert model.map_head.depths == (2, 3, 5, 6)
    out = model(pictures(), hidden_states=True)
    assert out.logits.shape == (2, 5, 16, 24)
    weights = dict(model.map_head.named_parameters())
    for row in range(2):
        states = [out.hidden_states[depth][row, int(class_token) :] for depth in (2, 3, 5, 6)]
        torch.testing.assert_close(out.logits[row], naive_upernet(weights, states), rtol=1e-10, atol=1e-10)
    assert model(pictures()).hidden_states is None


def test_a_linear_map_is_upsampled_from_patches_to_pixels() -> None:
    model = segmenter("linear")
    out, weights = model(pictures()), dict(model.named_parameters())
    matrix = weights["map_head.output.weight"].view(5, 16)
    for row in range(2):
        scores = (out.states[row, 1:] @ matrix.T + weights["map_head.output.bias"]).T.reshape(1, 5, *GRID)
        expected = F.interpolate(scores, size=(16, 24), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(out.logits[row], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["upernet", "linear"])
def test_images_do_not_influence_one_another(kind: str) -> None:
    model = segmenter(kind).train()
    together = model(pictures()).logits
    torch.testing.assert_close(together[1:], model(pictures()[1:]).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "rezero", "dlcl", "resi_dual"])
@pytest.mark.parametrize("kind", ["upernet", "linear"])
def test_it_trains_is_saved_and_runs_fast(kind: str, recipe: str, tmp_path: Path) -> None:
    model = segmenter(kind, torch.float32, recipe=recipe)
    images, labels = pictures(torch.float32), torch.arange(2 * 16 * 24).view(2, 16, 24) // 40 % 5
    optimizer = torch.optim.AdamW(kl.parameter_groups(model, lr=3e-3, layer_decay=0.9))
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    form = kl.fast(model.eval())
    assert type(form.encoder) is FastStack
    assert torch.equal(form(images).logits, model(images).logits)
    kl.save(model, tmp_path / "model")
    assert torch.equal(kl.load_model(tmp_path / "model")(images).logits, model(images).logits)


def test_other_sizes_and_lower_precision() -> None:
    model = segmenter("upernet", torch.float32)
    assert model(torch.randn(1, 3, 20, 12)).logits.shape == (1, 5, 20, 12)
    before = model(pictures(torch.float32)).logits
    model.cast_weights(torch.bfloat16)
    after = model(pictures(torch.float32)).logits
    assert after.dtype == torch.float32
    torch.testing.assert_close(after, before, rtol=0.2, atol=0.5)


def test_initial_weights_keep_the_scale_of_maps() -> None:
    torch.manual_seed(0)
    model = kl.ImageEncoder(kl.ImageInput(size=16, patch=4), **{**SIZES, "dim": 64}, map_head=kl.MapHead(channels=128))
    assert model.map_head is not None
    found = {Convolution: 0, Doubling: 0}
    for module in model.map_head.modules():
        if isinstance(module, Convolution | Doubling):
            found[Convolution if isinstance(module, Convolution) else Doubling] += 1
            fan_in = module.weight.shape[0] if isinstance(module, Doubling) else module.weight[0].numel()
            assert module.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.1)
            assert module.bias is not None
            assert not module.bias.any()
    assert found == {Convolution: 4 + 1 + 3 + 3 + 1 + 1, Doubling: 3}


def test_a_plan_counts_what_the_head_keeps() -> None:
    config = segmenter("upernet").config
    assert config.image is not None
    cost = budget(config, Work(2, config.image.length, precision="fp32"))
    linear = budget(segmenter("linear").config, Work(2, config.image.length, precision="fp32"))
    assert cost.parameters == sum(weight.numel() for weight in kl.build_model(config, device="meta").parameters())
    # The three inputs of the last 3x3 convolution alone, each at the resolution of pixels.
    assert cost.training.activations - linear.training.activations > 3 * 2 * 8 * 16 * 24 * 4
    assert cost.forward_flops_per_token > linear.forward_flops_per_token


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": "none", "vocab_size": 9}, "scores pixels, and this model reads tokens"),
        ({"head": {}}, "head has no effect on a model with a map head"),
        ({"vocab_size": 4}, "has no effect on a model with a head"),
        ({"map_head": {"kind": "linear", "channels": 4}}, "channels=4 has no effect"),
        ({"image": {"size": 16, "patch": 4, "decoder": {}}, "vocab_size": 48}, "needs vocab_size, and no head"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], words: str) -> None:
    table = {**SIZES, "shape": "encoder", "image": {"size": 16, "patch": 4}, "map_head": {}, **options}
    with pytest.raises(OptionError, match=words):
        kl.build_model(table, device="meta")


def test_all_patches_are_needed() -> None:
    with pytest.raises(InputError, match="states of all patches"):
        segmenter("linear")(pictures(), visible=torch.zeros(2, 1, dtype=torch.int64))
