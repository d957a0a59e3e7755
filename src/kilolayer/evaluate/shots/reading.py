"""Question sets on what a given text says."""

from __future__ import annotations

from kilolayer.evaluate.shots.registry import Question, question_set
from kilolayer.evaluate.shots.row import Row


@question_set("boolq", columns=("passage", "question", "answer"), norms=("none",))
def boolq(row: Row) -> Question:
    """Clark et al. 2019: a yes-or-no question after a passage."""
    context = f"{row.text('passage')}\nQuestion: {row.text('question')}?\nAnswer:"
    return Question.of(context, ["no", "yes"], row.answer("answer", (False, True)))


@question_set("cb", columns=("premise", "hypothesis", "label"), norms=("none",))
def cb(row: Row) -> Question:
    """De Marneffe et al. 2019, CommitmentBank: whether a premise makes a hypothesis true, false, or neither."""
    context = f"{row.text('premise')}\nQuestion: {row.text('hypothesis')}. True, False, or Neither?\nAnswer:"
    return Question.of(context, ["True", "False", "Neither"], row.answer("label", (0, 1, 2)))
