"""The command in processes of its own, forked from one that has imported torch, with any files for its standard streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.fixtures.fork_server import SERVER
from tests.fixtures.undrawn_charts import undrawn_charts

NOBODY = 65534
SECONDS = 60.0


def typed(words: Sequence[str], streams: Sequence[str], environment: Mapping[str, str], user: int | None) -> None:
    """What a child does. streams: the paths of its standard input, output and error."""
    import torch

    from kilolayer.cli.main import main

    torch.set_num_threads(1)
    flags = (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, flags[number], 0o666), number)
    # Those that are there were made for other files.
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        for number in range(3)
    )
    os.environ.update(environment)
    if user is not None:
        os.environ.pop("HOME", None)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    sys.argv = ["kilolayer", *words]
    with undrawn_charts():
        sys.exit(main())


def start(
    words: Sequence[object],
    *,
    out: object = os.devnull,
    err: object = os.devnull,
    stdin: object = os.devnull,
    user: int | None = None,
    **environment: str,
) -> ForkServerProcess:
    """Type a command in a child."""
    streams = [str(stdin), str(out), str(err)]
    process = SERVER.Process(target=typed, args=([str(word) for word in words], streams, environment, user))
    process.start()
    return process


def ended(process: ForkServerProcess) -> int:
    """Its exit code, when it has ended."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("it did not end")
    return process.exitcode


def run(words: Sequence[object], folder: Path, **options: object) -> tuple[int, str, str]:
    """Exit code, standard output and error of a command; `folder` is where both are kept."""
    out, err = folder / "typed.out", folder / "typed.err"
    for path in (out, err):
        path.unlink(missing_ok=True)
        path.touch()
        path.chmod(0o666)
    code = ended(start(words, out=out, err=err, **options))  # type: ignore[arg-type]
    return code, out.read_text(errors="replace"), err.read_text(errors="replace")
