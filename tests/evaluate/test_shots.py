"""Sets of questions: prompts against some written out by hand, examples, scores of a model that is known, and bad files."""

from __future__ import annotations

import lzma
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kilolayer as kl
from kilolayer.data.vocabulary import FIRST_BYTE, ByteVocabulary
from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.choices import Likelihood
from kilolayer.evaluate.shots import SETS
from kilolayer.evaluate.shots import score as scoring
from kilolayer.evaluate.shots.examples import Examples, read_examples
from kilolayer.evaluate.shots.row import Row
from kilolayer.evaluate.shots.score import ShotScore, mean_and_error, score_set
from tests.evaluate.made_questions import MADE, write_lines, write_sets

LENGTH = 512
DATA = Path(os.environ.get("KILOLAYER_DATA", "/nowhere")) / "nlu" / "zeroshot"
QUESTIONS = {
    "arc_challenge": 299,
    "arc_easy": 570,
    "boolq": 3270,
    "cb": 56,
    "commonsense_qa": 1221,
    "copa": 100,
    "hellaswag": 10042,
    "lambada_openai": 5153,
    "openbookqa": 500,
    "piqa": 1838,
    "sciq": 1000,
    "social_i_qa": 1954,
    "winograd_wsc273": 273,
    "winogrande": 1267,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sets(tmp_path)


def copa(premise: str, right: str, wrong: str) -> dict[str, Any]:
    return {"premise": premise, "choice1": right, "choice2": wrong, "question": "effect", "label": 0}


def test_every_set_has_questions_written_out() -> None:
    assert set(MADE) == set(SETS) == set(QUESTIONS)


@pytest.mark.parametrize("name", sorted(SETS))
def test_prompts_are_those_written_out_by_hand(name: str, folder: Path) -> None:
    questions = read_examples(SETS[name], folder).asked.questions
    found = [(list(each.contexts), list(each.continuations), each.answer) for each in questions]
    assert found == [asked for _, asked in MADE[name]]


@pytest.mark.matrix(4)
@pytest.mark.skipif(not DATA.exists(), reason="needs KILOLAYER_DATA")
@pytest.mark.parametrize("name", sorted(SETS))
def test_the_real_files_are_read_whole(name: str) -> None:
    found = read_examples(SETS[name], DATA)
    (path,) = DATA.glob(f"{name}.*")
    with lzma.open(path) as lines:
        assert len(found.asked.questions) == QUESTIONS[name] == sum(1 for _ in lines)
    found.check(4)
    for number in (0, len(found.asked.questions) - 1):
        prompt = found.prompt(number, 4, seed=1)
        assert all(context.count("\n\n") >= 4 for context in prompt.contexts)


LM_EVAL = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "cb": "super_glue/cb/default.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "social_i_qa": "siqa/siqa.yaml",
}


@pytest.mark.parametrize("name", sorted(LM_EVAL))
def test_prompts_are_those_of_lm_eval(name: str) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    import ast

    import jinja2
    import yaml

    folder = Path(lm_eval.__file__).parent / "tasks"
    files = ["arc/arc_easy.yaml", LM_EVAL[name]] if name == "arc_challenge" else [LM_EVAL[name]]
    config: dict[str, Any] = {}
    for file in files:  # of arc_challenge, what differs
        config |= yaml.safe_load((folder / file).read_text().replace("!function ", ""))
    for row, (contexts, continuations, _) in MADE[name]:
        template = config["doc_to_text"] if "{{" in config["doc_to_text"] else f"{{{{{config['doc_to_text']}}}}}"
        # Where there is no support, lm-eval leaves its empty line.
        assert contexts[0] == jinja2.Template(template).render(**row).removeprefix("\n" if name == "sciq" else "")
        choices = config["doc_to_choice"]
        choices = choices if isinstance(choices, list) else ast.literal_eval(jinja2.Template(choices).render(**row))
        assert continuations == [" " + choice for choice in choices]


