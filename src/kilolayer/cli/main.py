"""The kilolayer command. Each subcommand is a file with `configure` and `run`, in this folder or in that of its task.

torch is imported only when a subcommand runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from kilolayer import hints, terminal
from kilolayer.cli.configuration import split_typed
from kilolayer.config import load
from kilolayer.errors import InputError, KilolayerError, OptionError, file_fault, shown, unknown
from kilolayer.importing import CLASS_PATH
from kilolayer.tasks import registry
from kilolayer.tasks.registry import Registration, Verb
from kilolayer.version import VERSION

OWN_VERBS = {
    "train": "train a model on text files and score it; a run folder holds everything",
    "compare": "train the same task with every combination of options, or compare existing runs: a table and a page",
    "evaluate": "show a run's test scores with signatures, or compare it with other runs",
    "report": "write an HTML page about one or more runs: norms by layer, curves, scores, samples",
    "export": "export a trained run to a folder for Transformers or CTranslate2",
    "plan": "show the parameters, constants, FLOPs and memory of a model, before anything is allocated",
    "forecast": "estimate from 60 steps the largest learning rate and the shortest warm-up that a configuration survives",
    "diagnose": "measure what depth does to a model, before training or from a checkpoint, and advise what to change",
    "surface": "plot the loss around a model's weights, or around the path of its training",
    "reproduce": "repeat a figure or table of a paper at a feasible size, with a verdict; without a name, list them",
    "recipes": "list all recipes, or show one recipe's equation, constants and source",
}
LONGEST_MESSAGE, LONGEST_LINE = 500, 2000
UNREAD = "unrecognized arguments: "
"""The beginning of argparse's message about unknown arguments."""
NO_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)
PEER_GONE = re.compile("connection (closed|reset|refused)|broken pipe|remote process exited", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """A parser that reports its errors like all other user errors."""

    def error(self, message: str) -> NoReturn:
        fix = f"see: {self.prog} --help"
        if message.startswith(UNREAD):
            word = message.removeprefix(UNREAD)[:LONGEST_MESSAGE]
            message = f"{self.prog} does not take the argument {shown(word)}"
            if self.get_default("reads_lines"):
                fix = f"it reads lines from standard input: {self.prog} RUN < {word}"
        elif message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").partition(":")[0]
            fix = f"give a value after {flag}; one that begins with - is written {flag}=VALUE"
        raise OptionError(message[:LONGEST_MESSAGE], where="on the command line", fix=fix)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    0 done, 1 a run of a comparison failed or an image could not be read, 2 an error of the user or the machine, 128 + n ended
    by signal n.
    """
    if arguments is None:
        terminal.prepare()
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    with hints.for_shell():
        return _exit_code(list(sys.argv[1:] if arguments is None else arguments))


def _exit_code(words: list[str]) -> int:
    try:
        _check_current_folder()
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as ended:
        return 128 + getattr(ended, "number", signal.SIGINT)
    except BrokenPipeError:
        # The reader of the results has gone. Exit like other programs, which such a pipe ends by a signal.
        terminal.abandon_stdout()
        return 128 + signal.SIGPIPE
    except Exception as error:
        _let_first_process_report()
        known = _as_kilolayer_error(error)
        if known is None:
            terminal.say("kilolayer: this is a bug in Kilolayer; please report it with the lines below")
            raise
        for line in (f"kilolayer: {known.what}", known.where and f"  {known.where}", known.fix and f"  {known.fix}"):
            if line:
                terminal.say(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}...")
        return 2


def _check_current_folder() -> None:
    """Raise if the current folder was deleted: torch would end the process when it is imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder was deleted", fix="go to another: cd ~") from None


def _exit_on_interrupt(*_: object) -> NoReturn:
    """Exit at once on Ctrl-C, without an exception: libraries may swallow it or replace it by another."""
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(128 + signal.SIGINT)


def _as_kilolayer_error(error: Exception) -> KilolayerError | None:
    """A KilolayerError that explains the error; None if it is a bug in this program."""
    if isinstance(error, KilolayerError):
        return error
    if isinstance(error, OSError):
        reason, fix = file_fault(error)
        if error.filename is None:
            terminal.abandon_stdout()
            return KilolayerError(f"the output cannot be written: {reason}", fix=fix)
        return KilolayerError(f"a file cannot be used: {reason}", where=os.fsdecode(error.filename), fix=fix)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        batch = "batches.tokens, images.rows or examples.rows"
        fix = f"lower the batch ({batch}), or make the model smaller; `kilolayer plan` shows what a model needs"
        return KilolayerError("there is not enough memory", where=str(error).partition("\n")[0][:300], fix=fix)
    if terminal.under_torchrun() and isinstance(error, RuntimeError) and PEER_GONE.search(str(error)):
        fix = "its messages, or those of torchrun, say why; then continue with --resume"
        return KilolayerError("another process of this run has ended", where=str(error).partition("\n")[0][:300], fix=fix)
    return None


def _let_first_process_report() -> None:
    """If processes fail together, the first reports why; torchrun ends the others while they wait here."""
    if not terminal.writes_to_terminal():
        time.sleep(5)


def _run(words: list[str]) -> int:
    with registry.including(tasks_named_in(words)):
        return _run_verb(words)


def _run_verb(words: list[str]) -> int:
    parser = Parser(
        prog="kilolayer",
        description="Build and train very deep and very sparse Transformers.",
        epilog="A task of your own may add verbs. To list them too, name a run folder or a configuration of it, or its class: "
        "kilolayer --help my_module:MyTask",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kilolayer {VERSION}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    chosen = words[0] if words else "--help"
    known = subcommands()
    if not chosen.startswith("-") and chosen not in known:
        error = unknown(chosen, known, kind="verb")
        raise OptionError(error.what, fix=f"{error.fix}; or one of a task of your own, followed by a run folder of it")
    module = importlib.import_module(known[chosen].home) if chosen in known else None
    for verb, about in known.items():
        verb_parser = verbs.add_parser(verb, help=about.summary, description=about.summary, allow_abbrev=False)
        if module is not None and verb == chosen:
            module.configure(verb_parser)
    words, typed = split_typed(words or ["--help"])
    active = verbs.choices[chosen] if module else parser
    _check_flags(active, words)
    if module is None:
        parser.parse_args(words)
    assert module is not None
    # Intermixed: a text may also follow the flags, as in `fill RUN --top 3 TEXT`.
    return module.run(active.parse_intermixed_args(words[1:]), typed)


def subcommands() -> dict[str, Verb]:
    """All subcommands: those of all tasks, and those of each registered task."""
    own = {name: Verb(summary, f"kilolayer.cli.{name}") for name, summary in OWN_VERBS.items()}
    known = {"train": own["train"]}
    for task in registry.all_of():
        for name, verb in task.verbs.items():
            if (before := (own | known).get(name, verb)).home != verb.home:
                raise InputError(
                    f"the verb {shown(name)} of the task {shown(task.name)} is already that of {before.home}",
                    where=task.task,
                    fix="give yours another name: Registration(verbs={...})",
                )
            known[name] = verb
    return known | own


def tasks_named_in(words: Sequence[str]) -> list[Registration]:
    """The tasks of users whose run folder or configuration is among the words; after --help also `my_module:MyTask`."""
    helps = words[:1] in (["--help"], ["-h"])
    values = (word.partition("=")[2] if word.startswith("-") else word for word in words)
    found: list[Registration] = []
    for word in filter(None, values):
        name = word if helps else ""
        with suppress(KilolayerError, OSError, ValueError):
            path = Path(word)
            name = str(load(path if path.suffix == ".toml" else path / "config.toml").get("task", ""))
        if CLASS_PATH.fullmatch(name):
            with suppress(*() if helps else (KilolayerError,)):  # the verb reports it
                found.append(registry.get(name))
    return found


def _check_flags(parser: argparse.ArgumentParser, words: list[str]) -> None:
    valid = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.partition("=")[0]
        if not word.startswith("--") or flag in valid:
            continue
        if flag in (parser.get_default("file_names") or []):
            raise OptionError(
                f"{flag} cannot be set on the command line",
                where="on the command line",
                fix=f"write {flag[2:]} = ... at the top of a configuration file, and name the file: {parser.prog} CONFIG.toml",
            )
        meant = [name for name in parser.get_default("typed_names") or [] if name.endswith(f".{flag[2:]}")]
        if meant and f"{flag}s" not in valid:  # of compare, --recipe is --recipes
            raise OptionError(f"unknown option {flag!r}", fix=f"write the option with its table: {', '.join(meant)}")
        raise unknown(flag, valid)
