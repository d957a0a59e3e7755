"""One function, many ways to compute it: step by step, padded, packed, from embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kilolayer as kl

VOCABULARY = 23
POSITIONS = ["sinusoidal", "learned", "rotary", "xpos", "t5", "none"]
RECIPES = kl.recipes.names()


def sizes(positions: str = "sinusoidal", **options: Any) -> dict[str, Any]:
    longest = 16 if positions == "learned" else None
    base = {"vocab_size": VOCABULARY, "dim": 24, "heads": 4, "ffn_dim": 32, "dtype": torch.float64}
    return {**base, "positions": positions, "max_length": longest, **options}


def perturb(model: torch.nn.Module) -> None:
    """Move every parameter from its start, so that scales of 0 and branches of 0 hide nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def translator(recipe: str = "deepnorm", positions: str = "sinusoidal", **options: Any) -> kl.EncoderDecoder:
    model = kl.EncoderDecoder(**sizes(positions, **options), encoder_layers=2, decoder_layers=3, recipe=recipe)
    perturb(model)
    return model


def language_model(recipe: str = "deepnorm", positions: str = "sinusoidal", **options: Any) -> kl.Decoder:
    model = kl.Decoder(**sizes(positions, **options), layers=3, recipe=recipe)
    perturb(model)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def pad(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# In the quick tests: every recipe with one kind of positions, and every kind with several recipes.
each_recipe_and_positions = pytest.mark.parametrize(
    ("recipe", "positions"),
    [
        pytest.param(recipe, positions, marks=() if number % len(POSITIONS) == position else pytest.mark.slow)
        for number, recipe in enumerate(RECIPES)
        for position, positions in enumerate(POSITIONS)
    ],
)


@pytest.mark.matrix(4)
@each_recipe_and_positions
def test_translating_step_by_step_equals_the_full_forward(recipe: str, positions: str) -> None:
    model = translator(recipe, positions)
    source = pad([tokens(5), tokens(3)])
    target = pad([tokens(6), tokens(4)])
    full = model(source, target).logits
    memory, cache = model.encode(source), model.new_cache(6)
    steps = [model.decode(target[:, at : at + 1], memory, cache=cache).logits for at in range(6)]
    close(torch.cat(steps, dim=1), full)


@pytest.mark.matrix(4)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("options", [{}, {"pad_id": None}, {"kv_heads": 2}], ids=["padded", "unpadded", "grouped"])
def test_prompt_then_steps_equals_the_full_forward(positions: str, options: dict[str, Any]) -> None:
    model = language_model("sub_ln", positions, **options)
    text = tokens(2, 9)
    if model.config.pad_id is not None:
        text[0, :3] = 0  # a shorter prompt, padded on its left
    full = model(text).logits
    cache = model.new_cache(9)
    parts = [model(part, cache=cache).logits for part in text.split([4, 3, 1, 1], dim=1)]
    close(torch.cat(parts, dim=1), full)
    assert cache.length == 9


@pytest.mark.matrix(4)
@each_recipe_and_positions
def test_a_padded_batch_equals_its_sentences_one_by_one(recipe: str, positions: str) -> None:
    model = translator(recipe, positions)
    sources, targets = [tokens(n) for n in (7, 2, 4)], [tokens(n) for n in (3, 6, 1)]
    batch = model(pad(sources), pad(targets)).logits
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        close(batch[row, : len(target)], model(source[None], target[None]).logits[0])


@pytest.mark.matrix(3)
@pytest.mark.parametrize("positions", [each for each in POSITIONS if each != "xpos"])
@pytest.mark.parametrize("recipe", ["deepnorm", "normformer"])
def test_an_encoder_may_be_padded_on_either_side(recipe: str, positions: str) -> None:
    model = kl.Encoder(**sizes(positions), layers=3, recipe=recipe)
    perturb(model)
    short = tokens(4)
    alone = model(short[None]).logits
    for batch, at in ((torch.cat([short, torch.zeros(3).long()]), 0), (torch.cat([torch.zeros(3).long(), short]), 3)):
        logits = model(batch[None]).logits
        assert logits is not None
        close(logits[0, at : at + 4], alone[0])


@given(
    documents=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4),
    positions=st.sampled_from(POSITIONS),
)
@settings(deadline=None, max_examples=20)
def test_packed_documents_equal_separate_ones(documents: list[tuple[int, int, int]], positions: str) -> None:
    """Each document is (tokens, padding before it, padding behind it)."""
    torch.manual_seed(0)
    model = language_model(positions=positions, max_length=32 if positions == "learned" else None)
    texts = [tokens(length) for length, _, _ in documents]
    padded = [torch.nn.functional.pad(text, case[1:]) for text, case in zip(texts, documents, strict=True)]
    segments = torch.cat([torch.full((len(part),), index) for index, part in enumerate(padded)])
    packed = torch.cat(padded)
    logits = model(packed[None], segments=segments[None]).logits[0]
    close(logits[packed != 0], torch.cat([model(text[None]).logits[0] for text in texts]))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("positions", POSITIONS)