def test_prompts_of_lm_eval_that_are_functions() -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.tasks.hellaswag.utils import preprocess
    from lm_eval.tasks.winogrande import preprocess_winogrande as winogrande

    for row, (contexts, continuations, _) in MADE["hellaswag"]:
        assert contexts[0] == preprocess(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        assert continuations == [" " + preprocess(ending) for ending in row["endings"]]
    for row, (contexts, continuations, _) in MADE["winogrande"]:
        assert contexts == winogrande.doc_to_choice(row)
        assert continuations[0] == " " + winogrande.doc_to_target(row)


# --- Examples ---


def test_examples_stand_solved_before_the_question(tmp_path: Path) -> None:
    rows = [copa(f"It rained {number}.", f"We got wet {number}.", "No.") for number in range(3)]
    write_lines(tmp_path / "copa.val.jsonl", rows)
    examples = read_examples(SETS["copa"], tmp_path)
    texts = {number: f"It rained {number} therefore we got wet {number}.\n\n" for number in range(3)}
    found = examples.prompt(1, 2, seed=0)
    assert found.contexts[0] in {f"{texts[a]}{texts[b]}It rained 1 therefore" for a, b in ((0, 2), (2, 0))}
    assert found.continuations == (" we got wet 1.", " no.")
    assert examples.prompt(1, 0, seed=0) == examples.asked.questions[1]


def test_examples_depend_on_seed_and_question_alone_and_never_hold_the_question(tmp_path: Path) -> None:
    rows = [copa(f"Premise {number}.", f"Right {number}.", "wrong") for number in range(12)]
    write_lines(tmp_path / "copa.val.jsonl", rows)
    examples = read_examples(SETS["copa"], tmp_path)

    def drawn(number: int, shots: int, seed: int) -> list[int]:
        return [int(each) for each in re.findall(r"Premise (\d+)", examples.prompt(number, shots, seed).contexts[0])]

    for number in range(12):
        for shots in (1, 4, 11):
            found = drawn(number, shots, seed=1)
            assert found[-1] == number
            assert len(set(found)) == len(found) == shots + 1
    assert drawn(3, 4, 1) == drawn(3, 4, 1)
    assert drawn(3, 4, 1)[:2] == drawn(3, 1, 1)[:1] + drawn(3, 4, 1)[1:2]  # more shots go on from fewer
    assert [drawn(3, 4, seed) for seed in range(5)] != [drawn(3, 4, 0)] * 5
    first = {drawn(number, 1, 1)[0] for number in range(12)}
    assert len(first) > 4


def test_a_schemas_twin_is_no_example(tmp_path: Path) -> None:
    rows = []
    for pair in range(4):
        before = [f"The {pair} refused the men because the {pair}", f"The {pair} refused the men because the men"]
        rows += [{"context_options": before, "continuation": word, "gold": gold} for gold, word in enumerate(("fled", "sang"))]
    write_lines(tmp_path / "winograd_wsc273.jsonl", rows)
    examples = read_examples(SETS["winograd_wsc273"], tmp_path)
    for number in range(8):
        for seed in range(5):
            context = examples.prompt(number, 6, seed).contexts[0]
            assert context.count(f"The {number // 2} refused") == 1
    with pytest.raises(OptionError, match="winograd_wsc273 has 6 examples besides the question, fewer than 7"):
        examples.check(7)


def test_examples_come_from_the_training_part_where_there_is_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "copa.val.jsonl", [copa("Asked.", "Yes.", "No.")])
    write_lines(tmp_path / "copa.train.jsonl", [copa(f"Known {number}.", "Yes.", "No.") for number in range(3)])
    examples = read_examples(SETS["copa"], tmp_path)
    context = examples.prompt(0, 3, seed=0).contexts[0]
    assert context.count("Known") == 3
    assert context.count("Asked") == 1
    signature = examples.signature(3, 7)
    assert "|from:train|seed:7" in signature
    assert "from" not in examples.signature(0, 7)
    with pytest.raises(OptionError, match="has 3 examples besides the question, fewer than 4"):
        examples.check(4)


