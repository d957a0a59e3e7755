"""Question sets on science and everyday knowledge."""

from __future__ import annotations

from kilolayer.evaluate.shots.registry import Question, question_set
from kilolayer.evaluate.shots.row import Row

PRIOR = "Answer:"
"""For ARC and OpenBookQA, Brown et al. 2020 divide by the probability of an answer after this text alone."""


@question_set("arc_easy", columns=("question", "choices", "answerKey"), norms=("none", "bytes", "tokens", "prior"))
def arc_easy(row: Row) -> Question:
    """Clark et al. 2018: school science questions, the easier part."""
    return _with_choices(row, f"Question: {row.text('question')}\nAnswer:")


@question_set("arc_challenge", columns=("question", "choices", "answerKey"), norms=("bytes", "tokens", "none", "prior"))
def arc_challenge(row: Row) -> Question:
    """Clark et al. 2018: school science questions that word statistics do not answer."""
    return _with_choices(row, f"Question: {row.text('question')}\nAnswer:")


@question_set("openbookqa", columns=("question_stem", "choices", "answerKey"), norms=("bytes", "tokens", "none", "prior"))
def openbookqa(row: Row) -> Question:
    """Mihaylov et al. 2018: elementary science, without the book."""
    return _with_choices(row, row.text("question_stem"))


def _with_choices(row: Row, context: str) -> Question:
    texts, labels = row.choices()
    return Question.of(context, texts, row.answer("answerKey", labels), PRIOR)


@question_set(
    "sciq",
    columns=("question", "correct_answer", "distractor1", "distractor2", "distractor3", "support"),
    norms=("none", "bytes", "tokens"),
)
def sciq(row: Row) -> Question:
    """Welbl et al. 2017: science exam questions, with a supporting paragraph if there is one."""
    support = row.text("support").lstrip()
    context = f"{support}\n" * bool(support) + f"Question: {row.text('question')}\nAnswer:"
    choices = [row.text(name) for name in ("distractor1", "distractor2", "distractor3", "correct_answer")]
    return Question.of(context, choices, 3)


@question_set("commonsense_qa", columns=("question", "choices", "answerKey"), norms=("none",))
def commonsense_qa(row: Row) -> Question:
    """Talmor et al. 2019: everyday concepts; the prompt lists the choices, and their letters are scored."""
    texts, labels = row.choices()
    listed = "".join(f"{label}. {text}\n" for label, text in zip(labels, texts, strict=True))
    context = f"Question: {row.text('question').strip()}\n{listed}Answer:"
    return Question.of(context, labels, row.answer("answerKey", labels))


@question_set(
    "social_i_qa",
    columns=("context", "question", "answerA", "answerB", "answerC", "label"),
    norms=("none", "bytes", "tokens"),
)
def social_i_qa(row: Row) -> Question:
    """Sap et al. 2019: what people do, want and feel."""
    context = f"Q: {row.text('context')} {row.text('question')}\nA:"
    choices = [row.text(name) for name in ("answerA", "answerB", "answerC")]
    return Question.of(context, choices, row.answer("label", (1, 2, 3)))
