"""Question sets on completing a text."""

from __future__ import annotations

import re

from kilolayer.evaluate.shots.registry import Question, question_set
from kilolayer.evaluate.shots.row import Row

CONNECTORS = {"cause": "because", "effect": "therefore"}


@question_set("hellaswag", columns=("activity_label", "ctx_a", "ctx_b", "endings", "label"), norms=("bytes", "tokens", "none"))
def hellaswag(row: Row) -> Question:
    """Zellers et al. 2019: choose the ending of a scene, or of a step of a manual, from four."""
    context = f"{row.text('activity_label')}: {row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    endings = [_without_brackets(ending) for ending in row.texts("endings")]
    return Question.of(_without_brackets(context), endings, row.answer("label", range(len(endings))))


def _without_brackets(text: str) -> str:
    """Remove WikiHow's marks such as [header] and [step]; a title ends the sentence before it."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


@question_set("lambada_openai", columns=("context", "continuation"), norms=())
def lambada(row: Row) -> Question:
    """Paperno et al. 2016, in OpenAI's form: predict the last word of a passage, which the passage determines."""
    return Question.of(row.text("context").rstrip(), [row.text("continuation").strip()], 0)


@question_set("copa", columns=("premise", "choice1", "choice2", "question", "label"), norms=("none", "tokens", "bytes"))
def copa(row: Row) -> Question:
    """Roemmele et al. 2011: choose the likelier cause or effect from two. lm-eval has two spaces before a choice, this has
    one."""
    kind = row.answer("question", tuple(CONNECTORS))
    context = f"{row.text('premise').strip()[:-1]} {tuple(CONNECTORS.values())[kind]}"
    choices = [text[:1].lower() + text[1:] for text in (row.text("choice1"), row.text("choice2"))]
    return Question.of(context, choices, row.answer("label", (0, 1)))


@question_set("piqa", columns=("goal", "sol1", "sol2", "label"), norms=("bytes", "tokens", "none"))
def piqa(row: Row) -> Question:
    """Bisk et al. 2020: choose which of two ways reaches a goal in the physical world."""
    context = f"Question: {row.text('goal')}\nAnswer:"
    return Question.of(context, [row.text("sol1"), row.text("sol2")], row.answer("label", (0, 1)))