def test_signatures_tell_files_parts_seeds_and_limits_apart(folder: Path) -> None:
    examples = read_examples(SETS["piqa"], folder)
    found = [examples.signature(*each) for each in ((0, 0), (1, 0), (1, 1), (2, 0), (0, 0, 2))]
    assert len(set(found)) == 5
    assert re.fullmatch(r"task:piqa\|part:val\|data:[0-9a-f]{8}\|shots:1\|from:val\|seed:1", found[2])
    assert examples.signature(0, 0, 3) == examples.signature(0, 0)  # all there are
    assert "part:all" in read_examples(SETS["winograd_wsc273"], folder).signature(0, 0)
    write_lines(folder / "piqa.val.jsonl", [row for row, _ in MADE["piqa"][:2]])
    assert read_examples(SETS["piqa"], folder).signature(0, 0) != found[0]


# --- Scores ---


def bigram_model(likely: dict[str, str]) -> kl.Decoder:
    """A byte model in which the next byte depends on the last one alone: e^9 times likelier where `likely` says so."""
    size = ByteVocabulary.vocab_size
    options: dict[str, Any] = {"positions": "none", "pad_id": None, "tie_embeddings": False, "scale_embeddings": False}
    model = kl.Decoder(size, size, 1, 8, 1, kl.recipes.get("pre_ln"), final_norm=False, **options).double()
    assert model.vocabulary is not None
    with torch.no_grad():
        for sublayer in model.decoder.sublayers():
            for parameter in sublayer.f.parameters():
                parameter.zero_()
        model.embedding.weight.copy_(torch.eye(size))
        model.vocabulary.weight.zero_()
        for first, second in likely.items():
            model.vocabulary.weight[FIRST_BYTE + ord(second), FIRST_BYTE + ord(first)] = 9.0
    return model


def scored(model: kl.Decoder, examples: Examples, **options: Any) -> list[ShotScore]:
    return score_set(model, ByteVocabulary(), LENGTH, examples, **options)


@pytest.mark.parametrize("shots", [0, 1, 3])
def test_a_model_that_knows_the_answers_is_right_and_one_that_knows_the_opposite_is_not(shots: int, tmp_path: Path) -> None:
    rows = [
        {"goal": f"goal {number}", "sol1": "xyxyxy" if number % 3 else "zzyyxx", "sol2": "zzyyxx" if number % 3 else "xyxyxy"}
        for number in range(7)
    ]
    write_lines(tmp_path / "piqa.val.jsonl", [{**row, "label": int(row["sol2"][0] == "x")} for row in rows])
    examples = read_examples(SETS["piqa"], tmp_path)
    for likely, expected in (({"x": "y", "y": "x"}, 1.0), ({"z": "z"}, 0.0)):
        found = scored(bigram_model(likely), examples, shots=shots)
        assert [each.norm for each in found] == ["bytes", "tokens", "none"]
        assert {each.value for each in found} == {expected}
        assert {(each.standard_error, each.chance, each.questions, each.cut) for each in found} == {(0.0, 0.5, 7, 0)}
        assert all(f"shots:{shots}" in each.signature for each in found)
        assert all(f"norm:{each.norm}|version:{kl.__version__}" in each.signature for each in found)


def test_partial_scoring_looks_at_what_follows_the_name(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "winogrande.val.jsonl",
        [
            {"sentence": "So _ ran.", "option1": "Q", "option2": "X", "answer": "1"},
            {"sentence": "So _ ran.", "option1": "X", "option2": "Q", "answer": "2"},
        ],
    )
    # The name X is likely itself, but a space is likely after Q, and what is before the gap's end counts for nothing.
    model = bigram_model({"Q": " "})
    model.vocabulary.weight.data[FIRST_BYTE + ord("X"), FIRST_BYTE + ord(" ")] = 50.0  # pyright: ignore
    (found,) = scored(model, read_examples(SETS["winogrande"], tmp_path), shots=0)
    assert (found.value, found.norm) == (1.0, "none")