def test_prompts_padded_on_their_right_can_be_continued(positions: str) -> None:
    model = language_model(positions=positions)
    short, long, more = tokens(2), tokens(5), tokens(2, 3)
    cache = model.new_cache(8)
    model(pad([short, long]), cache=cache)
    steps = torch.cat([model(step, cache=cache).logits for step in more.split(1, dim=1)], dim=1)
    for row, prompt in enumerate((short, long)):
        close(steps[row], model(torch.cat([prompt, more[row]])[None]).logits[0, -3:])


@pytest.mark.slow
@given(
    pairs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    positions=st.sampled_from(POSITIONS),
)
@settings(deadline=None, max_examples=20)
def test_packed_translations_equal_separate_ones(pairs: list[tuple[int, int]], positions: str) -> None:
    torch.manual_seed(0)
    model = translator(positions=positions)
    sources, targets = [tokens(n) for n, _ in pairs], [tokens(n) for _, n in pairs]
    source_segments, target_segments = (
        torch.cat([torch.full((len(part),), index) for index, part in enumerate(parts)])[None] for parts in (sources, targets)
    )
    packed = model(
        torch.cat(sources)[None],
        torch.cat(targets)[None],
        source_segments=source_segments,
        target_segments=target_segments,
    ).logits[0]
    separate = [model(s[None], t[None]).logits[0] for s, t in zip(sources, targets, strict=True)]
    close(packed, torch.cat(separate))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_decoder_never_looks_ahead(positions: str) -> None:
    model = language_model(positions=positions)
    first, second = tokens(1, 8), tokens(1, 8)
    second[:, :5] = first[:, :5]
    close(model(first).logits[:, :5], model(second).logits[:, :5])
    assert not torch.equal(model(first).logits[:, 5:], model(second).logits[:, 5:])


@pytest.mark.parametrize("positions", ["rotary", "xpos", "t5", "none"])
def test_relative_positions_do_not_see_a_shift(positions: str) -> None:
    model = language_model(positions=positions, pad_id=None)
    text = tokens(1, 6)
    shifted = torch.cat([tokens(1, 3), text], dim=1)
    segments = torch.tensor([[0] * 3 + [1] * 6])
    places = model(shifted, segments=segments).states[:, 3:]
    close(places, model(text).states)


@pytest.mark.parametrize("positions", [each for each in POSITIONS if each != "none"])
def test_positions_tell_order(positions: str) -> None:
    model = language_model(positions=positions)
    one, other = torch.tensor([[3, 4, 5]]), torch.tensor([[4, 3, 5]])
    assert not torch.allclose(model(one).logits[0, -1], model(other).logits[0, -1], atol=1e-4)


def test_an_encoder_without_positions_is_blind_to_order() -> None:
    model = kl.Encoder(**sizes("none"), layers=2)
    close(model(torch.tensor([[3, 4, 5]])).states[0, -1], model(torch.tensor([[4, 3, 5]])).states[0, -1])


