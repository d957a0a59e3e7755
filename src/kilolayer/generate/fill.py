"""Fill the masks of a text with the most probable tokens under a masked language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.data.vocabulary import ByteVocabulary, TextVocabulary
from kilolayer.errors import InputError
from kilolayer.layers.modules import in_mode
from kilolayer.models.encoder import Encoder
from kilolayer.moe.shard import refuse_part

MASK = "<mask>"


@dataclass(frozen=True)
class Guess:
    """A token for one mask, and its probability over the vocabulary."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Filled:
    """A text, the best guesses for each of its masks, most probable first, and the text filled with the first of each."""

    text: str
    filled: str
    masks: list[list[Guess]]


def masked_tokens(text: str, vocabulary: TextVocabulary, length: int, where: str = "") -> list[int]:
    """The ids of a text with masks, between start and end. The mask's id follows the vocabulary's last id.

    length: the maximum number of ids.
    """
    parts = split_at_masks(text, vocabulary)
    if len(parts) == 1:
        raise InputError(
            "the text has no mask", where=where, fix=f'write {MASK} where a token is to be predicted: "The {MASK} sings."'
        )
    ids = [START]
    for part in parts:
        ids += [*vocabulary.encode(part.encode()).tolist(), vocabulary.vocab_size]
    ids[-1] = END
    if len(ids) > length:
        raise InputError(
            f"the text has {len(ids) - 2:,} tokens, but the model reads {length - 2:,} at once", where=where, fix="shorten it"
        )
    return ids


def split_at_masks(text: str, vocabulary: TextVocabulary) -> list[str]:
    """The parts of a text between its masks; one part if there are none.

    A space before a mask belongs to the token to be predicted, unless tokens are bytes.
    """
    parts = text.split(MASK)
    if isinstance(vocabulary, ByteVocabulary):
        return parts
    return [*(part.removesuffix(" ") for part in parts[:-1]), parts[-1]]


@torch.inference_mode()
def fill_texts(
    model: Encoder, texts: Sequence[str], rows: Sequence[Sequence[int]], vocabulary: TextVocabulary, top: int
) -> list[Filled]:
    """The `top` best guesses for the masks of each text. rows: the ids of the texts, from `masked_tokens`.

    Special tokens are never guesses, whatever their probability.
    """
    refuse_part(model)
    mask, device = vocabulary.vocab_size, next(model.parameters()).device
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows], device=device)
    positions = [[position for position, token in enumerate(row) if token == mask] for row in rows]
    most = max(map(len, positions))
    wanted = torch.tensor([[*each, *[0] * (most - len(each))] for each in positions], device=device)
    with in_mode(model, training=False):
        logits = model(tokens, mask=tokens != PAD, positions=wanted).logits
    assert logits is not None
    probabilities = logits.float().softmax(dim=-1)[..., END + 1 : mask]
    best = probabilities.topk(min(top, probabilities.shape[-1]))
    found = []
    for text, row, own, values, ids in zip(texts, rows, positions, best.values.tolist(), best.indices.tolist(), strict=True):
        guesses = [
            [Guess(vocabulary.decode([token + END + 1]), token + END + 1, value) for value, token in zip(*each, strict=True)]
            for each in zip(values[: len(own)], ids[: len(own)], strict=True)
        ]
        filled = list(row)
        for position, each in zip(own, guesses, strict=True):
            filled[position] = each[0].id
        found.append(Filled(text, vocabulary.decode(filled), guesses))
    return found


def decode_with_masks(ids: Sequence[int], vocabulary: TextVocabulary) -> str:
    """The text of ids, with <mask> for masks."""
    rest, parts = list(ids), []
    while vocabulary.vocab_size in rest:
        position = rest.index(vocabulary.vocab_size)
        parts.append(vocabulary.decode(rest[:position]))
        rest = rest[position + 1 :]
    return (MASK if vocabulary.exact else f" {MASK} ").join([*parts, vocabulary.decode(rest)])
