"""kilolayer generate: a language model continues prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kilolayer.cli.configuration import add_precision, whole
from kilolayer.cli.lines import together, typed_argument, typed_lines
from kilolayer.cli.output import show_json, write_text
from kilolayer.cli.search_flags import SAMPLING, add_search_flags, search_of
from kilolayer.errors import OptionError
from kilolayer.terminal import counted, say

if TYPE_CHECKING:
    from kilolayer.generate.config import SearchConfig
    from kilolayer.models.model import Model
    from kilolayer.training.run import Run

PROMPTS_AT_ONCE = 64
SEPARATOR = "---"


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's own flags."""
    parser.set_defaults(reads_lines=True)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder of a language model")
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue; without it, each line of standard input")
    parser.add_argument("--max-tokens", type=whole(1, 10**6), default=256, metavar="N", help="most tokens to write [256]")
    add_search_flags(parser, SAMPLING)
    parser.add_argument("--samples", type=whole(1, 10_000), metavar="N", help="continuations of each prompt [1]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to write [auto]")
    add_precision(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace, typed: list[str]) -> int:
    """Continue the prompts; a single continuation is shown as it is written."""
    from kilolayer.training.run import Run, choose_device

    opened = Run.open(options.run, ["causal_lm"])
    search = _search(options, typed)
    model = opened.load_reader(choose_device(options.device), options.precision)
    writer = Writer(opened, search, model)
    typed_texts = typed_lines() if options.prompt is None else iter([typed_argument(options.prompt, "--prompt")])
    prompts = (each.text for each in typed_texts)
    results = (result for some in together(prompts, PROMPTS_AT_ONCE) for result in writer.results(some))
    if options.json:
        show_json(list(results))
    elif options.prompt is not None and writer.search.n_best == 1:
        writer.stream(next(prompts))
    else:
        _print_all(results)
    if writer.cut:
        say(f"of {counted(writer.cut, 'prompt')} the beginning was not read: the model reads {writer.context} tokens at once")
    return 0


class Writer:
    """A run's model, and how it continues prompts."""

    def __init__(self, run: Run, search: SearchConfig, model: Model) -> None:
        from kilolayer.models.decoder import Decoder
        from kilolayer.tasks.causal_lm.config import CausalLMConfig
        from kilolayer.tasks.causal_lm.task import CausalLMTask

        assert isinstance(run.config, CausalLMConfig)
        self.search, self.context = search, run.config.text.length
        self.vocabulary = CausalLMTask.load_vocabulary(run.config, run.folder)
        assert isinstance(model, Decoder)
        self.model = model
        self.cut = self.done = 0

    def results(self, prompts: list[str]) -> list[dict[str, Any]]:
        """The prompts with their continuations."""
        from kilolayer.generate.continuation import continue_texts

        texts, numbers = [self._tokens(prompt) for prompt in prompts], range(self.done, self.done + len(prompts))
        found = continue_texts(self.model, texts, self.search, context=self.context, indices=numbers)
        self.done += len(prompts)
        return [
            {
                "prompt": prompt,
                "continuations": [
                    {"text": self.vocabulary.decode(each.tokens), "log_probability": each.log_probability, "ended": each.ended}
                    for each in each_prompts
                ],
            }
            for prompt, each_prompts in zip(prompts, found, strict=True)
        ]

    def stream(self, prompt: str) -> None:
        """Print the prompt, and its continuation as it is written."""
        from kilolayer.generate.continuation import continue_texts
        from kilolayer.generate.text_stream import TextStream

        def write(text: str) -> None:
            write_text(text)
            sys.stdout.flush()

        write(prompt)
        stream = TextStream(self.vocabulary.decode, write)
        continue_texts(self.model, [self._tokens(prompt)], self.search, context=self.context, hear=stream.add)
        stream.close()
        write("\n")

    def _tokens(self, prompt: str) -> list[int]:
        """A prompt is read as if it came out of the midst of a text; the empty one is the beginning of a document."""
        from kilolayer.data.tokenizer import END

        tokens = self.vocabulary.encode(prompt.encode()).tolist() or [END]
        self.cut += len(tokens) > self.context
        return tokens


def _search(options: argparse.Namespace, typed: list[str]) -> SearchConfig:
    if options.greedy and options.samples is not None:
        raise OptionError("--samples has no effect with --greedy", where="in the typed options", fix="remove one of them")
    length = {"max_length_factor": 0.0, "max_length_extra": options.max_tokens}
    return search_of(options, typed, {"method": "sample"}, {"n_best": options.samples or 1, **length})


def _print_all(results: Iterator[dict[str, Any]]) -> None:
    first = True
    for result in results:
        for continuation in result["continuations"]:
            if not first:
                write_text(f"{SEPARATOR}\n")
            write_text(f"{result['prompt']}{continuation['text']}\n")
            sys.stdout.flush()
            first = False
