"""A trained language model as a Python object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast, overload

from kilolayer.data.tokenizer import END
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.errors import OptionError, shown, unknown
from kilolayer.generate.config import OPTIONS_OF, SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.generate.hypothesis import Hypothesis
from kilolayer.models.decoder import Decoder
from kilolayer.runs.trained_run import TrainedRun, as_texts, batched, checked_text
from kilolayer.tasks.causal_lm.config import CausalLMConfig

PROMPTS_AT_ONCE = 64
HELD = 16  # tokens; a character has at most four bytes, each of them perhaps a token


@dataclass(frozen=True)
class Continuation:
    """The continuation of a text, without its prompt. ended: the model ended it, not the limit on tokens."""

    text: str
    log_probability: float
    ended: bool


@dataclass(frozen=True)
class Continued:
    """A prompt with its continuations. cut: the prompt was longer than the model's context, and its beginning was ignored."""

    prompt: str
    continuations: list[Continuation]
    cut: bool


class LanguageModel(TrainedRun):
    """A trained run of the task `causal_lm`."""

    @property
    def config(self) -> CausalLMConfig:
        """The run's complete configuration, with every default filled in."""
        return cast("CausalLMConfig", super().config)

    @property
    def context(self) -> int:
        """The model's context length in tokens."""
        return self.config.text.length

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str, *, max_tokens: int = 256, greedy: bool = False, **sampling: Any
    ) -> str: ...
    @overload
    def generate(
        self, prompts: Iterable[str], *, max_tokens: int = 256, greedy: bool = False, **sampling: Any
    ) -> list[str]: ...
    def generate(
        self, prompts: str | Iterable[str], *, max_tokens: int = 256, greedy: bool = False, **sampling: Any
    ) -> str | list[str]:
        """The continuation of each prompt, without the prompt; one text gives one continuation.

        max_tokens: maximum number of new tokens. greedy: take the most probable token each time instead of sampling. sampling:
        temperature, top_k, top_p, seed; the same seed and prompts give the same texts.
        """
        config = self.search(max_tokens=max_tokens, greedy=greedy, **sampling)
        if config.n_best > 1:
            raise OptionError(
                f"samples={config.n_best}, but generate returns one text per prompt",
                fix="use .continuations(prompts, run.search(samples=...))",
            )
        found = [each.continuations[0].text for each in self.continuations(as_texts(prompts, "prompt"), config)]
        return found[0] if isinstance(prompts, str) else found

    def continuations(
        self, prompts: Iterable[str], search: SearchConfig | None = None, *, at_once: int = PROMPTS_AT_ONCE
    ) -> Iterator[Continued]:
        """Yield each prompt with its continuations and their probabilities; `at_once` prompts are read ahead.

        A single text is one prompt.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        prompts = (checked_text(prompt, f"prompt {number}") for number, prompt in enumerate(prompts, 1))
        return self._continue(batched(prompts, at_once), search or self.search())

    def _continue(self, groups: Iterator[list[str]], search: SearchConfig) -> Iterator[Continued]:
        done = 0
        for some in groups:
            rows, indices = [self._tokens(prompt) for prompt in some], range(done, done + len(some))
            found = continue_texts(self._decoder, rows, search, context=self.context, indices=indices)
            for prompt, row, hypotheses in zip(some, rows, found, strict=True):
                yield self._continued(prompt, row, hypotheses)
            done += len(some)

    def stream(self, prompt: str, write: Callable[[str], object], search: SearchConfig | None = None) -> Continued:
        """Continue one prompt; `write` is called with each piece of the text as it is generated."""
        row, stream = self._tokens(checked_text(prompt, "prompt")), TextStream(self._vocabulary.decode, write)
        search = search or self.search()
        if search.n_best > 1:
            raise OptionError(f"samples={search.n_best}, but stream writes one text", fix="use .continuations(prompt, search)")
        (found,) = continue_texts(self._decoder, [row], search, context=self.context, on_token=stream.add)
        stream.close()
        return self._continued(prompt, row, found)

    def search(self, /, *, max_tokens: int = 256, greedy: bool = False, samples: int = 1, **sampling: Any) -> SearchConfig:
        """Search options: `samples` texts per prompt, sampled with these options of `SearchConfig`, or the greedy one."""
        for name, value, most in (("max_tokens", max_tokens, 10**6), ("samples", samples, 10_000)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise OptionError(f"{name} is {shown(value)}", fix=f"{name} must be 1 to {most:,}")
        for name in sampling:
            if name not in OPTIONS_OF["sample"]:
                raise unknown(name, [*OPTIONS_OF["sample"], "max_tokens", "greedy", "samples"])
        if greedy and samples > 1:
            raise OptionError("samples has no effect with greedy", fix="remove one of them")
        method, length = "greedy" if greedy else "sample", {"max_length_factor": 0.0, "max_length_extra": max_tokens}
        return SearchConfig(method=method, n_best=samples, **sampling, **length)

    @property
    def _decoder(self) -> Decoder:
        model = self.reader
        assert isinstance(model, Decoder)
        return model

    @property
    def _vocabulary(self) -> TextVocabulary:
        return cast("TextVocabulary", self.tokenizer)

    def _tokens(self, prompt: str) -> list[int]:
        """The ids of a prompt, read as if from the middle of a text; an empty prompt is the beginning of a document."""
        return self._vocabulary.encode(prompt.encode()).tolist() or [END]

    def _continued(self, prompt: str, row: list[int], hypotheses: list[Hypothesis]) -> Continued:
        texts = [Continuation(self._vocabulary.decode(each.tokens), each.log_probability, each.ended) for each in hypotheses]
        return Continued(prompt, texts, cut=len(row) > self.context)


class TextStream:
    """Turns tokens into text as they arrive, and holds back bytes that may be the beginning of a character."""

    def __init__(self, decode: Callable[[list[int]], str], write: Callable[[str], object]) -> None:
        self.decode, self.write = decode, write
        self._held: list[int] = []

    def add(self, token: int) -> None:
        """Add one token."""
        self._held.append(token)
        if len(self._held) >= HELD or not self.decode(self._held).endswith("\ufffd"):
            self.close()

    def close(self) -> None:
        """Write what was held back; an incomplete character becomes U+FFFD."""
        self.write(self.decode(self._held))
        self._held = []
