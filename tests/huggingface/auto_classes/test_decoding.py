"""Generation by Transformers: its cache, its beams, padding on the left; the same tokens as by Kilolayer's own searches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.huggingface.auto_classes.padding import real_positions
from tests.huggingface.auto_classes.small_models import SOURCE, bare_model, wrapped

SPARSE = kl.MoE(experts=4, top_k=2, every=2)
FORMS: dict[str, dict[str, Any]] = {
    "Sub-LN": {},
    "sparse, rotary": {"moe": SPARSE, "positions": "rotary"},
    "xpos, shared keys": {"positions": "xpos", "kv_heads": 1},
    "t5": {"positions": "t5"},
    "learned": {"positions": "learned", "max_length": 40},
    "DLCL": {"recipe": "dlcl"},
}
LONGEST = 8
# Kilolayer writes neither padding nor start; Transformers is told so.
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 5, "early_stopping": True, "length_penalty": 1.0},
}


def by_transformers(model: Any, source: Tensor, search: str, **options: Any) -> list[list[int]]:
    """The tokens that follow, without start, end and padding."""
    given = wrapped(model)
    settings = {"max_new_tokens": LONGEST, "do_sample": False, "suppress_tokens": [0, 2], **SEARCHES[search], **options}
    found = given.generate(source, attention_mask=source != 0, **settings)
    found = found[:, 1:] if given.config.is_encoder_decoder else found[:, source.shape[1] :]
    return [_until_end(row) for row in found.tolist()]


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(3)] if 3 in tokens else tokens


def by_kilolayer(model: Any, source: Tensor, search: str) -> list[list[int]]:
    config = SearchConfig(method="beam" if search == "beam" else "greedy", max_length_factor=0, max_length_extra=LONGEST)
    return [found[0].tokens for found in generate(model, source, config)]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("search", [*SEARCHES])
@pytest.mark.parametrize("form", [*FORMS])
def test_a_translator_writes_the_same_tokens_as_in_kilolayer(form: str, search: str) -> None:
    model = bare_model("encoder_decoder", tie_embeddings=False, **FORMS[form])
    generator = torch.Generator().manual_seed(2)
    source = torch.randint(4, 23, (6, 7), generator=generator)
    for row, length in enumerate((7, 7, 5, 3, 2, 1)):
        source[row, length - 1] = 3
        source[row, length:] = 0
    wanted = by_kilolayer(model, source, search)
    assert len({*map(tuple, wanted)}) > 1
    assert by_transformers(model, source, search) == wanted


@pytest.mark.matrix(6)
@pytest.mark.parametrize("search", [*SEARCHES])
@pytest.mark.parametrize("form", [*FORMS])
def test_prompts_of_different_lengths_go_on_as_each_alone(form: str, search: str) -> None:
    model = bare_model("decoder", tie_embeddings=False, **FORMS[form])
    rows = [[5, 6, 7, 8, 9], [10, 11], [12]]
    padded = torch.tensor([[0] * (5 - len(row)) + row for row in rows])
    alone = [by_transformers(model, torch.tensor([row]), search)[0] for row in rows]
    assert by_transformers(model, padded, search) == alone
    if search == "greedy":
        right = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
        assert alone == by_kilolayer(model, right, search)


@pytest.mark.parametrize("shape", ["decoder", "encoder_decoder"])
def test_each_step_computes_the_new_position_alone(shape: str) -> None:
    model = bare_model(shape)
    lengths: dict[str, list[int]] = {}
    for stack in model.stacks():
        stack.register_forward_hook(
            lambda stack, inputs, _: lengths.setdefault(stack.side, []).append(inputs[0].states.shape[1])
        )
    keys = model.decoder.blocks[0].cross_attention.f.key_value if shape == "encoder_decoder" else None
    projected: list[int] = []
    if keys is not None:
        keys.register_forward_hook(lambda *_: projected.append(1))
    wrapped(model).generate(SOURCE[:1], max_new_tokens=LONGEST, min_new_tokens=LONGEST, do_sample=False)
    first = 1 if shape == "encoder_decoder" else SOURCE.shape[1]
    assert lengths["decoder"] == [first] + [1] * (LONGEST - 1)
    if shape == "encoder_decoder":
        assert lengths["encoder"] == [SOURCE.shape[1]]
        assert projected == [1]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("form", [*FORMS])
def test_scores_step_by_step_are_those_of_one_forward(form: str) -> None:
    model = wrapped(bare_model("decoder", **FORMS[form]))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    tokens = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 10, 11, 12]])
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    past, parts = None, []
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        out = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past, use_cache=True)
        past = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask == 1], whole[mask == 1], atol=1e-5, rtol=1e-5)
    # Padding is at no position: the row alone scores the same.
    alone = model(tokens[1:, 2:], use_cache=False).logits[0]
    torch.testing.assert_close(whole[1, 2:], alone, atol=1e-5, rtol=1e-5)


def test_embeddings_may_stand_for_tokens() -> None:
    model = wrapped(bare_model("decoder"))
    embedded = model.get_input_embeddings()(SOURCE[:1])
    ids = model.generate(SOURCE[:1], max_new_tokens=4, do_sample=False)[0, SOURCE.shape[1] :].tolist()
    assert model.generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False)[0].tolist() == ids
    both = wrapped(bare_model("encoder_decoder", tie_embeddings=False, source_vocab_size=29))
    source = torch.tensor([[27, 28, 3]])
    out = both(inputs_embeds=both.get_input_embeddings()(source), decoder_input_ids=SOURCE[:1], use_cache=False)
    assert torch.equal(out.logits, both(source, decoder_input_ids=SOURCE[:1], use_cache=False).logits)


def test_states_of_all_layers_come_out_of_generation() -> None:
    model = wrapped(bare_model("encoder_decoder"))
    out = model.generate(
        SOURCE,
        attention_mask=SOURCE != 0,
        max_new_tokens=3,
        min_new_tokens=3,
        do_sample=False,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    assert len(out.encoder_hidden_states) == 3
    assert [len(step) for step in out.decoder_hidden_states] == [3, 3, 3]
    whole = model(SOURCE, attention_mask=SOURCE != 0, decoder_input_ids=out.sequences[:, :-1], output_hidden_states=True)
    for index, step in enumerate(out.decoder_hidden_states):
        torch.testing.assert_close(step[-1][:, 0], whole.decoder_hidden_states[-1][:, index], atol=1e-5, rtol=1e-5)


def test_a_cache_of_fixed_size_is_refused() -> None:
    model = wrapped(bare_model("decoder"))
    with pytest.raises(InputError, match="StaticCache has a fixed size"):
        model(SOURCE, past_key_values=StaticCache(config=model.config, max_cache_len=16))


def test_a_mask_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"attention_mask has shape \[2, 3\]"):
        real_positions(torch.ones(2, 3), 1, 3)
