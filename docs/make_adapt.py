"""Writes the table of classes and recipes into docs/adapt.md.

python docs/make_adapt.py
"""

from __future__ import annotations

from pathlib import Path

from kilolayer.models.adapt.table import POST_LN, PRE_LN, YES, table

PAGE = Path(__file__).parent / "adapt.md"
BEGIN, END = "<!-- made by docs/make_adapt.py -->\n", "<!-- end -->\n"


def generated() -> str:
    """The two tables, of Post-LN and of Pre-LN classes, and the reasons below them."""
    answers = table()
    reasons = list(dict.fromkeys(each for row in answers.values() for each in row.values() if each != YES))
    marks = {YES: YES} | {reason: f"no ({number})" for number, reason in enumerate(reasons, 1)}
    tables = []
    for classes in (POST_LN, PRE_LN):
        heads = [title.replace(", norm_first", " with `norm_first`") for title in classes]
        lines = [f"| recipe | {' | '.join(heads)} |", "|---" * (len(classes) + 1) + "|"]
        lines += [f"| `{label}` | {' | '.join(marks[row[title]] for title in classes)} |" for label, row in answers.items()]
        tables.append("\n".join(lines))
    why = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, 1))
    return "\n\n".join([*tables, f"Reasons:\n\n{why}\n"])


def page() -> str:
    """The page with the tables as they are now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + generated() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
