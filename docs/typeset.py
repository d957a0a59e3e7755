"""The equation of a recipe, which is plain text for a terminal, as LaTeX."""

from __future__ import annotations

import re

SYMBOL = r"(?:alpha|beta|phi|sum)(?![A-Za-z])"
NAME = r"(?:LN|Attn|concat|head|layer)(?=[(_])|Xavier"
WORD = rf"(?!{SYMBOL}|{NAME}|sqrt)(?:[A-Za-z]{{2,}}|a(?= [a-z]{{2}}))"
TOKEN = re.compile(
    rf"(?P<root>sqrt\()|(?P<power>\^(?:\([^()]*\)|-?\w+(?:/\d+)?))|(?P<number>\d+e-\d+)|(?P<index>_\w+)|(?P<symbol>{SYMBOL})"
    rf"|(?P<name>(?:(?<=[\w)]) )?(?:{NAME}))|(?P<colon>: )|(?P<times> \.(?= |\]))|(?P<most><=)"
    rf"|(?P<words> *{WORD}(?: {WORD})* *)|(?P<other>.)"
)


def clauses(equation: str) -> list[str]:
    """The parts of an equation, which are separated by semicolons, as LaTeX."""
    return [latex(clause.strip()) for clause in equation.split(";")]


def latex(text: str) -> str:
    """One part as LaTeX: Greek letters, powers, roots and names; other words are text."""
    made, position = "", 0
    while position < len(text):
        found = TOKEN.match(text, position)
        assert found is not None
        position = found.end()
        if found["root"]:
            end = _closing(text, position)
            made += rf"\sqrt{{{latex(text[position:end])}}}"
            position = end + 1
        else:
            made += _token(found)
    return made


def _token(found: re.Match[str]) -> str:
    text = found[0]
    match found.lastgroup:
        case "power":
            return f"^{{{latex(text[1:].removeprefix('(').removesuffix(')')).strip()}}}"
        case "number":
            digits, power = text.split("e-")
            return f"10^{{-{power}}}" if digits == "1" else rf"{digits} \cdot 10^{{-{power}}}"
        case "index":
            return f"_{{{text[1:]}}}"
        case "symbol":
            return r"\sum" if text == "sum" else rf"\{text} "
        case "name":
            return rf"\,\mathrm{{{text[1:]}}}" if text.startswith(" ") else rf"\mathrm{{{text}}}"
        case "colon":
            return r":\; "
        case "times" | "most":
            return r" \odot" if found["times"] else r"\le"
        case "words":
            return rf"\text{{{text}}}"
        case _:
            return text


def _closing(text: str, position: int) -> int:
    """The place of the bracket that closes the one before `position`."""
    depth = 1
    for index in range(position, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    raise ValueError(f"a bracket is not closed: {text}")
