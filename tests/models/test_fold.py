"""A folded model is a plain Post-LN model and the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import FoldError
from kilolayer.recipes.base import Recipe

FOLDABLE = ["deepnorm", "admin", "post_ln", "post_ln_init", "ds_init"]
SOURCE, TARGET = torch.tensor([[5, 6, 7, 0], [9, 8, 7, 6]]), torch.tensor([[1, 2, 3], [4, 5, 0]])


def spread(model: torch.nn.Module, vectors: bool) -> None:
    """Trained-looking weights: norms away from 1 and 0; residual vectors uneven where asked."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if ".skip." in name:
                tensor.copy_(
                    0.5 + 2 * torch.rand_like(tensor) if vectors else torch.full_like(tensor, 0.5 + torch.rand(()).item())
                )
            elif tensor.dim() == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))


def build(shape: str, recipe: str | Recipe, **options: Any) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 20, "dim": 16, "heads": 2, "ffn_dim": 32, "recipe": recipe, "dtype": torch.float64}
    sizes |= options
    if shape == "encoder_decoder":
        return kl.EncoderDecoder(**sizes, encoder_layers=3, decoder_layers=2)
    return {"encoder": kl.Encoder, "decoder": kl.Decoder}[shape](**sizes, layers=3)


def logits(model: Any) -> torch.Tensor:
    return model(SOURCE, TARGET).logits if model.config.shape == "encoder_decoder" else model(SOURCE).logits


def equal(model: Any, plain: Any) -> None:
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-10)
    assert plain.config.recipe == kl.recipes.get("post_ln")
    assert not any("skip" in name for name in plain.state_dict())


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "options", [{}, {"norm": "rms", "activation": "swiglu", "positions": "rotary", "kv_heads": 1}], ids=str
)
@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize("recipe", FOLDABLE)
def test_folded_equals_original(recipe: str, shape: str, options: dict[str, Any]) -> None:
    model = build(shape, recipe, **options)
    spread(model, vectors=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    equal(model, kl.fold(model))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.matrix(4)
@pytest.mark.parametrize("tie", [True, "output", False], ids=str)
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "t5", "none"])
def test_trained_vectors_fold_into_the_tables(positions: str, tie: bool | str) -> None:
    longest = 8 if positions == "learned" else None
    recipe = kl.recipes.get("admin", weight="trainable")
    model = build("encoder_decoder", recipe, positions=positions, max_length=longest, tie_embeddings=tie)
    spread(model, vectors=True)
    plain = kl.fold(model, max_length=8 if positions == "sinusoidal" else None)
    equal(model, plain)
    assert plain.config.tie_embeddings is False


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
@pytest.mark.parametrize("tie", [True, False])
def test_trained_vectors_of_a_single_stack(shape: str, tie: bool) -> None:
    model = build(shape, kl.recipes.get("admin", weight="trainable"), positions="rotary", tie_embeddings=tie)
    spread(model, vectors=True)
    equal(model, kl.fold(model))


def test_calibrated_admin_keeps_its_tied_table() -> None:
    model = build("encoder_decoder", "admin")
    kl.calibrate(model, (SOURCE, TARGET))
    plain = kl.fold(model)
    equal(model, plain)
    assert plain.config.tie_embeddings is True


@pytest.mark.slow
def test_a_hundred_layers_stay_exact() -> None:
    model = kl.Encoder(20, 16, 2, 32, 100, dtype=torch.float64)
    equal(model, kl.fold(model))


def test_folded_steps_and_padding_agree() -> None:
    model = build("encoder_decoder", "deepnorm")
    plain = kl.fold(model)
    memory, cache = plain.encode(SOURCE), plain.new_cache(3)
    steps = [plain.decode(step, memory, cache=cache).logits for step in TARGET.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), logits(model), rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", [name for name in kl.recipes.names() if name not in FOLDABLE])
def test_recipes_without_a_plain_form_say_so(recipe: str) -> None:
    with pytest.raises(FoldError, match=f"'{recipe}' has no exact plain Post-LN form"):
        kl.fold(build("encoder", recipe))


def test_a_norm_on_top_is_not_dropped() -> None:
    model = kl.Decoder(20, dim=16, heads=2, ffn_dim=32, layers=1, recipe="mix_ln")  # Post-LN below, and a final norm
    with pytest.raises(FoldError, match="no exact plain Post-LN form"):
        kl.fold(model)
    kl.fold(kl.Decoder(20, dim=16, heads=2, ffn_dim=32, layers=1, recipe="mix_ln", final_norm=False))


