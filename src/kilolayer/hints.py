"""What to do, in the words of the interface that the user has: flags for the command, arguments for Python."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kilolayer.terminal import command

Value = str | int | float | bool | Path
CALLS = {"train": "kl.train", "compare": "kl.run_comparison", "evaluate": "run.scores"}
"""What a verb of the command is called in Python."""

_in_shell = False


@contextmanager
def for_shell() -> Iterator[None]:
    """Inside, hints are written as they are typed in a shell; the command runs in it."""
    global _in_shell
    before, _in_shell = _in_shell, True
    try:
        yield
    finally:
        _in_shell = before


def in_shell() -> bool:
    """Whether the user is in a shell."""
    return _in_shell


def argument(name: str, value: Value | None = None) -> str:
    """An argument of a verb: `--run runs/NAME`, or `run="runs/NAME"`; without a value, its name alone."""
    if value is None:
        return f"--{name}" if _in_shell else name
    return f"--{name} {_typed(value)}" if _in_shell else f"{name}={_written(value)}"


def flag(name: str) -> str:
    """A switch of a verb: `--overwrite`, or `overwrite=True`."""
    return f"--{name}" if _in_shell else f"{name}=True"


def option(path: str, value: Value) -> str:
    """An option of a configuration: `--train.steps 40`, or `train={"steps": 40}`."""
    if _in_shell:
        return argument(path, value)
    table, _, name = path.partition(".")
    return f'{table}={{"{name}": {_written(value)}}}'


def verb(name: str) -> str:
    """A verb of the command: `kilolayer train`, or `kl.train`."""
    return f"kilolayer {name}" if _in_shell else CALLS[name]


def call(name: str, *first: Value, **arguments: Value) -> str:
    """A whole command, or a call in Python: `kilolayer train --resume runs/mine`, or `kl.train(resume="runs/mine")`."""
    given = [argument(each, value) for each, value in arguments.items()]
    if _in_shell:
        return " ".join([command(), name, *map(_typed, first), *given])
    return f"{CALLS[name]}({', '.join([*map(_written, first), *given])})"


def _typed(value: Value) -> str:
    if isinstance(value, float):
        return _number(value)
    return str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))


def _written(value: Value) -> str:
    """A value as Python source; text in double quotes, as in the documentation, where they need no escape."""
    if not isinstance(value, str | Path):
        return _number(value) if isinstance(value, float) else repr(value)
    text = str(value)
    return repr(text) if '"' in text or "\\" in text or not text.isprintable() else f'"{text}"'


def _number(value: float) -> str:
    """The shortest form: 0.5, but 2.5e-4."""
    digits, _, exponent = f"{value:e}".partition("e")
    power = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else repr(value)  # inf has none
    return power if float(power) == value and len(power) < len(repr(value)) else repr(value)
