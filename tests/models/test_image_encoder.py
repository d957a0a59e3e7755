"""The image encoder: an Encoder on embedded patches, under every recipe and in every form that models have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.config import build, table_of
from kilolayer.errors import InputError, OptionError
from kilolayer.layers.grid_positions import placed
from kilolayer.layers.patches import to_patches
from kilolayer.models.config import ModelConfig
from kilolayer.optimizers.weight_factors import layer_rates
from kilolayer.runs.budget import Work, budget
from kilolayer.speed.fast import FastVocabularyProjection
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.fast_stack import FastStack

SIZES: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 2}
IMAGE: dict[str, Any] = {"size": "8x12", "patch": 4, "mask_token": True}
PATCHES = 6


def image_encoder(dtype: torch.dtype = torch.float64, image: dict[str, Any] | None = None, **options: Any) -> kl.ImageEncoder:
    torch.manual_seed(0)
    given = kl.ImageInput(**{**IMAGE, **(image or {})})
    return kl.ImageEncoder(given, **{**SIZES, **options}, dtype=dtype)


def pictures(rows: int = 2, size: tuple[int, int] = (8, 12), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, 3, *size, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "none"])
def test_it_is_an_encoder_of_embedded_patches(positions: str, class_token: bool) -> None:
    model = image_encoder(image={"class_token": class_token}, positions=positions)
    plain = kl.Encoder(None, **SIZES, positions="none", dtype=torch.float64)
    plain.encoder.load_state_dict(model.encoder.state_dict())
    weights = dict(model.named_parameters())
    kernel = weights["patches.projection.weight"].view(16, 3, 4, 4)
    x = F.conv2d(pictures(), kernel, weights["patches.projection.bias"], stride=4).flatten(2).transpose(1, 2)
    if class_token:
        x = torch.cat([weights["patches.class_token"].expand(2, 1, -1), x], dim=1)
    if positions == "learned":
        x = x + weights["positions.weight"]
    elif positions == "sinusoidal":
        x = model.positions(x, (2, 3))
    out = model(pictures())
    assert out.states.shape == (2, PATCHES + class_token, 16)
    assert out.logits is None
    torch.testing.assert_close(out.states, plain(embeddings=x).states, rtol=1e-12, atol=1e-12)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("recipe", kl.recipes.names())
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_every_recipe_trains_on_images(recipe: str, positions: str) -> None:
    model = image_encoder(
        torch.float32, recipe=recipe, positions=positions, drop_path=0.1, vocab_size=7, output_bias=True, layers=3
    )
    images, labels = pictures(8, dtype=torch.float32), torch.arange(8 * PATCHES).view(8, PATCHES) % 7
    masked = torch.rand(8, PATCHES, generator=torch.Generator().manual_seed(2)) < 0.4
    if model.config.recipe.calibration() is not None:
        scales = kl.calibrate(model, images)
        assert len(scales.encoder) == 6
    optimizer = torch.optim.AdamW(kl.parameter_groups(model, lr=1e-2, layer_decay=0.9))
    losses = []
    for _ in range(12):
        out = model(images, masked=masked)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(losses[-3:]) < 0.98 * losses[0]
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_experts_replace_feedforward_networks() -> None:
    model = image_encoder(moe=kl.MoE(experts=3, top_k=1, every=1))
    out = model(pictures())
    assert out.routing is not None
    assert len(out.routing) == 2
    out.states.sum().backward()
    assert model.patches.projection.weight.grad is not None


def test_outputs_at_patches() -> None:
    model = image_encoder(vocab_size=5, output_bias=True)
    images, positions = pictures(), torch.tensor([[0, 5], [3, 3]])
    everywhere = model(images).logits
    assert everywhere.shape == (2, PATCHES, 5)
    weights, states = dict(model.named_parameters()), model(images).states
    for image in range(2):
        for patch in range(PATCHES):
            expected = weights["vocabulary.weight"] @ states[image, 1 + patch] + weights["output_bias.weight"]
            torch.testing.assert_close(everywhere[image, patch], expected, rtol=1e-12, atol=1e-12)
    some = model(images, positions=positions).logits
    torch.testing.assert_close(some[0, 1], everywhere[0, 5], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(some[1, 0], everywhere[1, 3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_masked_patches_have_no_influence(positions: str) -> None:
    model, images = image_encoder(positions=positions), pictures()
    masked = torch.zeros(2, PATCHES, dtype=torch.bool)
    masked[:, 4] = True
    changed = images.clone()
    changed[:, :, 4:, 4:8] += 3  # the patch in row 1, column 1
    found = model(images, masked=masked).states
    assert torch.equal(found, model(changed, masked=masked).states)
    assert not torch.equal(found, model(images).states)


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_visible_patches_are_read_in_their_places_and_alone(positions: str, class_token: bool) -> None:
    model, images = image_encoder(positions=positions, image={"class_token": class_token}), pictures()
    everything = torch.arange(PATCHES).expand(2, -1)
    torch.testing.assert_close(model(images, visible=everything).states, model(images).states, rtol=1e-12, atol=1e-12)
    visible = torch.tensor([[5, 0], [2, 3]])
    found = model(images, visible=visible).states
    assert found.shape == (2, 2 + class_token, 16)
    # A mask on attention that hides the other patches gives the same states.
    seen = torch.zeros(2, PATCHES, dtype=torch.bool).scatter(1, visible, value=True)
    seen = F.pad(seen, (int(class_token), 0), value=True)
    inputs = model._embed(images, (2, 3), None, None)
    x, context = model.encoder.prepare_inputs(inputs, None, None)
    bias = torch.zeros(2, 1, 1, seen.shape[1], dtype=torch.float64).masked_fill(~seen[:, None, None], float("-inf"))
    hidden = model.encoder.run(x, context.__class__(context.mask.__class__(values=bias), context.rotation)).states
    for row in range(2):
        for index, patch in enumerate(visible[row]):
            expected = hidden[row, patch + class_token]
            torch.testing.assert_close(found[row, index + class_token], expected, rtol=1e-12, atol=1e-12)
    changed = images.clone()
    changed[0, :, :4, 4:8] += 3  # patch 1, which is not visible in image 0
    assert torch.equal(model(changed, visible=visible).states[0], found[0])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_images_of_another_size_are_read(positions: str) -> None:
    model = image_encoder(positions=positions)
    out = model(pictures(size=(16, 8)))
    assert out.states.shape == (2, 9, 16)
    out.states.square().sum().backward()
    assert model.patches.projection.weight.grad is not None
    assert model.grid == (2, 3)


@pytest.mark.parametrize("pool", ["first", "mean"])
@pytest.mark.parametrize("pooler", ["tanh", "norm", "none"])
def test_a_head_scores_images(pool: str, pooler: str) -> None:
    model = image_encoder(head={"outputs": 4, "pool": pool, "pooler": pooler, "dropout": 0.0})
    out, weights = model(pictures()), dict(model.named_parameters())
    for row in range(2):
        pooled = out.states[row, 0] if pool == "first" else out.states[row, 1:].mean(dim=0)
        if pooler == "tanh":
            pooled = torch.tanh(weights["head.dense.weight"] @ pooled + weights["head.dense.bias"])
        elif pooler == "norm":
            pooled = F.layer_norm(pooled, (16,), weights["head.norm.weight"], weights["head.norm.bias"])
        expected = weights["head.output.weight"] @ pooled + weights["head.output.bias"]
        torch.testing.assert_close(out.logits[row], expected, rtol=1e-12, atol=1e-12)
    assert ("head.dense.weight" in weights) == (pooler == "tanh")


def test_a_table_describes_it(tmp_path: Path) -> None:
    table = {
        "layers": 2,
        "dim": 16,
        "heads": 2,
        "ffn_dim": 24,
        "image": {**IMAGE, "class_token": False},
        "head": {"outputs": 3},
    }
    model = kl.build_model(table)
    assert isinstance(model, kl.ImageEncoder)
    assert model.config.head == kl.Head(outputs=3, pool="mean")
    assert (model.config.shape, model.config.vocab_size, model.config.pad_id) == ("encoder", None, None)
    assert build(ModelConfig, table_of(model.config)) == model.config
    kl.save(model.eval(), tmp_path / "model")
    loaded = kl.load_model(tmp_path / "model")
    assert isinstance(loaded, kl.ImageEncoder)
    images = pictures(dtype=torch.float32)
    assert torch.equal(loaded(images).logits, model(images).logits)


def test_a_lowered_model_keeps_its_states_precise(tmp_path: Path) -> None:
    model = image_encoder(torch.float32, positions="learned", vocab_size=5)
    before = model(pictures(dtype=torch.float32)).states
    model.cast_weights(torch.bfloat16)
    assert model.patches.projection.weight.dtype == torch.bfloat16
    weights = dict(model.named_parameters())
    assert {weights[name].dtype for name in ("patches.class_token", "positions.weight")} == {torch.float32}
    found = model(pictures(dtype=torch.float32)).states
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, before, rtol=0.1, atol=0.1)
    kl.save(model, tmp_path / "model")
    assert torch.equal(kl.load_model(tmp_path / "model")(pictures(dtype=torch.float32)).states, found)


def test_layers_below_others_learn_slower_down_to_the_patches() -> None:
    model = image_encoder(positions="learned")
    rates = layer_rates(model, 0.5)
    lowest = [*model.patches.parameters(), model.positions.weight]
    assert len(lowest) == 5
    assert {rates[weight] for weight in lowest} == {0.25}


def test_initial_weights_follow_the_recipe() -> None:
    sizes = {**SIZES, "dim": 256}
    usual = kl.ImageEncoder(kl.ImageInput(size=32, patch=8, mask_token=True), **sizes, recipe="pre_ln", positions="learned")
    assert usual.patches.projection.weight.std().item() == pytest.approx((3 * 64) ** -0.5, rel=0.02)
    assert not usual.patches.projection.bias.any()
    weights = dict(usual.named_parameters())
    assert weights["positions.weight"].std().item() == pytest.approx(1 / 16, rel=0.05)
    assert weights["patches.mask_token"].std().item() == pytest.approx(1 / 16, rel=0.2)
    small = kl.ImageEncoder(kl.ImageInput(size=32, patch=8), **sizes, recipe="t_fixup")
    assert small.patches.projection.weight.std().item() == pytest.approx((9 * 2) ** -0.25 * (3 * 64) ** -0.5, rel=0.02)
    bert = kl.ImageEncoder(
        kl.ImageInput(size=32, patch=8), **sizes, recipe=kl.recipes.get("pre_ln", init="bert"), positions="learned"
    )
    weights = dict(bert.named_parameters())
    for name in ("patches.projection.weight", "positions.weight"):
        assert weights[name].std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_plan_counts_an_image_model(positions: str) -> None:
    config = image_encoder(positions=positions, head=kl.Head(outputs=3, pooler="none")).config
    assert config.image is not None
    cost = budget(config, Work(4, config.image.length, precision="bf16"))
    model = kl.build_model(config)
    assert cost.parameters == sum(weight.numel() for weight in model.parameters())
    assert cost.parts["patches"] == 16 * 48 + 3 * 16
    assert cost.training.activations > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "decoder"}, "does not read images"),
        ({"positions": "t5"}, "those of a text"),
        ({"max_length": 9, "positions": "learned"}, "max_length has no effect"),
        ({"pad_id": 3}, "pad_id has no effect"),
        ({"tie_embeddings": True}, "tie_embeddings has no effect"),
        ({"scale_embeddings": False}, "scale_embeddings has no effect"),
        ({"token_types": 2}, "token_types has no effect"),
        ({"first_predicted": 2, "vocab_size": 5}, "first_predicted has no effect"),
        ({"vocab_size": 5, "head": {}}, "has no effect on a model with a head"),
        ({"output_bias": True}, "output_bias has no effect"),
        ({"image": {**IMAGE, "class_token": False}, "head": {"pool": "first"}}, "class token of a model without one"),
        ({"image": {"size": 10, "patch": 4}}, "do not divide an image of 10 x 10"),
        ({"image": {"size": "8by8", "patch": 4}}, "size is '8by8'"),
        ({"dim": 18, "heads": 1}, "that 4 divides, not 18"),
        ({"dim": 12, "heads": 2, "positions": "rotary"}, "that 4 divides, not 6"),
    ],
)
def test_options_that_contradict_images_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        kl.build_model({**SIZES, "image": IMAGE, **options}, device="meta")


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), {}, "images are torch.uint8"),
        (torch.zeros(1, 1, 8, 8), {}, r"images have shape \[1, 1, 8, 8\]"),
        (torch.zeros(1, 3, 8, 10), {}, "not divided by patches of 4"),
        (torch.zeros(1, 3, 8, 12), {"masked": torch.zeros(1, 5, dtype=torch.bool)}, "masked is"),
        (torch.zeros(1, 3, 8, 12), {"visible": torch.tensor([[6]])}, "visible range from 6 to 6"),
        (torch.zeros(1, 3, 8, 12), {"visible": torch.zeros(2, 1).long()}, "visible is"),
        (torch.zeros(1, 3, 8, 12), {"positions": torch.tensor([[6]])}, "positions range from 6 to 6"),
        (
            torch.zeros(1, 3, 8, 12),
            {"positions": torch.tensor([[0]]), "visible": torch.tensor([[0]])},
            "positions has no effect",
        ),
    ],
)
def test_invalid_batches_are_refused(images: torch.Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        image_encoder(torch.float32, vocab_size=5)(images, **options)
    if "masked" in options:
        with pytest.raises(InputError, match="no mask token"):
            image_encoder(torch.float32, image={"mask_token": False})(images, **options)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("recipe", ["deepnorm", "admin"])
def test_scaled_residuals_fold_into_patches(recipe: str, positions: str) -> None:
    model = image_encoder(recipe=recipe, positions=positions, vocab_size=5)
    with torch.no_grad():
        for name, weight in model.state_dict(keep_vars=True).items():
            weight.copy_(0.5 + torch.rand_like(weight) if ".skip." in name else weight + 0.1 * torch.randn_like(weight))
    plain = kl.fold(model)
    assert isinstance(plain, kl.ImageEncoder)
    assert plain.config.recipe.name == kl.recipes.PLAIN
    masked = torch.tensor([[True, False, False, True, False, False]] * 2)
    expected = model(pictures(), masked=masked)
    torch.testing.assert_close(plain(pictures(), masked=masked).logits, expected.logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"positions": "learned"}, {"positions": "rotary"}, {"moe": kl.MoE(experts=2, every=1)}]
)
def test_the_fast_form_runs_its_stack(options: dict[str, Any]) -> None:
    model = image_encoder(torch.float32, vocab_size=5, recipe="sub_ln", **options)
    form = kl.fast(model)
    assert isinstance(form, kl.ImageEncoder)
    assert type(form.encoder) is FastStack
    assert type(form.vocabulary) is FastVocabularyProjection
    images, masked = pictures(dtype=torch.float32), torch.tensor([[True, False, False, True, False, False]] * 2)
    _, context = form.encoder.prepare_inputs(form._embed(images, (2, 3), masked, None), None, None)
    assert isinstance(context, FastContext)
    assert torch.equal(form(images, masked=masked).logits, model(images, masked=masked).logits)
    found = form(images, hidden_states=True).hidden_states
    assert found is not None
    assert len(found) == 3


DECODER: dict[str, Any] = {"layers": 2, "dim": 8, "heads": 2}


def decoding(dtype: torch.dtype = torch.float64, class_token: bool = True, **options: Any) -> kl.ImageEncoder:
    given: dict[str, Any] = {"vocab_size": 48, "output_bias": True, **options}
    return image_encoder(dtype, image={"class_token": class_token, "decoder": DECODER}, **given)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
def test_a_decoder_predicts_all_patches_from_the_visible_ones(positions: str, class_token: bool) -> None:
    model, images = decoding(positions=positions, class_token=class_token), pictures()
    visible = torch.tensor([[4, 0], [2, 3]])
    found = model.reconstruct(images, visible)
    assert found.shape == (2, PATCHES, 48)
    states, weights = model(images, visible=visible).states, dict(model.named_parameters())
    narrow = states @ weights["decoder_input.weight"].T + weights["decoder_input.bias"]
    for row in range(2):  # patch by patch, with the stack of the decoder alone
        patches = [weights["decoder.mask_token"]] * PATCHES
        for index, patch in enumerate(visible[row].tolist()):
            patches[patch] = narrow[row, index + class_token]
        x = torch.stack([*([narrow[row, 0]] if class_token else []), *patches])[None]
        decoder = model.decoder
        assert decoder is not None
        inputs = placed(decoder.positions(x, (2, 3)), (2, 3), int(class_token))
        top = decoder.encoder(inputs).states[0, int(class_token) :]
        expected = top @ weights["decoder.vocabulary.weight"].T + weights["decoder.output_bias.weight"]
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)
    changed = images.clone()
    changed[0, :, :4, 4:8] += 3  # patch 1, which is hidden in image 0
    assert torch.equal(model.reconstruct(changed, visible)[0], found[0])
    assert model(images).logits is None


@pytest.mark.matrix(2)
@pytest.mark.parametrize("recipe", ["deepnorm", "admin", "complete_p", "pre_ln", "dlcl"])
def test_a_decoder_has_the_recipe_and_trains(recipe: str, tmp_path: Path) -> None:
    model = decoding(torch.float32, recipe=recipe)
    images, visible = pictures(8, dtype=torch.float32), torch.arange(16).view(8, 2) % PATCHES
    if recipe == "admin":
        kl.calibrate(model, {"images": images, "visible": visible})
        scales = {name: tensor for name, tensor in model.state_dict().items() if ".skip." in name}
        assert len(scales) == 8
        assert all((scale.mean() - 1).abs() > 1e-6 for name, scale in scales.items() if ".blocks.1." in name)
    optimizer = torch.optim.AdamW(kl.parameter_groups(model, lr=1e-2, layer_decay=0.9))
    targets, losses = to_patches(images, 4), []
    for _ in range(10):
        loss = F.mse_loss(model.reconstruct(images, visible), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    kl.save(model.eval(), tmp_path / "model")
    loaded = kl.load_model(tmp_path / "model")
    assert torch.equal(loaded.reconstruct(images, visible), model.reconstruct(images, visible))


def test_a_decoders_weights_are_planned_and_run_fast() -> None:
    model = decoding(torch.float32)
    assert model.config.image is not None
    cost = budget(model.config, Work(4, 3))
    assert cost.parameters == sum(weight.numel() for weight in model.parameters())
    assert cost.parts["decoder attention"] == 2 * (8 * 32 + 32 + 16)  # with the biases and the norm of DeepNorm
    assert cost.training.activations > budget(image_encoder(vocab_size=48).config, Work(4, 3)).training.activations
    form = kl.fast(model)
    assert form.decoder is not None
    assert type(form.decoder.encoder) is FastStack


def test_decoders_without_effect_are_refused() -> None:
    table = {**SIZES, "image": {**IMAGE, "decoder": DECODER}}
    for more, words in (
        ({}, "needs vocab_size, and no head"),
        ({"head": {}}, "needs vocab_size, and no head"),
        ({"vocab_size": 4, "output_transform": True}, "output_transform has no effect"),
        ({"vocab_size": 4, "image": {**IMAGE, "decoder": {**DECODER, "heads": 3}}}, "heads=3 does not divide dim=8"),
    ):
        with pytest.raises(OptionError, match=words):
            kl.build_model({**table, **more}, device="meta")
    with pytest.raises(InputError, match="no decoder"):
        image_encoder(vocab_size=4).reconstruct(pictures(), torch.zeros(2, 1).long())
