"""Question sets on what a pronoun refers to.

They use partial scoring (Trinh and Le 2018): each candidate replaces the pronoun, and the text after it, the same for all, is
scored.
"""

from __future__ import annotations

from kilolayer.evaluate.shots.registry import Question, question_set
from kilolayer.evaluate.shots.row import Row

BLANK = "_"


@question_set("winogrande", columns=("sentence", "option1", "option2", "answer"), norms=("none",))
def winogrande(row: Row) -> Question:
    """Sakaguchi et al. 2020: choose which of two names fills the gap in a sentence."""
    before, gap, after = row.text("sentence").partition(BLANK)
    if not gap:
        raise row.error(f"the column 'sentence' has no gap, {BLANK!r}")
    contexts = (before + row.text("option1"), before + row.text("option2"))
    return Question(contexts, (f" {after.strip()}",) * 2, row.answer("answer", (1, 2)))


@question_set("winograd_wsc273", columns=("context_options", "continuation", "gold"), norms=("none",))
def winograd(row: Row) -> Question:
    """Levesque et al. 2012: the 273 Winograd schemas. A full stop follows a name without a space, a word follows with one."""
    contexts = row.texts("context_options")
    after = row.text("continuation").strip()
    after = f" {after}" if after[:1].isalnum() else after
    return Question(tuple(contexts), (after,) * len(contexts), row.answer("gold", range(len(contexts))))
