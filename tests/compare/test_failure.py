"""Why a process failed, by logs as processes leave them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kilolayer.compare.common_failure import CommonFailure
from kilolayer.compare.failure import failure_of
from kilolayer.compare.result import Member


def test_a_process_tells_why_it_failed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("step 5\nkilolayer: there is not enough memory\n  CUDA out of memory. Tried\n  lower batches.tokens\n")
    assert failure_of(log, 2) == "out of memory"
    log.write_text("kilolayer: the text is empty\n  a.txt\n  give files with text\n")
    assert failure_of(log, 2) == "the text is empty"
    log.write_text("Traceback (most recent call last):\nZeroDivisionError: division by zero\n")
    assert failure_of(log, 1) == "ZeroDivisionError: division by zero"
    assert failure_of(log, -9).startswith("killed")
    assert failure_of(tmp_path / "none", 1) == "exit code 1"


COMPILER = """step 5
Traceback (most recent call last):
  File "/x/kilolayer/training/step.py", line 88, in run
    loss = self.model(batch)
torch._dynamo.exc.InternalTorchDynamoError: AssertionError: no guard for 3

from user code:
   File "/x/kilolayer/speed/fast_layer.py", line 41, in forward
    y = self.f(x)

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace (please do this especially if you're reporting a bug to PyTorch).
"""


def test_of_a_compilers_error_its_own_line_is_told_and_not_its_advice(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(COMPILER)
    assert failure_of(log, 1) == "torch._dynamo.exc.InternalTorchDynamoError: AssertionError: no guard for 3"


def test_an_error_that_announces_another_is_told_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    announced = "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nAssertionError: no kernel"
    log.write_text(COMPILER.replace("torch._dynamo.exc.InternalTorchDynamoError: AssertionError: no guard for 3", announced))
    assert failure_of(log, 1) == announced.replace("\n", " ")


PROGRAMS = {
    "raise ValueError('one\\n  two\\nthree')": "ValueError: one",
    "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise RuntimeError('no step') from error": "RuntimeError: no step",
    "def check():\n    assert False\ncheck()": "AssertionError (program.py, line 2)",
    "class Odd:\n    def __del__(self):\n        1 / 0\nodd = Odd()\nraise KeyError('lr')": "KeyError: 'lr'",
    "print('all is well')\nraise SystemExit(1)": "all is well",
    "def deeper(n):\n    deeper(n + 1)\ndeeper(0)": "RecursionError: maximum recursion depth exceeded",
}


@pytest.mark.parametrize(("program", "line"), PROGRAMS.items())
def test_what_python_writes_is_understood(tmp_path: Path, program: str, line: str) -> None:
    (tmp_path / "program.py").write_text(program)
    log = tmp_path / "log.txt"
    with open(log, "wb") as file:
        done = subprocess.run([sys.executable, "-S", "program.py"], cwd=tmp_path, stdout=file, stderr=file, check=False)
    assert done.returncode == 1
    assert failure_of(log, 1) == line


def test_what_an_earlier_process_has_written_is_no_reason(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(COMPILER)
    assert failure_of(log, 1, start=log.stat().st_size) == "exit code 1"


def test_numbers_do_not_tell_failures_apart_and_words_do() -> None:
    members = [Member(f"{layers}", {"layers": layers, "train.seed": 1}, Path()) for layers in range(4)]
    failing = CommonFailure()
    for member in members[:2]:
        failing.add(member, f"RuntimeError: {member.name} layers at 0x{member.name}ff")
    assert not failing.is_reached
    failing.add(members[2], "RuntimeError: 7 layers at 0xa0")
    assert failing.is_reached
    failing.add(members[3], "RuntimeError: 7 heads at 0xa0")
    assert (failing.is_reached, failing.members) == (False, members[3:])
