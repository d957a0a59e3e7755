"""Three lines of each set, and how each is asked, written out by hand: contexts, continuations, answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Asked = tuple[list[str], list[str], int]


def of(context: str, choices: list[str], answer: int) -> Asked:
    """One context before all choices, each behind a space."""
    return [context] * len(choices), [" " + choice for choice in choices], answer


def lettered(texts: list[str], labels: str = "ABCD") -> dict[str, list[str]]:
    return {"text": texts, "label": list(labels[: len(texts)])}


SCHOOL = [
    ({"question": "What falls?", "choices": lettered(["Rain", "Rock", "Air"]), "answerKey": "A"}, ["Rain", "Rock", "Air"], 0),
    ({"question": "What burns?", "choices": lettered(["Ice", "Wood", "Sea", "Tin"]), "answerKey": "B"}, None, 1),
    ({"question": "How many?", "choices": lettered(["One", "Two", "Six", "Ten"], "1234"), "answerKey": "4"}, None, 3),
]
ARC: list[tuple[dict[str, Any], Asked]] = [
    (row, of(f"Question: {row['question']}\nAnswer:", texts or row["choices"]["text"], answer)) for row, texts, answer in SCHOOL
]

MADE: dict[str, list[tuple[dict[str, Any], Asked]]] = {
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "boolq": [
        (
            {"question": "is water wet", "answer": True, "passage": "Water is wet."},
            of("Water is wet.\nQuestion: is water wet?\nAnswer:", ["no", "yes"], 1),
        ),
        (
            {"question": "is fire cold", "answer": False, "passage": "Fire is hot."},
            of("Fire is hot.\nQuestion: is fire cold?\nAnswer:", ["no", "yes"], 0),
        ),
        (
            {"question": "can it fly", "answer": True, "passage": "A lark\nsings and flies."},
            of("A lark\nsings and flies.\nQuestion: can it fly?\nAnswer:", ["no", "yes"], 1),
        ),
    ],
    "cb": [
        (
            {"premise": f"Is it {label}?", "hypothesis": "It is", "idx": label, "label": label},
            of(f"Is it {label}?\nQuestion: It is. True, False, or Neither?\nAnswer:", ["True", "False", "Neither"], label),
        )
        for label in (0, 1, 2)
    ],
    "commonsense_qa": [
        (
            {"id": "x", "question": f"Where is {name}? ", "choices": lettered(list("vwxyz"), "ABCDE"), "answerKey": key},
            of(f"Question: Where is {name}?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:", list("ABCDE"), "ABCDE".index(key)),
        )
        for name, key in (("Ann", "A"), ("Ben", "E"), ("Cleo", "C"))
    ],
    "copa": [
        (
            {"premise": "It rained.", "choice1": "I got wet.", "choice2": "The sun rose.", "question": "effect", "label": 0},
            of("It rained therefore", ["i got wet.", "the sun rose."], 0),
        ),
        (
            {"premise": "He fell. ", "choice1": "He ran.", "choice2": "There was ice.", "question": "cause", "label": 1},
            of("He fell because", ["he ran.", "there was ice."], 1),
        ),
        (
            {"premise": "She won!", "choice1": "A cup.", "choice2": "B", "question": "effect", "label": 0},
            of("She won therefore", ["a cup.", "b"], 0),
        ),
    ],
    "hellaswag": [
        (
            {
                "activity_label": "Roofing",
                "ctx_a": "A man sits on a roof.",
                "ctx_b": "he",
                "endings": ["is asleep.", "pulls tiles.", "sings.", "falls."],
                "label": "1",
            },
            of("Roofing: A man sits on a roof. He", ["is asleep.", "pulls tiles.", "sings.", "falls."], 1),
        ),
        (
            {
                "activity_label": "Home and Garden",
                "ctx_a": "[header] How to sew [title] Thread a needle. [step] Take a thread.",
                "ctx_b": "",
                "endings": ["Pull [substeps] it through.", "Eat it. [title] Done", " a ", "b"],
                "label": "0",
            },
            # A mark that goes leaves two spaces, of which one goes too; and the space before an empty second part stays.
            of(
                "Home and Garden: How to sew. Thread a needle. Take a thread.",
                ["Pull it through.", "Eat it.. Done", "a", "b"],
                0,
            ),
        ),
        (
            {"activity_label": "A", "ctx_a": "B c.", "ctx_b": "the LADY", "endings": ["a", "b", "c", "d"], "label": 3},
            of("A: B c. The lady", ["a", "b", "c", "d"], 3),
        ),
    ],
    "lambada_openai": [
        ({"context": "I saw a", "continuation": "bird"}, of("I saw a", ["bird"], 0)),
        ({"context": '"Yes," said\n\nthe "', "continuation": " man "}, of('"Yes," said\n\nthe "', ["man"], 0)),
        ({"context": "She met ", "continuation": "Shane"}, of("She met", ["Shane"], 0)),
    ],
    "openbookqa": [
        (
            {"question_stem": row["question"], "choices": row["choices"], "answerKey": row["answerKey"]},
            of(row["question"], row["choices"]["text"], answer),
        )
        for row, _, answer in SCHOOL
    ],
    "piqa": [
        (
            {"goal": "dry hair", "sol1": "use a towel ", "sol2": "use a spoon", "label": 0},
            of("Question: dry hair\nAnswer:", ["use a towel ", "use a spoon"], 0),
        ),
        (
            {"goal": "Cut bread?", "sol1": "With a cup.", "sol2": "With a knife.", "label": 1},
            of("Question: Cut bread?\nAnswer:", ["With a cup.", "With a knife."], 1),
        ),
        ({"goal": "g", "sol1": "a", "sol2": "b", "label": "1"}, of("Question: g\nAnswer:", ["a", "b"], 1)),
    ],
    "sciq": [
        (
            {"question": "Who?", "correct_answer": "d", **{f"distractor{n}": "abc"[n - 1] for n in (1, 2, 3)}, "support": s},
            of(f"{before}Question: Who?\nAnswer:", ["a", "b", "c", "d"], 3),
        )
        for s, before in (("", ""), ("It is d.", "It is d.\n"), ("  So it is.", "So it is.\n"))
    ],
    "social_i_qa": [
        (
            {"context": "Tracy left.", "question": "Why?", "answerA": "x", "answerB": "y", "answerC": "z", "label": label},
            of("Q: Tracy left. Why?\nA:", ["x", "y", "z"], answer),
        )
        for label, answer in (("1", 0), ("2", 1), (3, 2))
    ],
    "winograd_wsc273": [
        (
            {"context_options": ["The men feared", "The dogs feared"], "continuation": "violence.", "gold": 0},
            (["The men feared", "The dogs feared"], [" violence."] * 2, 0),
        ),
        (
            {"context_options": ["I saw the gap", "I saw the wall"], "continuation": ".", "gold": 1},
            (["I saw the gap", "I saw the wall"], ["."] * 2, 1),
        ),
        (
            {"context_options": ["Ann", "Bob"], "continuation": ", who was 9.", "gold": "0"},
            (["Ann", "Bob"], [", who was 9."] * 2, 0),
        ),
    ],
    "winogrande": [
        (
            {"sentence": "Ann beat Bea so _ won.", "option1": "Ann", "option2": "Bea", "answer": "1"},
            (["Ann beat Bea so Ann", "Ann beat Bea so Bea"], [" won."] * 2, 0),
        ),
        (
            {"sentence": "The _ is big, says the cat. ", "option1": "cat", "option2": "dog", "answer": "2"},
            (["The cat", "The dog"], [" is big, says the cat."] * 2, 1),
        ),
        ({"sentence": "_ ran.", "option1": "He", "option2": "It", "answer": 2}, (["He", "It"], [" ran."] * 2, 1)),
    ],
}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_sets(folder: Path) -> Path:
    """All sets as files, two with another part's name."""
    parts = {"lambada_openai": ".test", "winograd_wsc273": ""}
    for name, lines in MADE.items():
        write_lines(folder / f"{name}{parts.get(name, '.val')}.jsonl", [row for row, _ in lines])
    return folder
