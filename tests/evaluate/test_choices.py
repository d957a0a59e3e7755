"""Likelihoods of continuations: against one forward a choice in fp64, and against Hugging Face's GPT-2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kilolayer as kl
from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.evaluate import choices
from kilolayer.evaluate.choices import Pair, encode_pair, score_choices, score_tokens
from kilolayer.evaluate.shared_prefix import Window, batches, group_by_prefix

VOCABULARY, LENGTH = 24, 20
SHAPES: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "rotary": {"positions": "rotary", "recipe": kl.recipes.get("sub_ln"), "kv_heads": 1},
    "xpos": {"positions": "xpos"},
    "learned": {"positions": "learned", "max_length": LENGTH, "tie_embeddings": False},
    "t5": {"positions": "t5", "recipe": kl.recipes.get("pre_ln")},
    "padded": {"pad_id": 0},
    "stream": {"recipe": kl.recipes.get("dlcl")},
    "normed input": {"recipe": kl.recipes.get("peri_ln")},
    "scaled output": {"recipe": kl.recipes.get("complete_p", base_width=4)},
    "experts": {"moe": kl.MoE(experts=4, second="random", capacity=0.5)},
}


def model_of(shape: str) -> kl.Decoder:
    options = {"pad_id": None, "dropout": 0.3, **SHAPES[shape]}
    config = kl.ModelConfig(shape="decoder", layers=2, dim=16, heads=2, ffn_dim=32, vocab_size=VOCABULARY, **options)
    model = kl.build_model(config, seed=3, dtype=torch.float64)
    assert isinstance(model, kl.Decoder)
    with torch.no_grad():  # far from uniform, so that no two tokens are equally good
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model.train()


def questions(longest_context: int, longest_continuation: int, seed: int = 0) -> list[Pair]:
    """Contexts with four continuations each, and some with one; a continuation of one token is among them."""
    draws = np.random.default_rng(seed)

    def tokens(most: int) -> np.ndarray:
        return draws.integers(4, VOCABULARY, draws.integers(1, most + 1))

    pairs = [(context, tokens(longest_continuation)) for context in [tokens(longest_context) for _ in range(6)] for _ in "abcd"]
    return [*pairs, (pairs[0][0], pairs[0][1][:1]), (np.array([END]), tokens(longest_continuation)), *pairs[:2]]


@torch.no_grad()
def one_forward(model: kl.Decoder, context: np.ndarray, continuation: np.ndarray) -> tuple[float, bool]:
    """ln p(continuation | context) by a loop over its tokens, each predicted from all that a window of LENGTH may hold."""
    whole = np.concatenate([context, continuation])
    read = torch.from_numpy(whole[-(LENGTH + 1) :][:-1])
    logits = model.eval()(read[None]).logits[0].log_softmax(dim=-1)
    total, greedy = 0.0, True
    for index, token in enumerate(continuation.tolist(), len(read) - len(continuation)):
        total += float(logits[index, token])
        greedy = greedy and int(logits[index].argmax()) == token
    return total, greedy


@pytest.mark.matrix(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_likelihoods_are_those_of_one_forward_a_choice(shape: str) -> None:
    model, pairs = model_of(shape), questions(30, 8)
    assert any(len(context) + len(continuation) > LENGTH + 1 for context, continuation in pairs)
    found = score_tokens(model, pairs, LENGTH)
    assert model.training
    for (value, greedy), pair in zip(found, pairs, strict=True):
        expected, is_greedy = one_forward(model, *pair)
        assert value == pytest.approx(expected, abs=1e-10)
        assert greedy is is_greedy


@pytest.mark.parametrize("most", [1, 40, 10_000])
def test_batches_and_parts_of_the_vocabulary_change_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pairs = model_of("rotary"), questions(15, 5)
    expected = [score_tokens(model, [pair], LENGTH)[0] for pair in pairs]
    monkeypatch.setitem(choices.TOKENS_AT_ONCE, "cpu", most)
    monkeypatch.setattr(choices, "SCORES_AT_ONCE", 3 * VOCABULARY)
    for found, alone in zip(score_tokens(model, pairs, LENGTH), expected, strict=True):
        assert found == (pytest.approx(alone[0], abs=1e-10), alone[1])


def test_a_fast_form_gives_the_same_likelihoods() -> None:
    model, pairs = model_of("sinusoidal"), questions(15, 5)
    found, expected = score_tokens(kl.fast(model), pairs, LENGTH), score_tokens(model, pairs, LENGTH)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-10)


def test_what_the_model_writes_is_greedy_and_nothing_else_is() -> None:
    model, prompt = model_of("rotary").eval(), [5, 6, 7]
    text = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(dim=-1)], dim=1)
    tokens = text[0, 3:].numpy()
    other = np.where(np.arange(len(tokens)) == len(tokens) - 1, tokens % (VOCABULARY - 5) + 4, tokens)
    assert other[-1] != tokens[-1]
    right, wrong = score_tokens(model, [(np.array(prompt), tokens), (np.array(prompt), other)], LENGTH)
    assert right[1]
    assert not wrong[1]
    assert right[0] > wrong[0]


@torch.no_grad()
def test_a_continuation_longer_than_the_model_reads_is_scored_in_windows() -> None:
    model = model_of("learned")
    context, continuation = np.arange(4, 9), np.random.default_rng(1).integers(4, VOCABULARY, 2 * LENGTH + 7)
    ((found, _),) = score_tokens(model, [(context, continuation)], LENGTH)
    whole = torch.from_numpy(np.concatenate([context, continuation]))
    model.eval()
    expected = 0.0
    for number, token in enumerate(continuation.tolist()):
        begin = number // LENGTH * LENGTH  # of what the window scores
        end = min(begin + LENGTH, len(continuation))
        first = len(context) + end - LENGTH - 1
        logits = model(whole[None, first : len(context) + number]).logits[0, -1]
        expected += float(logits.log_softmax(dim=-1)[token])
    assert found == pytest.approx(expected, abs=1e-9)


def test_no_continuation_has_likelihood_one() -> None:
    assert score_tokens(model_of("rotary"), [(np.array([5]), np.array([], np.int64))], LENGTH) == [(0.0, True)]


def test_a_question_reads_its_context_once() -> None:
    context = np.arange(100, 110)
    windows = [Window(np.concatenate([context, [number] * 3]), 3) for number in range(4)]
    (row,) = group_by_prefix(windows)
    assert row.length == 10 + 4 * 2  # the last token of each is only predicted
    (batch,) = batches(windows, [row], 1)
    assert batch.tokens.tolist() == [[*range(100, 110), 0, 0, 1, 1, 2, 2, 3, 3]]
    assert batch.positions.tolist() == [[*range(10), 10, 11, 10, 11, 10, 11, 10, 11]]
    assert batch.branches.tolist() == [[0] * 10 + [1, 1, 2, 2, 3, 3, 4, 4]]
    assert batch.at.tolist() == [9, 10, 11, 9, 12, 13, 9, 14, 15, 9, 16, 17]


def test_questions_that_share_little_have_rows_of_their_own() -> None:
    windows = [Window(np.array([END, *range(number, number + 20)]), 5) for number in (10, 50, 90)]
    assert sorted(row.length for row in group_by_prefix(windows)) == [20, 20, 20]


def test_rows_hold_every_window_once_and_no_more_tokens_than_windows() -> None:
    draws = np.random.default_rng(0)
    windows = [Window(draws.integers(0, 2, draws.integers(2, 40)), 1) for _ in range(200)]
    rows = group_by_prefix(windows)
    assert sorted(number for row in rows for number in row.numbers) == list(range(200))
    for row in rows:
        first = windows[row.numbers[0]].inputs[: row.shared]
        assert all((windows[number].inputs[: row.shared] == first).all() for number in row.numbers)
        assert row.length == row.shared + sum(len(windows[number].inputs) - row.shared for number in row.numbers)
    assert sum(row.length for row in rows) < 0.9 * sum(len(window.inputs) for window in windows)


class Pieces:
    """A vocabulary of made pieces, the longest that fits first."""

    pieces = ("ab", "a", "b", " ", " a", "c")

    def encode(self, data: bytes) -> np.ndarray:
        text, ids = data.decode(), []
        while text:
            piece = max((each for each in self.pieces if text.startswith(each)), key=len)
            ids.append(4 + self.pieces.index(piece))
            text = text[len(piece) :]
        return np.array(ids, np.int64)


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("c", " a", (["c"], [" a"])),
        ("c ", "a", (["c"], [" a"])),  # the space moves
        ("", "ab", (None, ["ab"])),
        (" ", "a", (None, [" a"])),
        ("ca", "bc", (["c", "a"], ["c"])),  # "ab" spans the border: what is behind as many tokens as the context has
        ("a", "b", (["a"], ["b"])),  # "ab" leaves nothing
        ("a", "", (["a"], [])),
    ],
)
def test_the_border_of_context_and_continuation(context: str, continuation: str, expected: tuple[Any, Any]) -> None:
    before, after = (None if part is None else [4 + Pieces.pieces.index(piece) for piece in part] for part in expected)
    found = encode_pair(Pieces().encode, context, continuation)
    assert [each.tolist() for each in found] == [[END] if before is None else before, after]


def test_texts_are_scored_with_their_tokens_bytes_and_cuts() -> None:
    vocabulary = ByteVocabulary()
    model = kl.Decoder(vocabulary.vocab_size, 16, 2, 32, 1, pad_id=None).double()
    texts = [("Where? ", "Hé"), ("x" * LENGTH, " far"), ("", "no context")]
    found = score_choices(model, vocabulary, texts, LENGTH)
    assert [(each.tokens, each.bytes, each.cut) for each in found] == [(4, 3, False), (4, 4, True), (10, 10, False)]
    pairs = [encode_pair(vocabulary.encode, *text) for text in texts]
    assert [each.log_likelihood for each in found] == [value for value, _ in score_tokens(model, pairs, LENGTH)]


def test_likelihoods_are_those_of_gpt2_with_its_weights() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24}
    config = transformers.GPT2Config(**shape, activation_function="gelu", bos_token_id=END, eos_token_id=END)
    gpt2 = transformers.GPT2LMHeadModel(config).double().eval()
    options: dict[str, Any] = {"activation": "gelu", "positions": "learned", "max_length": LENGTH, "pad_id": None}
    options |= {"tie_embeddings": True, "scale_embeddings": False}
    ours = kl.Decoder(VOCABULARY, 16, 2, 24, 2, kl.recipes.get("pre_ln"), **options).double()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    ours.load_state_dict(_gpt2_in_our_names(gpt2.transformer))
    pairs = questions(LENGTH, 8)
    for (found, greedy), (context, continuation) in zip(score_tokens(ours, pairs, LENGTH), pairs, strict=True):
        whole = torch.from_numpy(np.concatenate([context, continuation])[-(LENGTH + 1) :])
        with torch.no_grad():
            logits = gpt2(whole[None, :-1]).logits[0, -len(continuation) :].log_softmax(dim=-1)
        target = torch.from_numpy(continuation)
        assert found == pytest.approx(float(logits.gather(1, target[:, None]).sum()), abs=1e-9)
        assert greedy == bool((logits.argmax(dim=-1) == target).all())


def _gpt2_in_our_names(trunk: Any) -> dict[str, torch.Tensor]:
    """GPT-2 keeps its matrices as [inputs, outputs]."""
    names = {"ln_1": "self_attention.pre_norm", "attn.c_attn": "self_attention.f.query_key_value"}
    names |= {"attn.c_proj": "self_attention.f.output", "ln_2": "feedforward.pre_norm"}
    names |= {"mlp.c_fc": "feedforward.f.input", "mlp.c_proj": "feedforward.f.output"}
    tensors = {"embedding.weight": trunk.wte.weight, "decoder.positions.at_input.weight": trunk.wpe.weight}
    tensors |= {"decoder.top_norm.weight": trunk.ln_f.weight, "decoder.top_norm.bias": trunk.ln_f.bias}
    for index, layer in enumerate(trunk.h):
        for theirs, ours in names.items():
            module = layer.get_submodule(theirs)
            name = f"decoder.blocks.{index}.{ours}"
            tensors[f"{name}.weight"] = module.weight.T if module.weight.dim() == 2 else module.weight
            tensors[f"{name}.bias"] = module.bias
    return {name: tensor.detach() for name, tensor in tensors.items()}
