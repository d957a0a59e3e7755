"""Models of ours under the names of Transformers' classes: the same scores there, and the same tensors on the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import FoldError, InputError
from kilolayer.huggingface.foreign_class import ForeignClass
from kilolayer.huggingface.marian import LOGITS_BIAS, POSITIONS, Marian
from kilolayer.huggingface.opt import OPT
from kilolayer.huggingface.pegasus import Pegasus
from kilolayer.huggingface.weights import Entry, to_ours, to_theirs, under_own_name
from kilolayer.models.config import ModelConfig
from kilolayer.models.spelled_out import spell_out

SMALL: dict[str, Any] = {"vocab_size": 23, "dim": 16, "heads": 2, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 3}
SOURCE = torch.tensor([[5, 7, 9, 11, 3], [6, 8, 3, 0, 0]])
TARGET = torch.tensor([[2, 4, 6, 8], [2, 5, 7, 9]])


def translator(**options: Any) -> kl.EncoderDecoder:
    torch.manual_seed(0)
    return perturbed(kl.EncoderDecoder(**{**SMALL, "recipe": "post_ln", **options}).eval())


def decoder(**options: Any) -> kl.Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "dim": 16, "heads": 2, "ffn_dim": 24, "layers": 3}
    return perturbed(kl.Decoder(**{**sizes, "pad_id": None, **options}).eval())


def perturbed(model: Any) -> Any:
    """No bias is 0 and no gain is 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def their_model(form: ForeignClass, model: kl.EncoderDecoder | kl.Decoder, unstored: tuple[str, ...] = ()) -> Any:
    """Their class from our tables; every tensor that it has, but those computed or tied, comes from them."""
    import transformers

    theirs = form.foreign_config(model.config)
    config = transformers.AutoConfig.for_model(theirs.pop("model_type"), **theirs)
    built = getattr(transformers, form.architecture)(config).eval()
    found = built.load_state_dict(to_theirs(form.entries(model.config), model.state_dict()), strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {*form.copies(model.config), *unstored}
    return built


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


@pytest.mark.matrix(3)
@pytest.mark.parametrize("tied", [True, "output", False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_post_ln_translator_scores_the_same_as_marian(tied: Any, activation: str) -> None:
    other = {"source_vocab_size": 17} if tied is not True else {}
    model = translator(tie_embeddings=tied, activation=activation, **other)
    theirs = their_model(Marian(), model, (*POSITIONS, LOGITS_BIAS))
    with torch.no_grad():
        expected = model(SOURCE, TARGET).logits
        found = theirs(input_ids=SOURCE, attention_mask=(SOURCE != 0).long(), decoder_input_ids=TARGET).logits
    assert largest_difference(expected, found) < 2e-6


@pytest.mark.parametrize("tied", [True, "output", False])
def test_the_way_back_from_marian_gives_the_same_model(tied: Any) -> None:
    other = {"source_vocab_size": 17} if tied is not True else {}
    model, form = translator(tie_embeddings=tied, dropout=0.1, **other), Marian()
    config = kl.ModelConfig.of("encoder_decoder", form.own_options(form.foreign_config(model.config)))
    assert config == model.config
    theirs = their_model(form, model, (*POSITIONS, LOGITS_BIAS)).state_dict()
    kept = {name: tensor for name, tensor in theirs.items() if name not in (*POSITIONS, LOGITS_BIAS)}
    entries = form.entries(config)
    back = to_ours(entries, under_own_name(entries, kept, copies=form.copies(config)))
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_a_pre_ln_translator_scores_the_same_as_pegasus() -> None:
    model, form = translator(recipe="pre_ln", activation="gelu"), Pegasus()
    theirs = their_model(
        form, model, ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight", LOGITS_BIAS)
    )
    with torch.no_grad():
        expected = model(SOURCE, TARGET).logits
        found = theirs(input_ids=SOURCE, attention_mask=(SOURCE != 0).long(), decoder_input_ids=TARGET).logits
    assert largest_difference(expected, found) < 2e-6
    config = kl.ModelConfig.of("encoder_decoder", form.own_options(form.foreign_config(model.config)))
    assert config == model.config


@pytest.mark.parametrize("recipe", ["deepnorm", "pre_ln", "admin"])
def test_a_decoder_scores_the_same_as_opt(recipe: str) -> None:
    model, form = decoder(recipe=recipe, tie_embeddings=recipe == "pre_ln"), OPT()
    folded = model if recipe == "pre_ln" else kl.fold(model)
    plain = spell_out(folded, max_length=12)
    assert not list(form.misfits(plain.config))
    theirs = their_model(form, plain)
    tokens = torch.randint(0, 23, (3, 12))
    with torch.no_grad():
        expected, found = model(tokens).logits, theirs(input_ids=tokens).logits
    assert largest_difference(expected, found) < 2e-6
    assert kl.ModelConfig.of("decoder", form.own_options(form.foreign_config(plain.config))) == plain.config


def test_spelling_out_a_folded_translator_leaves_the_scores_as_they_are() -> None:
    model = translator(recipe="deepnorm", norm_eps=1e-2).double()  # a large eps, so that its change would be seen
    folded = kl.fold(model)
    assert folded.config.encoder_first_eps is not None
    plain = spell_out(folded, max_length=9)
    assert plain.config.encoder_first_eps is None
    assert plain.config.positions == "learned"
    assert not plain.config.scale_embeddings
    with torch.no_grad():
        assert largest_difference(model(SOURCE, TARGET).logits, plain(SOURCE, TARGET).logits) < 1e-12


def test_fused_matrices_are_cut_row_by_row_transposed_and_moved_down() -> None:
    fused = torch.arange(24.0).reshape(6, 4)
    cut = Entry("qkv", ("q", "k", "v")).to_theirs(fused)
    assert torch.equal(cut["k"], fused[2:4])
    turned = Entry("m", ("t",), transposed=True)
    assert torch.equal(turned.to_theirs(fused)["t"][:, 1], fused[1])
    assert torch.equal(turned.to_ours([fused.t()]), fused)
    moved = Entry("p", ("p",), rows_before=2)
    assert torch.equal(moved.to_theirs(fused)["p"], torch.cat([torch.zeros(2, 4), fused]))
    assert torch.equal(moved.to_ours([torch.cat([torch.ones(2, 4), fused])]), fused)


def test_a_tensor_that_is_missing_or_left_over_is_named() -> None:
    entries, whole = [Entry("a", ("x",)), Entry("b", ("y",))], {"x": torch.ones(1), "y": torch.ones(1)}
    with pytest.raises(InputError, match="tensor y is missing"):
        under_own_name(entries, {"x": whole["x"]}, copies={})
    with pytest.raises(InputError, match="tensor z has no place"):
        under_own_name(entries, {**whole, "z": whole["x"]}, copies={})
    own = under_own_name(entries, {"x": whole["x"], "tied": whole["y"]}, copies={"tied": "y"})
    assert to_ours(entries, own).keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recipe": "pre_ln"}, "not plain Post-LN"),
        ({"recipe": "deepnorm"}, "not plain Post-LN"),
        ({"positions": "rotary"}, "positions are rotary"),
        ({"norm": "rms"}, "RMSNorm"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06"),
        ({"kv_heads": 1}, "1 heads of keys and values"),
        ({"activation": "swiglu"}, "activation is swiglu"),
        ({"moe": kl.MoE(experts=2, top_k=1)}, "experts"),
    ],
)
def test_marian_says_why_a_model_does_not_fit(options: dict[str, Any], reason: str) -> None:
    config = ModelConfig.of("encoder_decoder", {**SMALL, "recipe": "post_ln", **options})
    assert any(reason in each for each in Marian().misfits(config))
    assert not list(Marian().misfits(ModelConfig.of("encoder_decoder", {**SMALL, "recipe": "post_ln"})))


def test_an_encoder_has_no_form_with_plain_tables() -> None:
    with pytest.raises(FoldError, match="Encoder is no decoder and no translator"):
        spell_out(kl.Encoder(23, 16, 2, 32, 2, token_types=2), max_length=9)