def test_xpos_scores_decay_with_the_distance_and_rotate_as_rotary() -> None:
    from kilolayer.layers.position import Rotary

    positions = torch.arange(40)[None]
    query = torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 1, 40, 16)
    plain, decaying = (Rotary(16, decays)(positions, torch.float64) for decays in (False, True))
    share = (torch.arange(0, 16, 2, dtype=torch.float64) / 16 + 0.4) / 1.4
    for early, late in ((3, 3), (0, 17), (5, 39)):
        turned = [
            rotation.rotate_query(query)[0, 0, late] * rotation.rotate_key(query)[0, 0, early] for rotation in (plain, decaying)
        ]
        close(turned[1], turned[0] * (share ** ((late - early) / 512)).repeat(2))


def test_grouped_query_heads_equal_repeated_key_heads() -> None:
    grouped, full = language_model(kv_heads=2), language_model()
    state = full.state_dict()
    for name, weight in grouped.state_dict().items():
        if "query_key_value" in name:
            query, key, value = weight.split([24, 12, 12])
            repeated = [part.unflatten(0, (2, 6)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (key, value)]
            weight = torch.cat([query, *repeated])
        state[name] = weight
    full.load_state_dict(state)
    text = tokens(2, 7)
    close(grouped(text).logits, full(text).logits)


@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder_decoder"])
def test_embeddings_in_the_place_of_ids(shape: str) -> None:
    ids, target = tokens(2, 5), tokens(2, 4)
    ids[1, 3:] = 0
    model: Any = {
        "encoder": lambda: kl.Encoder(**sizes(), layers=2),
        "decoder": language_model,
        "encoder_decoder": translator,
    }[shape]()
    vectors = model.embedding(ids)
    if shape == "encoder_decoder":
        close(model(target=target, embeddings=vectors, source_mask=ids != 0).logits, model(ids, target).logits)
    else:
        close(model(embeddings=vectors, mask=ids != 0).logits, model(ids).logits)


def test_an_encoder_without_a_vocabulary() -> None:
    model = kl.Encoder(vocab_size=None, dim=16, heads=2, ffn_dim=32, layers=2)
    out = model(embeddings=torch.randn(2, 5, 16))
    assert out.logits is None
    assert out.states.shape == (2, 5, 16)


def test_hidden_states_on_request() -> None:
    model = translator()
    source, target = tokens(2, 5), tokens(2, 4)
    out = model(source, target, hidden_states=True)
    assert out.hidden_states is not None
    assert out.encoder_hidden_states is not None
    assert [state.shape for state in out.hidden_states] == [(2, 4, 24)] * 4
    assert len(out.encoder_hidden_states) == 3
    close(out.hidden_states[-1], out.states)  # Post-LN: nothing stands on top
    close(out.encoder_hidden_states[-1], out.memory)
    assert model(source, target).hidden_states is None
    assert float(out.router_loss) == 0.0


@pytest.mark.parametrize(("encoder", "decoder"), [(60, 12), (12, 60), (1, 1)])
def test_asymmetric_depths(encoder: int, decoder: int) -> None:
    model = kl.EncoderDecoder(VOCABULARY, 16, 2, 32, encoder, decoder)
    assert (len(model.encoder.blocks), len(model.decoder.blocks)) == (encoder, decoder)
    assert model(tokens(2, 4), tokens(2, 3)).logits.isfinite().all()


@pytest.mark.parametrize(("tie", "tables"), [(True, 1), ("output", 2), (False, 3)])
def test_tied_embeddings(tie: bool | str, tables: int) -> None:
    model = kl.EncoderDecoder(VOCABULARY, 16, 2, 32, 1, 1, tie_embeddings=tie)  # pyright: ignore[reportArgumentType]
    assert sum(parameter.shape == (VOCABULARY, 16) for parameter in model.parameters()) == tables
    assert sum(tensor.shape == (VOCABULARY, 16) for tensor in model.state_dict().values()) == tables


def test_separate_vocabularies() -> None:
    model = kl.EncoderDecoder(11, 16, 2, 32, 1, 1, source_vocab_size=40, tie_embeddings="output")
    assert model(torch.tensor([[39, 2]]), torch.tensor([[10]])).logits.shape == (1, 1, 11)


def test_an_empty_source_gives_finite_numbers_and_gradients() -> None:
    model = translator()
    logits = model(torch.zeros(1, 3).long(), tokens(1, 4)).logits
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_mask_lets_the_first_target_token_be_the_padding_token() -> None:
    model = translator()
    source, target = tokens(1, 4), torch.tensor([[0, 5, 6]])
    shown = torch.ones(1, 3, dtype=torch.bool)
    full = model(source, target, target_mask=shown).logits
    memory, cache = model.encode(source), model.new_cache(3)
    steps = [model.decode(part, memory, mask=shown[:, :1], cache=cache).logits for part in target.split(1, dim=1)]
    close(torch.cat(steps, dim=1), full)
    assert not torch.allclose(full, model(source, target).logits)


def test_dropout_acts_in_training_alone_and_everywhere() -> None:
    for option in ("dropout", "attention_dropout", "activation_dropout", "drop_path"):
        model = language_model(**{option: 0.5})
        text = tokens(4, 8)
        assert not torch.equal(model(text).logits, model(text).logits), option
        model.eval()
        assert torch.equal(model(text).logits, model(text).logits), option


def test_dropout_stands_where_it_should() -> None:
    model = kl.EncoderDecoder(VOCABULARY, 16, 2, 32, 2, 2, dropout=0.2, attention_dropout=0.3, activation_dropout=0.4)
    for stack in model.stacks():
        assert isinstance(stack.dropout, torch.nn.Dropout)
        assert stack.dropout.p == 0.2
        for sublayer in stack.sublayers():
            assert isinstance(sublayer.dropout, torch.nn.Dropout)
            assert sublayer.dropout.p == 0.2
            assert sublayer.f.dropout.p == 0.4 if hasattr(sublayer.f, "activation") else sublayer.f.dropout == 0.3


def test_dropout_on_the_input_and_on_a_branch_is_applied() -> None:
    embedded = kl.Encoder(VOCABULARY, 64, 2, 32, 1, dropout=0.5, positions="none")(
        tokens(4, 8), hidden_states=True
    ).hidden_states
    assert embedded is not None
    assert 0.4 < float((embedded[0] == 0).float().mean()) < 0.6
    model = kl.Encoder(VOCABULARY, 64, 2, 32, 1, "post_ln", dropout=0.5)
    branches: list[Tensor] = []
    model.encoder.sublayers()[0].branch.register_forward_hook(lambda _, inputs, __: branches.append(inputs[0]))
    model(tokens(4, 8))
    assert 0.4 < float((branches[0] == 0).float().mean()) < 0.6


def test_attention_dropout_acts_on_both_kinds_of_attention() -> None:
    for kind in ("self_attention", "cross_attention"):
        model = kl.EncoderDecoder(VOCABULARY, 16, 2, 32, 1, 1, attention_dropout=0.5)
        seen: list[Tensor] = []
        model.decoder.blocks[0].get_submodule(kind).register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
        model.encoder.eval()
        source, target = tokens(2, 6), tokens(2, 6)
        if kind == "cross_attention":
            model.decoder.blocks[0].self_attention.eval()
        model(source, target)
        model(source, target)
        assert not torch.equal(seen[0], seen[1]), kind


def test_the_padding_row_gets_no_gradient_from_the_input() -> None:
    model = kl.Encoder(VOCABULARY, 16, 2, 32, 1, tie_embeddings=False)
    ids = torch.tensor([[3, 4, 0]])
    model(ids, mask=torch.ones(1, 3, dtype=torch.bool)).states.square().sum().backward()
    assert model.embedding is not None
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert not gradient[0].any()
    assert gradient[3].any()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_every_recipe_takes_every_norm_and_activation(norm: str, activation: str) -> None:
    normless = {"rezero", "r_fixup", "t_fixup"} if norm == "rms" else set()
    for recipe in set(RECIPES) - normless:
        model = kl.EncoderDecoder(VOCABULARY, 16, 2, 32, 2, 2, recipe, norm=norm, activation=activation)  # pyright: ignore
        model(tokens(2, 4), tokens(2, 3)).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), recipe