def test_the_last_word_is_right_where_it_is_what_the_model_writes(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "lambada_openai.test.jsonl",
        [{"context": "go", "continuation": "xyx"}, {"context": "so", "continuation": "xyy"}],
    )
    accuracy, perplexity = scored(
        bigram_model({"o": " ", " ": "x", "x": "y", "y": "x"}), read_examples(SETS["lambada_openai"], tmp_path), shots=0
    )
    assert (accuracy.value, accuracy.norm, accuracy.chance) == (0.5, "greedy", None)
    right, wrong = (score - math.log(259 + math.exp(9)) for score in (9, 0))
    logs = [4 * right, 3 * right + wrong]
    assert perplexity.value == pytest.approx(math.exp(-np.mean(logs)))
    assert perplexity.standard_error == pytest.approx(perplexity.value * np.std(logs, ddof=1) / math.sqrt(2))
    assert perplexity.signature != accuracy.signature


def test_norms_divide_by_tokens_by_bytes_and_by_the_prior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["é", "bbbb", "cccccccc", "d"]
    row = {"question_stem": "Q", "choices": {"text": texts, "label": list("ABCD")}, "answerKey": "A"}
    lines = [{**row, "answerKey": key} for key in "ABCD"]
    write_lines(tmp_path / "openbookqa.val.jsonl", lines)
    # Log-likelihoods after the question, and tokens.
    table = {"é": (-4.0, 1), "bbbb": (-5.0, 1), "cccccccc": (-12.0, 6), "d": (-6.0, 1)}
    prior = {"é": -1.0, "bbbb": -5.0, "cccccccc": -10.0, "d": -9.0}

    def made(model: Any, vocabulary: Any, choices: Any, length: int) -> list[Likelihood]:
        found = []
        for context, text in choices:
            value, tokens = table[text[1:]]
            value = prior[text[1:]] if context == "Answer:" else value
            found.append(Likelihood(value, False, tokens, len(text.encode()), False))
        return found

    monkeypatch.setattr(scoring, "score_choices", made)
    chosen = {}
    for number, letter in enumerate("ABCD"):
        write_lines(tmp_path / "openbookqa.val.jsonl", lines[number : number + 1])
        found = scored(bigram_model({}), read_examples(SETS["openbookqa"], tmp_path), shots=0)
        chosen |= {each.norm: letter for each in found if each.value == 1.0}
    # bytes: -4/2, -5/4, -12/8, -6/1; tokens: -4, -5, -12/6, -6; prior: -4+1, -5+5, -12+10, -6+9
    assert chosen == {"none": "A", "bytes": "B", "tokens": "C", "prior": "D"}


@pytest.mark.parametrize("values", [[0, 1], [1, 1, 1], [0, 1, 0, 0, 1, 0, 1]])
def test_the_standard_error_is_that_of_a_mean(values: list[float]) -> None:
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)))
    assert mean_and_error([1.0]) == (1.0, None)


def test_chance_and_cut_questions_are_told(tmp_path: Path) -> None:
    rows = [row for row, _ in MADE["arc_easy"]]
    long = {**rows[0], "question": "w" * 100}
    write_lines(tmp_path / "arc_easy.val.jsonl", [*rows, long])
    found = score_set(bigram_model({}), ByteVocabulary(), 60, read_examples(SETS["arc_easy"], tmp_path), shots=0)
    assert [each.norm for each in found] == ["none", "bytes", "tokens", "prior"]
    assert [each.chance for each in found] == pytest.approx([(1 / 3 + 1 / 4 + 1 / 4 + 1 / 3) / 4] * 4)
    assert {(each.questions, each.cut) for each in found} == {(4, 1)}
    (limited, *_) = score_set(
        bigram_model({}), ByteVocabulary(), 60, read_examples(SETS["arc_easy"], tmp_path), shots=0, limit=2
    )
    assert (limited.questions, limited.cut) == (2, 0)
    assert "|first:2|" in limited.signature
    assert "|length:60|" in limited.signature