def test_dlcl_on_post_norm_sublayers_has_no_plain_form() -> None:
    with pytest.raises(FoldError):
        kl.fold(build("encoder", kl.recipes.get("dlcl", norm="post")))


def test_a_zero_cannot_be_folded() -> None:
    model = build("encoder", kl.recipes.get("admin", weight="trainable"))
    with torch.no_grad():
        model.encoder.blocks[1].feedforward.skip.weight[3] = 0
    with pytest.raises(FoldError, match="encoder sublayer 4 holds a 0"):
        kl.fold(model)


@pytest.mark.parametrize("recipe", ["deepnorm", "admin"])
def test_a_folded_model_survives_saving_and_folding_again(recipe: str) -> None:
    model = build("encoder_decoder", recipe)
    spread(model, vectors=False)
    plain = kl.fold(model)
    reloaded = kl.build_model(kl.ModelConfig(**vars(plain.config)), dtype=torch.float64)
    reloaded.load_state_dict(plain.state_dict())
    equal(model, reloaded)
    equal(model, kl.fold(plain))


def test_folding_draws_no_random_number_and_keeps_what_is_frozen() -> None:
    model = build("encoder", "deepnorm")
    model.embedding.weight.requires_grad_(False)
    before = torch.get_rng_state()
    plain = kl.fold(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_vector_without_a_table_to_go_into_is_refused() -> None:
    model = build("encoder", kl.recipes.get("admin", weight="trainable"), vocab_size=None, positions="none")
    spread(model, vectors=True)
    with pytest.raises(FoldError, match="no embedding table"):
        kl.fold(model)


def test_a_head_that_reads_states_between_layers_is_refused() -> None:
    sizes: dict[str, Any] = {"image": kl.ImageInput(size=8, patch=4), "dim": 16, "heads": 2, "ffn_dim": 32, "layers": 4}
    pixels = torch.rand(2, 3, 8, 8)
    linear = kl.ImageEncoder(**sizes, map_head=kl.MapHead(kind="linear", classes=3)).eval()
    torch.testing.assert_close(kl.fold(linear)(pixels).logits, linear(pixels).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(FoldError, match="between layers"):
        kl.fold(kl.ImageEncoder(**sizes, map_head=kl.MapHead(classes=3)))


def test_what_is_no_model_of_ours_is_refused() -> None:
    with pytest.raises(FoldError, match=r"Linear is not a Kilolayer model(?s:.*)kl\.bake"):
        kl.fold(torch.nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


def test_a_length_that_is_not_needed_is_refused() -> None:
    with pytest.raises(FoldError, match="no effect"):
        kl.fold(build("encoder", "deepnorm"), max_length=9)


@pytest.mark.slow
def test_compiled_blocks_are_folded_and_calibrated() -> None:
    model = build("encoder", "admin")
    model.encoder.blocks[1] = torch.compile(model.encoder.blocks[1], backend="eager")
    assert len(kl.calibrate(model, SOURCE).encoder) == 6
    with torch.no_grad():
        equal(model, kl.fold(model))


def test_sinusoids_under_a_vector_need_a_length() -> None:
    model = build("encoder", kl.recipes.get("admin", weight="trainable"))
    spread(model, vectors=True)
    with pytest.raises(FoldError, match="max_length"):
        kl.fold(model)


@pytest.mark.parametrize("recipe", ["deepnorm", "admin"])
def test_a_norm_on_the_embeddings_takes_the_first_scale(recipe: str) -> None:
    for shape, more in (("encoder", {"token_types": 2, "output_transform": True}), ("encoder_decoder", {})):
        model = build(shape, kl.recipes.get(recipe), embedding_norm=True, output_bias=True, **more)
        spread(model, vectors=recipe == "admin")
        equal(model, kl.fold(model))


def test_token_types_are_scaled_with_the_tables() -> None:
    model = build("encoder", kl.recipes.get("admin", weight="trainable"), positions="none", token_types=2)
    spread(model, vectors=True)
    types = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]])
    torch.testing.assert_close(
        kl.fold(model)(SOURCE, types=types).logits, model(SOURCE, types=types).logits, rtol=0, atol=1e-10
    )
