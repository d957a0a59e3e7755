"""A language model as an object."""

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
from kilolayer.generate.text_stream import TextStream
from kilolayer.models.decoder import Decoder
from kilolayer.runs.trained_run import TrainedRun, as_texts, some_at_once
from kilolayer.tasks.causal_lm.config import CausalLMConfig

PROMPTS_AT_ONCE = 64


@dataclass(frozen=True)
class Continuation:
    """How a text goes on: without its prompt. ended: by the model, and not by the most tokens that were asked for."""

    text: str
    log_probability: float
    ended: bool


@dataclass(frozen=True)
class Continued:
    """A prompt with its continuations. cut: it was longer than the model reads at once, and its beginning was not read."""

    prompt: str
    continuations: list[Continuation]
    cut: bool


class LanguageModel(TrainedRun):
    """A run of the task `causal_lm`."""

    @property
    def config(self) -> CausalLMConfig:
        """Everything that the run was made from, with nothing implicit left."""
        return cast("CausalLMConfig", super().config)

    @property
    def context(self) -> int:
        """Tokens that the model reads at once."""
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
        """How each prompt goes on, without the prompt; of one text, how it goes on.

        max_tokens: the most to write. greedy: the most probable token each time, in the place of sampling. sampling:
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
        """Each prompt with its continuations and their probabilities, as they come; `at_once` prompts are read ahead.

        One text is one prompt.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        return self._continue(some_at_once(prompts, at_once), search or self.search())

    def _continue(self, groups: Iterator[list[str]], search: SearchConfig) -> Iterator[Continued]:
        done = 0
        for some in groups:
            rows, indices = [self._tokens(prompt) for prompt in some], range(done, done + len(some))
            found = continue_texts(self._decoder, rows, search, context=self.context, indices=indices)
            for prompt, row, hypotheses in zip(some, rows, found, strict=True):
                yield self._continued(prompt, row, hypotheses)
            done += len(some)

    def stream(self, prompt: str, write: Callable[[str], object], search: SearchConfig | None = None) -> Continued:
        """Continue one prompt; `write` is given each piece of the text as it comes."""
        row, stream = self._tokens(prompt), TextStream(self._vocabulary.decode, write)
        search = search or self.search()
        (found,) = continue_texts(self._decoder, [row], search, context=self.context, hear=stream.add)
        stream.close()
        return self._continued(prompt, row, found)

    def search(self, /, *, max_tokens: int = 256, greedy: bool = False, samples: int = 1, **sampling: Any) -> SearchConfig:
        """How to continue: `samples` texts of each prompt, drawn with these options of `SearchConfig`, or the greedy one."""
        for name, value, most in (("max_tokens", max_tokens, 10**6), ("samples", samples, 10_000)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise OptionError(f"{name} is {shown(value)}", fix=f"{name} must be 1 to {most:,}")
        for name in sampling:
            if name not in OPTIONS_OF["sample"]:
                raise unknown(name, [*OPTIONS_OF["sample"], "max_tokens", "greedy", "samples"])
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
        """A prompt is read as if it came out of the midst of a text; the empty one is the beginning of a document."""
        return self._vocabulary.encode(prompt.encode()).tolist() or [END]

    def _continued(self, prompt: str, row: list[int], hypotheses: list[Hypothesis]) -> Continued:
        texts = [Continuation(self._vocabulary.decode(each.tokens), each.log_probability, each.ended) for each in hypotheses]
        return Continued(prompt, texts, cut=len(row) > self.context)
