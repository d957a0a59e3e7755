"""Whatever is typed to a model, there is an answer for each line, or an error that says what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.children import run
from tests.faults.run_forms import FORMS, QUICK

FORM = [form if form == QUICK[0] else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
TEXT = ["", " ", "\t", "the dog", "日本語", "👩‍👩‍👧", "\u2028", "\x00\x0b\x85"]
TEXT += ["<2de>", "<bt>", "</s>", "▁", "a" * 3000, "\x1b[2J", "\r"]

ODD = {"no": b"", "long": b"x" * 100_000 + b"\n", "bytes": b"\xff\xf0\n", "cut": b"no end of line"}


def lines_of(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    made = list(TEXT)
    while len(made) < count:
        words = [dice.choice([*TEXT[:-3], chr(dice.randrange(0x20, 0x2FFF))]) for _ in range(dice.randrange(12))]
        made.append(" ".join(words).replace("\n", " ").replace("a" * 3000, "aa"))
    return made[:count]


def answers(form: str, folder: Path, typed: bytes, finished: Callable[..., Path], *more: str) -> tuple[int, str, str]:
    (folder / "typed.in").write_bytes(typed)
    words = [str(finished(form)) if word == "RUN" else word for word in FORMS[form].verb]
    return run([*words, *more], folder, stdin=folder / "typed.in")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_lines_have_as_many_answers(tmp_path: Path, finished: Callable[..., Path], form: str, count: int) -> None:
    lines = [FORMS[form].line(line) for line in lines_of(count, count)]
    more = {"translate": [], "generate": ["--greedy", "--json"], "fill": ["--json"], "predict": []}[FORMS[form].verb[0]]
    code, out, err = answers(form, tmp_path, "".join(f"{line}\n" for line in lines).encode(), finished, *more)
    assert code == 0, err
    assert "Traceback" not in err
    found = out.count("\n") if not more else out.count('"prompt":') + out.count('"masks":')
    assert found == count


@pytest.mark.slow
@pytest.mark.parametrize("form", FORM)
def test_one_line_and_many_are_answered_alike(tmp_path: Path, finished: Callable[..., Path], form: str) -> None:
    if FORMS[form].verb[0] != "translate":
        pytest.skip("continuations end where the text does, and lines cannot be told apart")
    lines = [line for line in lines_of(3, 24) if line.strip()]
    _, together, _ = answers(form, tmp_path, "".join(f"{line}\n" for line in lines).encode(), finished)
    for place in (0, 5, len(lines) - 1):
        _, alone, _ = answers(form, tmp_path, f"{lines[place]}\n".encode(), finished)
        assert alone.split("\n")[0] == together.split("\n")[place]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("typed", ODD.values(), ids=ODD)
def test_odd_input_has_an_answer_or_an_error(tmp_path: Path, finished: Callable[..., Path], form: str, typed: bytes) -> None:
    code, out, err = answers(form, tmp_path, typed, finished)
    assert code in (0, 2), err
    assert "Traceback" not in err
    refused = {"translate": False, "generate": b"\xff" in typed, "fill": bool(typed), "predict": b"\xff" in typed}  # no mask
    assert (code == 2) == refused[FORMS[form].verb[0]], err
    assert bool(out) == (code == 0 and bool(typed))


@pytest.mark.slow
def test_a_beam_wider_than_the_vocabulary_and_a_direction_that_is_not_there(
    tmp_path: Path, finished: Callable[..., Path]
) -> None:
    wide = ["--beam", "500"]
    code, out, err = answers("translation", tmp_path, b"the dog\n", finished, *wide)
    assert code == 0, err
    assert out.count("\n") == 1
    code, _, err = answers("translation", tmp_path, b"the dog\n", finished, "--direction", "de-en")
    assert code == 2
    assert "de-en" in err
