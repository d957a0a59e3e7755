"""Kilolayer's language models as lm-eval models, so that any task of the evaluation harness can run on them.

`cli/harness.py` opens a run and registers it under a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import InputError, OptionError, unknown
from kilolayer.evaluate.choices import Pair, encode_pair, score_tokens
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.models.decoder import Decoder

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise InputError("lm-eval is not installed", where=str(error), fix='pip install "kilolayer[eval]"') from None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

MAX_TOKENS = 256
"""Maximum number of tokens to generate if a task does not set one, as in lm-eval's other models."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""The option names that lm-eval accepts for the maximum number of tokens; the first that is given is used."""
SAMPLING = ("temperature", "top_k", "top_p")


class HarnessModel(TemplateLM):
    """A decoder, its vocabulary and its context length, with lm-eval's interface."""

    def __init__(self, model: Decoder, vocabulary: TextVocabulary, length: int) -> None:
        super().__init__()
        self.model, self.vocabulary, self.max_length = model, vocabulary, length

    @property
    def eot_token_id(self) -> int:
        return END

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.vocabulary.encode(string.encode()).tolist()

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        first, second = encode_pair(self.vocabulary.encode, context, continuation)
        return first.tolist(), second.tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = score_tokens(self.model, [_pair(context, tokens) for _, context, tokens in requests], self.max_length)
        for (text, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, each as a document; long ones are read in windows that do not overlap."""
        texts = [request.args[0] for request in requests]
        found = score_tokens(self.model, [_pair([END], self.tok_encode(text)) for text in texts], self.max_length)
        for text, (value, _) in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return [value for value, _ in found]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context, up to the first of the task's stop strings."""
        written: list[str] = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            search, stops = _search(requests[numbers[0]].args[1])
            texts = [self.tok_encode(requests[number].args[0]) or [END] for number in numbers]
            found = continue_texts(self.model, texts, search, context=self.max_length, indices=numbers)
            for number, (each,) in zip(numbers, found, strict=True):
                written[number] = _until(self.vocabulary.decode(each.tokens), stops)
                self.cache_hook.add_partial("generate_until", requests[number].args, written[number])
        return written


def registered(name: str) -> Callable[[type[HarnessModel]], type[HarnessModel]]:
    """Register a class of models with lm-eval under a name."""
    return register_model(name)


def _pair(context: Sequence[int], continuation: Sequence[int]) -> Pair:
    return np.array(context, np.int64), np.array(continuation, np.int64)


def _search(options: dict[str, Any]) -> tuple[SearchConfig, list[str]]:
    """The search configuration and the stop strings from the options of a task."""
    known = {"until", *LENGTHS, "do_sample", "num_beams", *SAMPLING}
    for name in options:
        if name not in known:
            raise unknown(name, known, kind="generation option")
    if options.get("num_beams") not in (None, 1):
        raise OptionError("language models have no beam search", where="num_beams", fix="set num_beams to 1 in the task's file")
    until = options.get("until") or []
    most = next((options[name] for name in LENGTHS if options.get(name) is not None), MAX_TOKENS)
    length = {"max_length_factor": 0.0, "max_length_extra": most}
    samples, temperature = options.get("do_sample"), options.get("temperature")
    if temperature == 0 or not (temperature if samples is None else samples):
        return SearchConfig(method="greedy", **length), [until] if isinstance(until, str) else until
    given = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    return SearchConfig(method="sample", **given, **length), [until] if isinstance(until, str) else until


def _until(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((end for stop in stops if stop and (end := text.find(stop)) >= 0), default=len(text))]
