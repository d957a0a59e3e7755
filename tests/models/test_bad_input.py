"""Mistakes a user makes, and the errors that tell the fix."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer import config
from kilolayer.errors import InputError, OptionError, edit_distance, nearest

SIZES = {"vocab_size": 20, "dim": 16, "heads": 2, "ffn_dim": 32}


def encoder(**options: Any) -> kl.Encoder:
    return kl.Encoder(**{**SIZES, "layers": 2, **options})


def decoder(**options: Any) -> kl.Decoder:
    return kl.Decoder(**{**SIZES, "layers": 2, **options})


def translator(**options: Any) -> kl.EncoderDecoder:
    return kl.EncoderDecoder(**{**SIZES, "encoder_layers": 2, "decoder_layers": 2, **options})


def misspell(name: str, dice: random.Random) -> str:
    """One slip of the fingers: a letter dropped, doubled, or swapped with its neighbour."""
    at = dice.randrange(1, len(name) - 1)
    slips = [name[:at] + name[at + 1 :], name[:at] + name[at] + name[at:], name[:at] + name[at + 1] + name[at] + name[at + 2 :]]
    return dice.choice([slip for slip in slips if slip != name])


def option_slips(count: int) -> list[tuple[str, str, str]]:
    """(where, misspelt, meant): keywords of the constructors, options of the recipes, fields of the configuration."""
    dice = random.Random(0)
    places = {each.__name__: list(inspect.signature(each).parameters) for each in (kl.Encoder, kl.Decoder, kl.EncoderDecoder)}
    places |= {f"recipe {name}": list(kl.recipes.get(name).options()) for name in kl.recipes.names()}
    places["configuration"] = list(kl.ModelConfig.__dataclass_fields__)
    places["recipes"] = kl.recipes.names()
    slips: list[tuple[str, str, str]] = []
    while len(slips) < count:
        place = dice.choice([each for each, options in places.items() if options])
        meant = dice.choice(places[place])
        slip = misspell(meant, dice)
        if slip not in places[place]:
            slips.append((place, slip, meant))
    return slips


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("place", "slip", "meant"), option_slips(100))
def test_a_hundred_misspelt_options_name_the_nearest_valid_one(place: str, slip: str, meant: str) -> None:
    makers: dict[str, Callable[[], object]] = {
        "Encoder": lambda: encoder(**{slip: 1}),
        "Decoder": lambda: decoder(**{slip: 1}),
        "EncoderDecoder": lambda: translator(**{slip: 1}),
        "configuration": lambda: config.build(kl.ModelConfig, {slip: 1}),
        "recipes": lambda: encoder(recipe=slip),
    }
    make = makers.get(place, lambda: kl.recipes.get(place.removeprefix("recipe "), **{slip: 1}))
    with pytest.raises(OptionError) as raised:
        make()
    guess = raised.value.what.rsplit("did you mean ", 1)[1].strip("'?")
    assert slip in raised.value.what
    assert edit_distance(slip, guess) <= edit_distance(slip, meant)


@pytest.mark.parametrize(
    ("a", "b", "edits"), [("dim", "dim", 0), ("dmi", "dim", 1), ("heds", "heads", 1), ("", "abc", 3), ("layers", "heads", 5)]
)
def test_edit_distance(a: str, b: str, edits: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == edits


def test_nearest() -> None:
    assert nearest("deepnrom", kl.recipes.names()) == "deepnorm"


CONTRADICTIONS: list[tuple[Callable[[], object], str]] = [
    (lambda: encoder(heads=3), r"heads=3 does not divide dim=16[\s\S]*1, 2, 4"),
    (lambda: encoder(heads=4, kv_heads=3), r"kv_heads=3 does not divide heads=4[\s\S]*1, 2, 4"),
    (lambda: encoder(layers=0), "must be at least 1"),
    (lambda: translator(decoder_layers=0), "must be at least 1"),
    (lambda: encoder(layers=-3), "must be at least 1"),
    (lambda: encoder(dim=0), "dim must be at least 1"),
    (lambda: encoder(vocab_size=0), "vocab_size must be at least 1"),
    (lambda: encoder(dropout=1.0), "below 1"),
    (lambda: encoder(activation="rleu"), r"did you mean 'relu'\?[\s\S]*'relu', 'gelu', 'gelu_tanh', 'silu', 'swiglu'"),
    (lambda: encoder(norm="batch"), "valid: layer, rms"),
    (lambda: encoder(dim=16.0), "allowed: a whole number"),
    (lambda: encoder(pad_id=20), "0 to 19"),
    (lambda: encoder(recipe=["deepnorm", "sub_ln"]), "give a name"),
    (lambda: encoder(recipe="deepnorm+sub_ln"), "unknown recipe"),
    (lambda: encoder(final_norm=True), "'deepnorm', which has no final norm"),
    (lambda: translator(recipe="rezero", final_norm=True), "'rezero', which has no final norm"),
    (lambda: decoder(positions=("xpos", "learned")), "positions is"),
    (lambda: decoder(positions="xpos", max_length=64), "no effect with 'xpos' positions"),
    (lambda: encoder(positions="xpos"), "also looks ahead"),
    (lambda: encoder(positions="learned"), "set max_length"),
    (lambda: encoder(max_length=10), "no effect"),
    (lambda: encoder(dim=15, heads=3), "even dim"),
    (lambda: encoder(dim=18, heads=6, positions="rotary"), "even head width"),
    (lambda: encoder(recipe=kl.recipes.get("sub_ln", cross_gain=False)), "no effect"),
    (lambda: decoder(vocab_size=None), "needs a vocabulary"),
    (lambda: decoder(tie_embeddings="output"), "applies to an encoder-decoder"),
    (lambda: translator(source_vocab_size=30), "one table cannot hold"),
    (lambda: kl.ModelConfig(shape="decoder", encoder_layers=3), "encoder_layers has no effect"),
    (lambda: kl.ModelConfig(layers=100, encoder_layers=3, decoder_layers=3), "layers=100 has no effect"),
    (lambda: encoder(recipe="rezero", norm="rms"), "norm has no effect on the recipe 'rezero'"),
    (lambda: translator(recipe="t_fixup", norm_eps=1e-3), "norm_eps has no effect on the recipe 't_fixup'"),
    (lambda: encoder(vocab_size=None, scale_embeddings=False), "no effect without a vocabulary"),
    (lambda: kl.ModelConfig(final_norm=True), "'deepnorm', which has no final norm"),
    (lambda: kl.ModelConfig(final_norm=False), "final_norm=False has no effect"),
    (lambda: kl.ModelConfig(norm_eps=float("nan")), "norm_eps is nan"),
    (lambda: kl.recipes.get("deepnorm", alpha_scale=float("inf")), "alpha_scale is inf"),
    (lambda: kl.recipes.get("dlcl", name="x"), "unknown option 'name'"),
    (lambda: kl.build_model(kl.ModelConfig(recipe=kl.recipes.get("pre_ln"), encoder_first_eps=1e-3)), "no effect"),
    (lambda: kl.ModelConfig(shape="encoder", source_vocab_size=3), "no effect on a model with a single stack"),
    (lambda: kl.recipes.get("ds_init", alpha=2.0), "at most 1"),
    (lambda: kl.recipes.get("deepnorm", alpha_scale=0), "above 0"),
    (lambda: kl.recipes.get("deepnorm", alpha="one", alpha_scale=2.0), 'alpha_scale = 2 has no effect on alpha = "one"'),
    (lambda: kl.recipes.get("deepnorm", beta="one", beta_scale=0.5), 'beta_scale = 0.5 has no effect on beta = "one"'),
    (lambda: kl.recipes.get("deepnorm").describe(), "at least one layer"),
]


@pytest.mark.parametrize(("make", "message"), CONTRADICTIONS)
def test_contradictions_and_values_out_of_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_a_final_norm_can_be_left_out_where_the_recipe_has_one() -> None:
    assert isinstance(encoder(recipe="pre_ln", final_norm=False).encoder.top_norm, torch.nn.Identity)
    assert isinstance(encoder(recipe="pre_ln", final_norm=True).encoder.top_norm, torch.nn.LayerNorm)


BATCHES: list[tuple[Callable[[], object], str]] = [
    (lambda: encoder()(torch.tensor([[3, 20]])), r"from 3 to 20[\s\S]*0 to 19"),
    (lambda: encoder()(torch.tensor([[-1, 2]])), r"from -1 to 2[\s\S]*0 to 19"),
    (lambda: encoder()(torch.tensor([1, 2])), r"shape \[batch, length\]"),
    (lambda: encoder()(torch.tensor([[1.0, 2.0]])), "int64"),
    (lambda: encoder()(torch.zeros(2, 0).long()), "at least one sequence"),
    (lambda: encoder()(embeddings=torch.zeros(2, 0, 16)), "at least one position"),
    (lambda: encoder().materialize("cpu"), "already has its weights"),
    (lambda: encoder()(), "ids or embeddings"),
    (lambda: encoder()(torch.tensor([[1]]), embeddings=torch.zeros(1, 1, 16)), "ids or embeddings"),
    (lambda: encoder()(embeddings=torch.zeros(1, 3, 8)), r"\[batch, length, 16\]"),
    (lambda: encoder(vocab_size=None)(torch.tensor([[1]])), "no vocabulary"),
    (lambda: encoder()(torch.tensor([[1, 2]]), mask=torch.ones(1, 3).bool()), r"mask has shape \[1, 3\]"),
    (lambda: encoder()(torch.tensor([[1, 2]]), mask=torch.ones(1, 2)), "give bool"),
    (lambda: encoder()(torch.tensor([[1, 2]]), segments=torch.ones(2, 2).long()), "segments has shape"),
    (lambda: encoder()(torch.tensor([[1, 2]]), positions=torch.tensor([[2]])), r"range from 2 to 2[\s\S]*0 to 1"),
    (lambda: encoder()(torch.tensor([[1, 2]]), positions=torch.tensor([[-1]])), "range from -1"),
    (lambda: encoder()(torch.tensor([[1, 2]]), positions=torch.tensor([1])), r"shape \[1\][\s\S]*\[1, k\]"),
    (lambda: encoder()(torch.tensor([[1, 2]]), positions=torch.tensor([[1], [0]])), r"shape \[2, 1\]"),
    (lambda: encoder()(torch.tensor([[1, 2]]), positions=torch.tensor([[True]])), "positions are torch.bool"),
    (lambda: encoder(vocab_size=None)(embeddings=torch.ones(1, 2, 16), positions=torch.tensor([[1]])), "without a vocabulary"),
    (
        lambda: translator(positions="learned", max_length=4)(torch.ones(1, 5).long(), torch.ones(1, 2).long()),
        "5 positions is longer than the 4",
    ),
    (lambda: encoder()([[1, 2]]), r"token ids: \[\[1, 2\]\] is not a tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: encoder()(torch.ones(1, 2).numpy()), "not a tensor"),  # pyright: ignore[reportArgumentType]
    (lambda: encoder()(torch.tensor([[1, 2]]), mask=[[True, True]]), "mask: .* is not a tensor"),
    (lambda: encoder()(embeddings=torch.ones(1, 2, 16).long()), "embeddings are torch.int64"),
    (lambda: translator().decode(torch.ones(1, 2).long(), torch.ones(1, 2, 16)), "Tensor[\\s\\S]*model.encode"),  # pyright: ignore
    (lambda: decoder()(torch.ones(1, 2).long(), cache=decoder(layers=3).new_cache(4)), "3 layers for a decoder of 2"),
    (lambda: translator()(torch.ones(1, 5).long()), "no target"),
    (lambda: translator()(torch.ones(2, 5).long(), torch.ones(3, 2).long()), "3 targets for 2 sources"),
    (
        lambda: translator()(torch.ones(1, 2).long(), torch.ones(1, 2).long(), source_segments=torch.zeros(1, 2).long()),
        "belong together",
    ),
]


@pytest.mark.matrix(4)
@pytest.mark.parametrize(("call", "message"), BATCHES)
def test_batches_that_do_not_fit(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_full_cache_says_so() -> None:
    model = decoder()
    cache = model.new_cache(3)
    model(torch.ones(1, 2).long(), cache=cache)
    with pytest.raises(InputError, match=r"holds 3 positions, but 2 \+ 2 are needed"):
        model(torch.ones(1, 2).long(), cache=cache)


def test_learned_positions_count_what_the_cache_has_read() -> None:
    model = decoder(positions="learned", max_length=4)
    cache = model.new_cache(9)
    model(torch.ones(1, 3).long(), cache=cache)
    with pytest.raises(InputError, match="5 positions is longer than the 4"):
        model(torch.ones(1, 2).long(), cache=cache)


def test_learned_positions_count_within_each_packed_document() -> None:
    model = encoder(positions="learned", max_length=4)
    model(torch.ones(1, 6).long(), segments=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    with pytest.raises(InputError, match="5 positions is longer than the 4"):
        model(torch.ones(1, 6).long(), segments=torch.tensor([[0, 0, 0, 0, 0, 1]]))


@torch.no_grad()
def test_a_step_that_is_too_long_leaves_the_cache_as_it_was() -> None:
    model, text = decoder(positions="learned", max_length=4, dtype=torch.float64).eval(), torch.tensor([[3, 4, 5, 6, 7]])
    cache = model.new_cache(9)
    model(text[:, :3], cache=cache)
    with pytest.raises(InputError, match="5 positions is longer than the 4"):
        model(text[:, 3:], cache=cache)
    torch.testing.assert_close(model(text[:, 3:4], cache=cache).logits, model(text[:, :4]).logits[:, 3:])


@pytest.mark.parametrize("pad_id", [None, 0])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 2)])
def test_a_cache_reads_on_in_the_rows_that_it_has(pad_id: int | None, before: int, after: int) -> None:
    model = decoder(pad_id=pad_id)
    cache = model.new_cache(9)
    model(torch.ones(before, 2).long(), cache=cache)
    with pytest.raises(InputError, match=f"{after} rows of new tokens, but the cache has {before}"):
        model(torch.ones(after, 1).long(), cache=cache)


@pytest.mark.parametrize("capacity", [0, -1, 2.0, "many", None])
def test_a_cache_holds_a_whole_number_of_positions(capacity: Any) -> None:
    with pytest.raises(OptionError, match="capacity is"):
        decoder().new_cache(capacity)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device is 'gpu'[\\s\\S]*\"cuda\""),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'"),
        ({"dtype": torch.int64}, "dtype is torch.int64[\\s\\S]*torch.float32"),
        ({"dtype": torch.complex64}, "dtype is torch.complex64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8"),
    ],
)
def test_a_place_or_a_dtype_that_no_model_has_is_refused_before_it_is_built(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        decoder(**options)
    with pytest.raises(OptionError, match=message):
        decoder(device="meta").materialize(**{"device": "cpu", **options})


def test_a_dtype_to_lower_to_is_checked() -> None:
    with pytest.raises(OptionError, match="dtype is 'bf16'"):
        decoder().cast_weights("bf16")  # pyright: ignore[reportArgumentType]


def test_xpos_is_refused_in_fp16() -> None:
    model = decoder(positions="xpos", dtype=torch.float16)
    with pytest.raises(OptionError, match="range of fp16"):
        model(torch.ones(1, 2).long())


def test_packed_documents_are_not_decoded_step_by_step() -> None:
    model = decoder()
    with pytest.raises(InputError, match="packed"):
        model(torch.ones(1, 2).long(), segments=torch.zeros(1, 2).long(), cache=model.new_cache(4))


def test_the_constructors_and_the_configuration_have_the_same_options() -> None:
    fields = {field.name: field for field in dataclasses.fields(kl.ModelConfig)}
    of_encoders, of_images = {"head", "token_types", "output_transform", "multiway"}, {"image", "map_head"}
    of_tokens = {"tie_embeddings", "token_types", "multiway"}
    for cls, absent in (
        (kl.Encoder, {"shape", "encoder_layers", "decoder_layers", "source_vocab_size"} | of_images),
        (kl.ImageEncoder, {"shape", "encoder_layers", "decoder_layers", "source_vocab_size"} | of_tokens),
        (kl.Decoder, {"shape", "encoder_layers", "decoder_layers", "source_vocab_size"} | of_encoders | of_images),
        (kl.EncoderDecoder, {"shape"} | of_encoders | of_images),
    ):
        parameters = inspect.signature(cls).parameters
        of_converted_models = {"encoder_first_eps", "decoder_first_eps", "first_predicted"}
        assert set(parameters) - {"device", "dtype"} == set(fields) - absent - of_converted_models
        required = {"image", "vocab_size", "dim", "heads", "ffn_dim", "layers", "encoder_layers", "decoder_layers", "recipe"}
        for name in set(parameters) & set(fields) - required:
            assert parameters[name].default == fields[name].default, name
        assert parameters["recipe"].default == kl.ModelConfig().recipe.name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_no_check_stalls_an_accelerator(recipe: str) -> None:
    model = translator(recipe=recipe, dropout=0.1, drop_path=0.1, device="cuda")
    source, target = torch.randint(1, 20, (2, 3, 5), device="cuda")
    segments = torch.zeros_like(source)
    model(source, target)  # looks, once, whether scales were calibrated
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(source, target).logits.sum().backward()
        model(source, target, source_segments=segments, target_segments=segments)
        memory, cache = model.encode(source), model.new_cache(5)
        for step in target.split(1, dim=1):
            model.decode(step, memory, cache=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
