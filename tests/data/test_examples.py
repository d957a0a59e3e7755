"""Labelled examples: GLUE's files by a naive reader, columns by name and number, JSON lines, and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import build
from kilolayer.data.example_file import ExampleFile
from kilolayer.data.examples import ExamplesConfig, find_examples
from kilolayer.errors import InputError, OptionError

DATA = os.environ.get("KILOLAYER_DATA")
GLUE = Path(DATA or ".") / "nlu" / "glue"
needs_glue = pytest.mark.skipif(DATA is None or not GLUE.is_dir(), reason="needs the GLUE files below KILOLAYER_DATA")

# Columns of train and dev, of test, the name of a class or a number, and rows of train, dev and test: from GLUE's own pages.
REAL: dict[str, tuple[Any, Any, Any, tuple[int, int, int]]] = {
    "CoLA": ((3, None, 1), (1, None, None), str, (8551, 1043, 1063)),
    "SST-2": ((0, None, 1), (1, None, None), str, (67349, 872, 1821)),
    "MRPC": ((3, 4, 0), (3, 4, None), str, (3668, 408, 1725)),
    "STS-B": ((7, 8, 9), (7, 8, None), float, (5749, 1500, 1379)),
    "RTE": ((1, 2, 3), (1, 2, None), str, (2490, 277, 3000)),
    "WNLI": ((1, 2, 3), (1, 2, None), str, (635, 71, 146)),
}


def naive_rows(path: Path, columns: tuple[int, int | None, int | None], kind: Any, header: bool) -> list[tuple[Any, ...]]:
    """Sentences and label of each line, by splitting at line feeds and tabs alone."""
    with lzma.open(path, "rb") as file:
        text = file.read().decode("utf-8-sig")
    lines = text.removesuffix("\n").split("\n")[header:]
    rows = []
    for line in lines:
        cells = line.removesuffix("\r").split("\t")
        first, second, label = (None if place is None else cells[place] for place in columns)
        rows.append((first.strip(), None if second is None else second.strip(), None if label is None else kind(label)))
    return rows


def rows_of(part: ExampleFile | None) -> list[tuple[Any, ...]]:
    assert part is not None
    return [(example.first, example.second, example.label) for example in part.examples]


@pytest.mark.matrix(3)
@needs_glue
@pytest.mark.parametrize("name", REAL)
def test_glues_real_files_hold_what_a_naive_reader_finds(name: str) -> None:
    columns, columns_of_test, kind, counts = REAL[name]
    found = find_examples(ExamplesConfig(glue=name, folder=str(GLUE)))  # pyright: ignore[reportArgumentType]
    headed = name != "CoLA"
    expected = [naive_rows(GLUE / f"{name}.{part}.tsv.xz", columns, kind, headed) for part in ("train", "dev")]
    expected.append(naive_rows(GLUE / f"{name}.test.tsv.xz", columns_of_test, kind, True))
    assert [rows_of(part) for part in (found.train, found.valid, found.test)] == expected
    assert tuple(map(len, expected)) == counts
    assert found.classes == (() if kind is float else tuple(sorted({row[2] for row in expected[0]})))


PARSES = ("sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse")
PARSED = "\t".join(["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2"])
# A header (or none), a row of train and dev, and a header and a row of test, as GLUE's own files have them.
MADE: dict[str, tuple[str | None, str, str, str, tuple[str, str | None, Any]]] = {
    "CoLA": (
        None,
        "gj04\t{}\t*\tAs you eat the most.",
        "index\tsentence",
        "0\tBill whistled.",
        ("As you eat the most.", None, 2),
    ),
    "SST-2": ("sentence\tlabel", 'no "wit \t{}', "index\tsentence", "0\tuneasy", ('no "wit', None, 2)),
    "MRPC": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '{}\t1\t2\t" Yes , " he said .\tHe said " no .',
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "0\t1\t2\ta\tb",
        ('" Yes , " he said .', 'He said " no .', 2),
    ),
    "STS-B": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t{}.500",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
        "0\tg\tf\t2012\t1\tn\tn\ta\tb",
        ("A plane.", "An air plane.", 2),
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "1\t2\t3\tWhy?\tHow?\t{}",
        "id\tquestion1\tquestion2",
        "0\ta\tb",
        ("Why?", "How?", 2),
    ),
    "MNLI": (
        f"{PARSED}\tlabel1\tgold_label",
        "0\t1\t2\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tA man.\tNo man.\tx\t{}",
        PARSED,
        "0\t1\t2\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)\ta\tb",
        ("A man.", "No man.", 2),
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel",
        "0\tWhat?\tThat.\t{}",
        "index\tquestion\tsentence",
        "0\ta\tb",
        ("What?", "That.", 2),
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tIt is.\tIs it?\t{}",
        "index\tsentence1\tsentence2",
        "0\ta\tb",
        ("It is.", "Is it?", 2),
    ),
    "WNLI": (
        "index\tsentence1\tsentence2\tlabel",
        "0\tIt is.\tIs it?\t{}",
        "index\tsentence1\tsentence2",
        "0\ta\tb",
        ("It is.", "Is it?", 2),
    ),
}
PACKERS = {"": lambda data: data, ".gz": gzip.compress, ".xz": lzma.compress}


def write_glue(folder: Path, name: str, pattern: str, suffix: str, labels: str = "0123") -> None:
    """Made files of a task; pattern: their names, such as "{0}/{1}.tsv"."""
    header, row, test_header, test_row, _ = MADE[name.removesuffix("-mm")]
    title = name.removesuffix("-mm")
    lines = [*([] if header is None else [header]), *(row.format(label) for label in labels)]
    parts = {"train": lines, "dev": lines[:-1], "test": [test_header, test_row]}
    if title == "MNLI":
        other = {"dev_mismatched": lines[:-2], "test_mismatched": [test_header, test_row, test_row]}
        parts = {"train": lines, "dev_matched": lines[:-1], "test_matched": parts["test"], **other}
    for part, content in parts.items():
        path = folder / (pattern.format(title, part) + suffix)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(PACKERS[suffix]("".join(f"{line}\n" for line in content).encode()))


@pytest.mark.matrix(4)
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("pattern", ["{0}/{1}.tsv", "{0}.{1}.tsv", "{1}.tsv"])
@pytest.mark.parametrize("name", [*MADE, "MNLI-mm"])
def test_each_layout_of_glue_is_known_by_its_name(name: str, pattern: str, suffix: str, tmp_path: Path) -> None:
    write_glue(tmp_path, name, pattern, suffix)
    found = find_examples(ExamplesConfig(glue=name, folder=str(tmp_path)))  # pyright: ignore[reportArgumentType]
    first, second, _ = MADE[name.removesuffix("-mm")][4]
    labels = [0.5, 1.5, 2.5, 3.5] if name == "STS-B" else list("0123")
    assert rows_of(found.train) == [(first, second, label) for label in labels]
    assert rows_of(found.valid) == rows_of(found.train)[: 2 if name == "MNLI-mm" else 3]
    assert found.test is not None
    assert not found.test.labelled
    assert len(found.test) == (2 if name == "MNLI-mm" else 1)
    assert found.classes == (() if name == "STS-B" else tuple("0123"))


@pytest.mark.parametrize(
    ("name", "metrics"),
    [("CoLA", ("matthews",)), ("MRPC", ("accuracy", "f1")), ("STS-B", ("pearson", "spearman")), ("RTE", ("accuracy",))],
)
def test_glues_metrics_are_known(name: str, metrics: tuple[str, ...]) -> None:
    assert build(ExamplesConfig, {"glue": name}).metrics == metrics


def test_rows_of_qqp_that_lack_columns_are_left_out(tmp_path: Path) -> None:
    write_glue(tmp_path, "QQP", "{0}/{1}.tsv", "")
    with open(tmp_path / "QQP" / "train.tsv", "a") as file:
        file.write("9\t8\t7\thalf a row\n9\t8\t7\tWhy?\t\t1\n")
    found = find_examples(ExamplesConfig(glue="QQP", folder=str(tmp_path)))
    assert [row[:2] for row in rows_of(found.train)] == [("Why?", "How?")] * 4 + [("Why?", "")]


def test_a_part_of_glue_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_glue(tmp_path, "RTE", "{0}/{1}.tsv", "")
    (tmp_path / "RTE" / "train.tsv").unlink()
    with pytest.raises(InputError, match=r"GLUE's RTE has no train part here(.|\n)*put RTE/train.tsv there"):
        find_examples(ExamplesConfig(glue="RTE", folder=str(tmp_path)))
    with pytest.raises(OptionError, match=r"set examples\.folder"):
        find_examples(ExamplesConfig(glue="RTE"))


def test_a_test_part_of_glue_may_be_absent(tmp_path: Path) -> None:
    write_glue(tmp_path, "RTE", "{0}/{1}.tsv", "")
    (tmp_path / "RTE" / "test.tsv").unlink()
    assert find_examples(ExamplesConfig(glue="RTE", folder=str(tmp_path))).test is None


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def test_columns_by_name_number_and_json_give_the_same(tmp_path: Path) -> None:
    rows = [("one", "two", "yes"), ("three", "four", "no")]
    named = write(tmp_path / "a.tsv", "x\tlabel\tb\ta", *(f"?\t{c}\t{b}\t{a}" for a, b, c in rows))
    numbered = write(tmp_path / "b.tsv", *(f"{c}\t{a}\t{b}" for a, b, c in rows))
    objects = write(tmp_path / "c.jsonl", *(json.dumps({"b": b, "label": c, "a": a}) for a, b, c in rows))
    found = [
        find_examples(ExamplesConfig(train=named, first="a", second="b")),
        find_examples(ExamplesConfig(train=numbered, first=2, second=3, label=1)),
        find_examples(ExamplesConfig(train=objects, first="a", second="b")),
    ]
    assert [rows_of(each.train) for each in found] == [rows] * 3
    assert [each.classes for each in found] == [("no", "yes")] * 3


def test_classes_are_sorted_whole_numbers_by_value_or_as_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(json.dumps({"sentence": "s", "label": label}) for label in (10, 9, -1)))
    assert find_examples(ExamplesConfig(train=path)).classes == ("-1", "9", "10")
    assert find_examples(ExamplesConfig(train=path, classes=["9", "10", "-1", "11"])).classes == ("9", "10", "-1", "11")
    path = write(tmp_path / "b.jsonl", *(json.dumps({"sentence": "s", "label": label}) for label in (True, False)))
    assert find_examples(ExamplesConfig(train=path)).classes == ("false", "true")
    huge = "9" * 5000
    path = write(tmp_path / "c.jsonl", *(json.dumps({"sentence": "s", "label": label}) for label in ("1" + huge, "8", huge)))
    assert find_examples(ExamplesConfig(train=path)).classes == ("8", huge, "1" + huge)


def test_names_of_columns_are_not_learned_where_numbers_stand_for_them(tmp_path: Path) -> None:
    rows = [f"{word}\t{label}" for label in ("good", "bad") for word in ("one", "two")]
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    with pytest.raises(InputError, match="looks like a header") as refused:
        find_examples(ExamplesConfig(train=str(path), first=1, label=2))
    assert refused.value.where == f"{path}, line 1"
    assert len(find_examples(ExamplesConfig(train=str(path), first="sentence", label="label")).train) == 4
    listed = ExamplesConfig(train=str(path), first=1, label=2, classes=["bad", "good", "label"])
    assert len(find_examples(listed).train) == 5
    path.write_text("\n".join(["zero\tneutral", rows[0], rows[2]]) + "\n")  # each class once
    assert find_examples(ExamplesConfig(train=str(path), first=1, label=2)).classes == ("bad", "good", "neutral")


def test_a_test_part_may_have_labels_or_none(tmp_path: Path) -> None:
    train = write(tmp_path / "a.tsv", "sentence\tlabel", "a\tx", "b\ty")
    bare = write(tmp_path / "b.tsv", "sentence", "a", "b")
    for test, labelled in ((train, True), (bare, False)):
        found = find_examples(ExamplesConfig(train=train, test=test))
        assert found.test is not None
        assert found.test.labelled is labelled


def test_a_test_part_whose_first_line_alone_lacks_its_label_is_refused(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", *(f'{{"sentence": "{name}", "label": "{name}"}}' for name in "xy"))
    test = write(tmp_path / "b.jsonl", '{"sentence": "a"}', '{"sentence": "b", "label": "x"}')
    with pytest.raises(InputError, match="the line has a 'label', but the first line has none") as caught:
        find_examples(ExamplesConfig(train=train, test=test))
    assert caught.value.where.endswith("b.jsonl, line 2")


HEADER = "sentence\tlabel"
BAD: list[tuple[list[str], dict[str, Any], str]] = [
    ([HEADER, "a\tx", "b\tx"], {}, "all training examples have the label 'x'"),
    ([HEADER, "a\tx", "b"], {}, "the line has 1 column, and the first line names 2\n.*train.tsv, line 3"),
    ([HEADER, "a\tx", "b\ty\tz"], {}, "the line has 3 columns"),
    ([HEADER, "a\tx", " \ty"], {}, "the sentence in column 'sentence' is empty\n.*train.tsv, line 3"),
    ([HEADER, "a\tx", "b\t"], {}, "the label is '', not a class\n.*train.tsv, line 3"),
    (
        ["sentenc\tlabel", "a\tx"],
        {},
        "there is no column 'sentence'; is it 'sentenc'\\?\n.*line 1\n.*columns here: 'sentenc', 'label'",
    ),
    (["sentence\tlable", "a\tx"], {}, "there is no column 'label'; is it 'lable'\\?\n.*line 2"),
    (["sentence\tsentence\tlabel", "a\tb\tx"], {}, "two columns are called 'sentence'"),
    ([HEADER], {}, "the file has no examples"),
    ([], {}, "the first line is empty\n.*line 1\nwrite the column names there"),
    (
        ["sentence,label", '"a, b",x'],
        {},
        "the first line does not name the columns: 'sentence,label'\n.*line 1\n.*separated by single tabs",
    ),
    ([HEADER, "a\t1", "b\tmany"], {"kind": "number"}, "the label is 'many', not a number\n.*line 3"),
    ([HEADER, "a\t1", "b\tnan"], {"kind": "number"}, "the label is 'nan', not a number"),
    ([HEADER, "a\t1", "b\t1_5"], {"kind": "number"}, "the label is '1_5', not a number"),
    ([HEADER, "a\t1", "b\t1e16"], {"kind": "number"}, "the label is '1e16', not a number(.|\n)*the largest is 1e\\+15"),
    ([HEADER, "a\t3", "b\t3.0"], {"kind": "number"}, "all examples have the label 3.0\n.*train.tsv"),
    (["a\tx", "b"], {"first": 1, "label": 2}, "the line has 1 column, and the first line has 2\n.*line 2"),
    (["a\tx", "b\tc\ty"], {"first": 1, "label": 2}, "the line has 3 columns, and the first line has 2\n.*line 2"),
    (["a\tx", "b\ty"], {"first": 1, "label": 3}, "there is no column 3: the file has 2 columns\n.*line 1"),
    (["a\tx", "b\ty"], {}, "there is no column 'sentence'(.|\n)*to numbers if these are not names"),
    ([HEADER, "a\tx", "b\ty"], {"classes": ["x", "z"]}, "there is no class 'y'\n.*line 3\nclasses: 'x', 'z'"),
]


@pytest.mark.parametrize(("lines", "options", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_what_is_wrong_is_told_with_file_and_line(
    lines: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "train.tsv", *lines)
    with pytest.raises(InputError, match=message):
        find_examples(ExamplesConfig(train=path, **options))


def test_a_test_part_may_have_its_sentences_alone(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", HEADER, "a\tx", "b\ty")
    found = find_examples(ExamplesConfig(train=train, test=write(tmp_path / "test.tsv", "sentence", "c")))
    assert rows_of(found.test) == [("c", None, None)]


@pytest.mark.parametrize("part", ["valid", "test"])
def test_a_label_that_no_class_has_is_refused_in_every_part(part: str, tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", HEADER, "a\tx", "b\ty")
    other = write(tmp_path / "other.tsv", HEADER, "a\tx", "b\tw")
    with pytest.raises(InputError, match=r"there is no class 'w'\n.*other.tsv, line 3\nclasses: 'x', 'y'"):
        find_examples(build(ExamplesConfig, {"train": train, part: other}))


@pytest.mark.parametrize("part", ["valid", "test"])
def test_numbers_that_no_correlation_is_defined_with_are_refused_in_every_part(part: str, tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", HEADER, "a\t1", "b\t2")
    other = write(tmp_path / "other.tsv", HEADER, "a\t1", "b\t1")
    with pytest.raises(InputError, match=r"all examples have the label 1\.0\n.*other\.tsv"):
        find_examples(build(ExamplesConfig, {"train": train, "kind": "number", part: other}))
    bare = write(tmp_path / "bare.tsv", "sentence", "a")
    assert find_examples(ExamplesConfig(train=train, kind="number", test=bare)).test is not None


@pytest.mark.parametrize(
    "line", ["[]", "{", '{"sentence": 3, "label": "x"}', '{"label": "x"}', '{"sentence": "a", "label": [1]}', ""]
)
def test_json_lines_that_are_no_examples_are_refused(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", '{"sentence": "a", "label": "x"}', line)
    with pytest.raises(InputError, match=r"train.jsonl, line 2"):
        find_examples(ExamplesConfig(train=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"glue": "CoLA", "train": "x.tsv"}, "train has no effect: glue = 'CoLA' sets it"),
        ({"glue": "Cola"}, "glue is 'Cola'; did you mean 'CoLA'"),
        ({"folder": "x"}, "folder has no effect without glue"),
        ({"first": "a", "label": 2}, "use either names for all of them or numbers for all of them"),
        ({"first": "label"}, "must be different columns"),
        ({"first": 0, "label": 1}, "first is 0"),
        (
            {"metric": "pearson"},
            "metric 'pearson' does not apply to labels of the kind 'class'\nallowed: accuracy, f1, matthews",
        ),
        ({"glue": "STS-B", "metric": "f1"}, "does not apply to labels of the kind 'number'"),
        ({"kind": "number", "classes": ["a", "b"]}, "classes have no effect where labels are numbers"),
        ({"classes": ["a", "a"]}, "list at least two, each once"),
        ({"classes": ["a", ""]}, "a label cannot be ''"),
        ({"classes": ["a", "b "]}, "a label cannot be 'b '"),
        ({"classes": "yes, no"}, r'classes = \["yes", "no"\]'),
        ({"length": 7}, "length is 7"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(ExamplesConfig, options)


def test_numbered_columns_are_not_for_json(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", '{"sentence": "a", "label": "x"}')
    with pytest.raises(OptionError, match=r"column 1 is a number, but train.jsonl holds JSON objects"):
        find_examples(ExamplesConfig(train=path, first=1, label=2))


def test_no_examples_at_all(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"set examples\.train"):
        find_examples(ExamplesConfig())
    with pytest.raises(InputError, match="the file does not exist"):
        find_examples(ExamplesConfig(train=str(tmp_path / "absent.tsv")))


def test_files_of_one_layout_are_taken_together(tmp_path: Path) -> None:
    write_glue(tmp_path, "RTE", "{0}.{1}.tsv", "")
    (tmp_path / "RTE.test.tsv").unlink()
    (tmp_path / "test.tsv").write_text("of something else\n")
    assert find_examples(ExamplesConfig(glue="RTE", folder=str(tmp_path))).test is None
    (tmp_path / "RTE.dev.tsv").unlink()
    with pytest.raises(InputError, match="GLUE's RTE has no dev part here"):
        find_examples(ExamplesConfig(glue="RTE", folder=str(tmp_path)))
