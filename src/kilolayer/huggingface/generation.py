"""generation_config.json: the run's search settings as options of Transformers' `generate`.

With `early_stopping`, beam search in Transformers is the same as in Kilolayer: both rank by log p / length^penalty, with the
end token counted in the length, and stop when as many hypotheses have ended as the beam is wide. Transformers has a single
length limit for a whole batch.
"""

from __future__ import annotations

from typing import Any

from kilolayer.data.tokenizer import END, PAD, START
from kilolayer.generate.config import SearchConfig
from kilolayer.huggingface.source import Source

NEVER_WRITTEN = (PAD, START)


def special_tokens(source: Source, left_out: int = 0) -> dict[str, int]:
    """The special token ids of config.json and generation_config.json. left_out: number of first ids dropped."""
    if source.model.config.vocab_size is None or source.model.config.image is not None:
        return {}
    # A language model has read the end token of a document before each beginning, and never a start token.
    start, end = (END if source.model.config.shape == "decoder" else START) - left_out, END - left_out
    found = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": start if left_out else PAD}
    return {**found, "decoder_start_token_id": start} if source.model.config.shape == "encoder_decoder" else found


def generation_config(source: Source, left_out: int = 0) -> dict[str, Any]:
    """The defaults of `generate`."""
    never = [[token - left_out] for token in NEVER_WRITTEN if token >= left_out]
    found: dict[str, Any] = {**special_tokens(source, left_out), **({"bad_words_ids": never} if never else {})}
    return {**found, **source.task.generation(source.positions)}


def search_options(search: SearchConfig) -> dict[str, Any]:
    """The run's search as options of `generate`."""
    several = {"num_return_sequences": search.n_best} if search.n_best > 1 else {}
    if search.method == "beam":
        penalty = 1.0 if search.length_penalty is None else search.length_penalty
        return {"num_beams": search.width, "length_penalty": penalty, "early_stopping": True, "do_sample": False, **several}
    if search.method == "greedy":
        return {"num_beams": 1, "do_sample": False}
    sampled = {"temperature": search.temperature, "top_p": search.top_p}
    given = {name: value for name, value in sampled.items() if value is not None}
    return {"num_beams": 1, "do_sample": True, "top_k": search.top_k or 0, **given, **several}