# --- Bad files ---


@pytest.mark.parametrize(
    ("name", "changed", "what"),
    [
        ("hellaswag", {"endings": None}, "the column 'endings' is missing"),
        ("hellaswag", {"endings": "a"}, "the column 'endings' is no list of two texts or more"),
        ("hellaswag", {"endings": ["a"]}, "the column 'endings' is no list of two texts or more"),
        ("hellaswag", {"label": "4"}, "the column 'label' is '4', and the choices are 0, 1, 2, 3"),
        ("hellaswag", {"label": ""}, "the column 'label' is '', and the choices are 0, 1, 2, 3"),
        ("hellaswag", {"ctx_a": 5}, "the column 'ctx_a' is 5 and not text"),
        ("arc_easy", {"answerKey": "E"}, "the column 'answerKey' is 'E', and the choices are A, B, C"),
        ("arc_easy", {"choices": ["a", "b"]}, "the column 'choices' is no object with the lists 'text' and 'label'"),
        ("arc_easy", {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, "has 2 texts and 3 labels"),
        ("boolq", {"answer": "maybe"}, "the column 'answer' is 'maybe', and the choices are False, True"),
        ("copa", {"question": "reason"}, "the column 'question' is 'reason', and the choices are cause, effect"),
        ("winogrande", {"sentence": "No gap."}, "the column 'sentence' has no gap, '_'"),
        ("winograd_wsc273", {"gold": 2}, "the column 'gold' is 2, and the choices are 0, 1"),
        ("piqa", {"sol2": " "}, "an answer is empty"),
        ("winogrande", {"sentence": "The gap is _"}, "an answer is empty"),
        ("piqa", {"label": True}, "the column 'label' is True, and the choices are 0, 1"),
    ],
)
def test_a_bad_line_is_named(name: str, changed: dict[str, Any], what: str, folder: Path) -> None:
    good, bad = MADE[name][1][0], {**MADE[name][0][0], **changed}
    (path,) = folder.glob(f"{name}.*")
    write_lines(path, [good, {key: value for key, value in bad.items() if value is not None}])
    with pytest.raises(InputError, match=re.escape(what)) as caught:
        read_examples(SETS[name], folder)
    assert caught.value.where == f"{path}, line 2"
    assert all(column in caught.value.fix for column in SETS[name].columns)


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "the line is not valid JSON"), ("[1]", "the line is no JSON object"), ("", "the file does not hold any questions")],
)
def test_a_file_that_is_no_set_is_named(text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / "copa.val.jsonl").write_text(text)
    with pytest.raises(InputError, match=what) as caught:
        read_examples(SETS["copa"], tmp_path)
    assert str(tmp_path / "copa.val.jsonl") in caught.value.where


def test_a_set_without_a_file_says_what_belongs_where(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no questions for copa") as caught:
        read_examples(SETS["copa"], tmp_path)
    assert "copa.val.jsonl" in caught.value.fix
    assert "choice1" in caught.value.fix
    with pytest.raises(InputError, match="folder of questions does not exist"):
        read_examples(SETS["copa"], tmp_path / "absent")


def test_half_a_character_in_a_question_is_replaced() -> None:
    row = Row.parse(r'{"goal": "a \ud83d b", "endings": ["x\udc00", "\ud83d\ude00"]}', "line 1", ("goal", "endings"))
    assert row.text("goal") == "a \ufffd b"
    assert row.texts("endings") == ["x\ufffd", "\U0001f600"]
