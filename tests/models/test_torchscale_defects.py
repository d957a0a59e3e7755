"""What TorchScale 0.3.0 gets wrong in dense models, one test a defect."""

from __future__ import annotations

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import OptionError


def test_the_encoder_of_an_18_layer_translator_starts_at_the_papers_beta() -> None:
    model = kl.EncoderDecoder(50, 256, 4, 512, 18, 18, "deepnorm")
    weight = model.encoder.blocks[9].feedforward.f.output.weight.detach()
    gain = float(weight.std()) / (2 / (256 + 512)) ** 0.5
    assert gain == pytest.approx(0.3526, rel=0.02)  # TorchScale: 0.466


def test_deepnorm_decoders_are_post_ln() -> None:
    model = kl.EncoderDecoder(50, 32, 4, 64, 2, 2, "deepnorm")
    states = model(torch.randint(1, 50, (2, 5)), torch.randint(1, 50, (2, 5)), hidden_states=True).hidden_states
    assert states is not None
    for state in states[1:]:  # every layer ends with a norm whose gain is still 1 and whose bias is 0
        torch.testing.assert_close(state.mean(-1), torch.zeros(2, 5), atol=1e-5, rtol=0)
        torch.testing.assert_close(state.var(-1, correction=0), torch.ones(2, 5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", [kl.Encoder, kl.Decoder])
def test_weights_are_xaviers_and_biases_zero(shape: type[kl.Encoder] | type[kl.Decoder]) -> None:
    model = shape(vocab_size=50, dim=256, heads=4, ffn_dim=1024, layers=12, recipe="deepnorm")
    state = model.state_dict()
    stack = "encoder" if shape is kl.Encoder else "decoder"
    query, _, value = state[f"{stack}.blocks.3.self_attention.f.query_key_value.weight"].chunk(3)
    beta, xavier = (8 * 12) ** -0.25, (2 / 512) ** 0.5
    assert float(query.std()) == pytest.approx(xavier, rel=0.02)  # TorchScale: 0.58 of it
    assert float(value.std()) == pytest.approx(beta * xavier, rel=0.02)
    second = state[f"{stack}.blocks.3.feedforward.f.output.weight"]
    assert float(second.std()) == pytest.approx(beta * (2 / 1280) ** 0.5, rel=0.02)  # TorchScale: 0.46 of it
    assert not any(tensor.any() for name, tensor in state.items() if name.endswith("bias"))


def test_an_unknown_option_is_not_swallowed() -> None:
    with pytest.raises(OptionError, match="unknown option 'deepnrom'"):
        kl.Encoder(vocab_size=50, dim=32, heads=4, ffn_dim=64, layers=2, deepnrom=True)  # pyright: ignore
    with pytest.raises(OptionError, match="did you mean 'deepnorm'"):
        kl.Encoder(vocab_size=50, dim=32, heads=4, ffn_dim=64, layers=2, recipe="deepnrom")


def test_two_recipes_at_once_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown option 'subln'"):
        kl.Encoder(vocab_size=50, dim=32, heads=4, ffn_dim=64, layers=2, recipe="deepnorm", subln=True)  # pyright: ignore
    with pytest.raises(OptionError, match="recipe is"):
        kl.Encoder(vocab_size=50, dim=32, heads=4, ffn_dim=64, layers=2, recipe=("deepnorm", "sub_ln"))  # pyright: ignore


def test_the_sources_padding_reaches_cross_attention() -> None:
    model = kl.EncoderDecoder(50, 32, 4, 64, 2, 2, dtype=torch.float64)
    source, target = torch.randint(1, 50, (1, 4)), torch.randint(1, 50, (1, 5))
    padded = torch.nn.functional.pad(source, (0, 3))
    torch.testing.assert_close(model(padded, target).logits, model(source, target).logits, rtol=0, atol=1e-12)


def test_cross_attentions_keys_and_values_are_computed_once() -> None:
    model = kl.EncoderDecoder(50, 32, 4, 64, 2, 3)
    calls: list[int] = []
    for index, block in enumerate(model.decoder.blocks):
        block.cross_attention.f.key_value.register_forward_hook(lambda *_, index=index: calls.append(index))
    memory, cache = model.encode(torch.randint(1, 50, (2, 4))), model.new_cache(6)
    for _ in range(6):
        model.decode(torch.randint(1, 50, (2, 1)), memory, cache=cache)
    assert calls == [0, 1, 2]


def test_outputs_are_typed_and_evaluation_is_deterministic() -> None:
    model = kl.Decoder(50, 32, 4, 64, 2, dropout=0.3).eval()
    tokens = torch.randint(1, 50, (2, 4))
    first, second = model(tokens), model(tokens)
    assert torch.equal(first.logits, second.logits)
    assert not isinstance(first, tuple)
