"""Masks of a text: how they are read, and what is filled in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kilolayer as kl
from kilolayer.data.documents import TextPart
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.data.vocabulary import ByteVocabulary, TextVocabulary, vocabulary_for
from kilolayer.errors import InputError
from kilolayer.generate.fill import decode_with_masks, fill_texts, masked_tokens

LETTERS = {byte: byte + 4 for byte in range(256)}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> TextVocabulary:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("the red house sees the green tree and the red tree\n" * 20)
    config = TokenizerConfig(kind="bpe", vocab_size=300, normalization="identity")
    return vocabulary_for(TextPart((folder / "text",)), config, folder / "cache")


def test_every_mask_is_a_token_and_bytes_keep_their_spaces() -> None:
    ids = masked_tokens("a <mask>b<mask>", ByteVocabulary(), 20)
    assert ids == [2, LETTERS[ord("a")], LETTERS[ord(" ")], 260, LETTERS[ord("b")], 260, 3]
    assert masked_tokens("<mask>", ByteVocabulary(), 3) == [2, 260, 3]
    assert masked_tokens("<mask> <mask>", ByteVocabulary(), 9) == [2, 260, LETTERS[ord(" ")], 260, 3]


def test_a_space_before_a_mask_belongs_to_the_piece_that_is_looked_for(pieces: TextVocabulary) -> None:
    mask = pieces.vocab_size
    house = pieces.encode(b" house").tolist()
    assert len(house) == 1
    whole = [2, *pieces.encode(b"the red house sees").tolist(), 3]
    assert masked_tokens("the red <mask> sees", pieces, 99) == [mask if token == house[0] else token for token in whole]
    assert masked_tokens("the red<mask> sees", pieces, 99) == masked_tokens("the red <mask> sees", pieces, 99)
    # One space alone: a second one is text.
    assert len(masked_tokens("the red  <mask> sees", pieces, 99)) == len(whole) + 1
    assert masked_tokens("<mask> <mask>", pieces, 99) == [2, mask, mask, 3]


def test_spelling_is_the_way_back(pieces: TextVocabulary) -> None:
    for vocabulary in (pieces, ByteVocabulary()):
        for text in ("the<mask> house<mask>", "<mask>", "no mask", "<mask><mask>ä"):
            ids = masked_tokens(f"{text}<mask>", vocabulary, 99)[:-2]
            assert decode_with_masks(ids, vocabulary) == text


def test_texts_without_a_mask_and_texts_that_are_too_long_are_refused() -> None:
    with pytest.raises(InputError, match=r"has no mask\n.*line 3\n.*<mask>"):
        masked_tokens("a < mask >", ByteVocabulary(), 20, "standard input, line 3")
    assert len(masked_tokens("abcde<mask>", ByteVocabulary(), 8)) == 8
    with pytest.raises(InputError, match="has 6 tokens, but the model reads 5 at once"):
        masked_tokens("abcde<mask>", ByteVocabulary(), 7)


def encoder(**options: object) -> kl.Encoder:
    torch.manual_seed(1)
    return kl.Encoder(261, dim=16, heads=2, ffn_dim=32, layers=2, pad_id=None, dtype=torch.float64, **options).train()  # pyright: ignore


@pytest.mark.parametrize("options", [{}, {"positions": "learned", "max_length": 20}, {"moe": kl.MoE(experts=2)}], ids=str)
def test_guesses_are_the_most_probable_tokens_of_one_forward_a_text(options: dict) -> None:
    model, vocabulary = encoder(dropout=0.5, **options), ByteVocabulary()
    texts = ["a<mask>c", "<mask> and then <mask>", "x<mask>"]
    found = fill_texts(model, texts, [masked_tokens(text, vocabulary, 20) for text in texts], vocabulary, 3)
    assert model.training
    model.eval()
    for text, each in zip(texts, found, strict=True):
        ids = masked_tokens(text, vocabulary, 20)
        with torch.no_grad():
            shares = model(torch.tensor([ids])).logits[0].softmax(dim=-1)
        positions = [position for position, token in enumerate(ids) if token == 260]
        assert each.text == text
        assert len(each.masks) == len(positions)
        for position, guesses in zip(positions, each.masks, strict=True):
            best = sorted(range(4, 260), key=lambda token, at=position: -float(shares[at, token]))[:3]
            assert [guess.id for guess in guesses] == best
            assert [guess.probability for guess in guesses] == pytest.approx(
                [float(shares[position, token]) for token in best], rel=1e-5
            )
            assert guesses[0].token == vocabulary.decode([best[0]])
            ids[position] = best[0]
        assert each.filled == vocabulary.decode(ids)


def test_special_tokens_are_no_guesses() -> None:
    model, vocabulary = encoder(tie_embeddings=False), ByteVocabulary()
    assert model.vocabulary is not None
    with torch.no_grad():
        model.vocabulary.weight[:4] *= 100
        model.vocabulary.weight[260] *= 100
    ids = masked_tokens("a<mask>", vocabulary, 20)
    (found,) = fill_texts(model, ["a<mask>"], [ids], vocabulary, 1000)
    assert sorted(guess.id for guess in found.masks[0]) == list(range(4, 260))
    assert sum(guess.probability for guess in found.masks[0]) < 0.9


def test_guesses_for_pieces_are_their_text(pieces: TextVocabulary, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = kl.Encoder(pieces.vocab_size + 1, dim=16, heads=2, ffn_dim=32, layers=2, pad_id=None)
    text = "the red <mask> sees"
    (found,) = fill_texts(model, [text], [masked_tokens(text, pieces, 99)], pieces, 4)
    assert found.filled == f"the red{found.masks[0][0].token} sees"
