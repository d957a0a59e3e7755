"""What is typed wins over what a file says, and what is wrong is told with what to type instead."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import kilolayer as kl
from kilolayer import hints, terminal
from kilolayer.cli.configuration import split_typed
from kilolayer.config import build, load, merge, override, overrides
from kilolayer.data.examples import ExamplesConfig
from kilolayer.data.text import count_lines, read_lines
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import InputError, OptionError, UnusedOptionError
from kilolayer.tasks.config import RunConfig
from tests.cli.typed_commands import quietly, refused, translate, write_corpus

# What a file says, what is typed, and what comes of both: None stands for a value that is absent.
WINNERS = [
    (
        {"model": {"encoder_layers": 6, "decoder_layers": 3}},
        "--model.layers 4",
        {"model.depths.encoder": 4, "model.depths.decoder": 4},
    ),
    ({"model": {"encoder_layers": 6}}, "--model.layers 4", {"model.depths.encoder": 4, "model.depths.decoder": 4}),
    ({"model": {"layers": 6}}, "--model.encoder_layers 4", {"model.depths.encoder": 4, "model.depths.decoder": 6}),
    (
        {"model": {"layers": 6, "decoder_layers": 3}},
        "--model.encoder_layers 4",
        {"model.depths.encoder": 4, "model.depths.decoder": 3},
    ),
    ({"model": {"layers": 6}}, "--model.encoder_layers 4 --model.decoder_layers 5", {"model.depths.decoder": 5}),
    ({"model": {"positions": "learned", "max_length": 9}}, "--model.positions rotary", {"model.max_length": None}),
    ({"model": {"recipe": "pre_ln", "final_norm": True}}, "--model.recipe deepnorm", {"model.final_norm": None}),
    (
        {"model": {"recipe": {"name": "deepnorm", "alpha_scale": 2}}},
        "--model.recipe.name admin",
        {"model.recipe.name": "admin"},
    ),
    (
        {"model": {"moe": {"experts": 4, "router": "xmoe", "router_dim": 8}}},
        "--model.moe.router linear",
        {"model.moe.router_dim": None},
    ),
    ({"model": {"moe": {"experts": 4, "second": "random"}}}, "--model.moe.top_k 1", {"model.moe.second": "all"}),
    ({"train": {"steps": 7}}, "--train.epochs 2", {"train.epochs": 2, "train.steps": 100_000}),
    ({"train": {"epochs": 2}}, "--train.steps 7", {"train.epochs": None, "train.steps": 7}),
    ({"train": {"epochs": 2}}, "--train.steps 100000", {"train.epochs": None}),
    ({"train": {"warmup_share": 0.1}}, "--train.warmup_steps 3", {"train.warmup_share": None}),
    ({"train": {"schedule": "cosine", "min_lr": 1e-5}}, "--train.schedule constant", {"train.min_lr": 0}),
    ({"train": {"precision": "bf16", "residual": "bf16"}}, "--train.precision fp32", {"train.residual": "fp32"}),
    (
        {"tokenizer": {"kind": "bpe", "vocab_size": 500}},
        "--tokenizer.path x.model",
        {"tokenizer.path": "x.model", "tokenizer.kind": "unigram"},
    ),
    ({"tokenizer": {"path": "x.model"}}, "--tokenizer.kind bpe", {"tokenizer.path": None, "tokenizer.kind": "bpe"}),
    ({"data": {"folder": "f", "valid": "v"}}, "--data.manifest m.toml", {"data.folder": None, "data.valid": None}),
    ({"data": {"manifest": "m.toml"}}, "--data.folder f", {"data.manifest": None, "data.folder": "f"}),
    ({"search": {"method": "beam", "beam": 4}}, "--search.method greedy", {"search.beam": None}),
    ({"search": {"method": "beam", "beam": 4}}, "--search.temperature 0.8", {"search.method": "sample", "search.beam": None}),
    ({"search": {"method": "sample", "top_k": 9}}, "--search.beam 3", {"search.method": "beam", "search.top_k": None}),
]


def value_at(found: object, path: str) -> object:
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("file", "typed", "expected"), WINNERS)
def test_what_is_typed_wins_over_the_files_other_way_to_say_it(file: dict, typed: str, expected: dict) -> None:
    build(RunConfig, file)  # the file alone is sound
    config = build(RunConfig, override(RunConfig, file, overrides(typed.split())))
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("file", "typed"),
    [
        ({"model": {"layers": 2, "encoder_layers": 6, "decoder_layers": 3}}, "--train.lr 1e-3"),
        ({"train": {"epochs": 2, "steps": 7}}, "--train.lr 1e-3"),
        ({"search": {"beam": 4, "temperature": 0.5}}, "--train.lr 1e-3"),
        ({"model": {"recipe": "rezero"}}, "--model.norm rms"),  # another recipe was not asked for
        ({"train": {"schedule": "cosine"}}, "--train.decay_steps 3"),
    ],
)
def test_what_a_file_contradicts_or_leaves_without_effect_is_refused_as_without_the_rule(file: dict, typed: str) -> None:
    with pytest.raises(UnusedOptionError) as plain:
        build(RunConfig, merge(file, overrides(typed.split())))
    with pytest.raises(UnusedOptionError) as found:
        build(RunConfig, override(RunConfig, file, overrides(typed.split())))
    assert str(found.value) == str(plain.value)


def test_columns_and_a_benchmarks_own_take_each_others_place() -> None:
    file = {"glue": "CoLA", "folder": "glue"}
    typed = {"train": "mine.tsv", "first": "text"}
    assert build(ExamplesConfig, override(ExamplesConfig, file, typed)).glue is None
    assert build(ExamplesConfig, override(ExamplesConfig, typed, file)).glue == "CoLA"


def test_the_file_of_byte_level_pieces_keeps_its_kind() -> None:
    table = override(TokenizerConfig, {"kind": "byte_bpe", "vocab_size": 400}, {"path": "tokenizer.json"})
    assert build(TokenizerConfig, table) == TokenizerConfig(kind="byte_bpe", path="tokenizer.json")


def test_a_depth_is_typed_over_the_embedded_configuration() -> None:
    code, out, err = quietly("plan", Path(kl.__file__).parent / "tasks/translation/quickstart.toml", "--model.layers", "4")
    assert code == 0, err
    assert "4L-4L" in out


def test_the_language_that_is_missing_is_told(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    typed = ["--data.directions", '["en-*", "*-en"]', "--data.languages", '["de", "up"]']
    lines = refused("train", config, "--run", tmp_path / "run", *typed)
    assert "languages does not list 'en'" in lines[0]
    assert 'languages = ["en", "de", "up"]' in lines[2]


def test_a_recipes_options_are_shown_as_they_are_typed_elsewhere() -> None:
    _, out, _ = quietly("recipes", "deepnorm")
    (line,) = [line for line in out.splitlines() if "alpha_scale" in line]
    flag = line.split()[1]
    for words in (["recipes", "deepnorm", "--encoder-layers", "18", "--decoder-layers", "18"], ["plan"]):
        code, told, err = quietly(*words, flag, "2")
        assert code == 0, err
        assert f"{2 * (3 * 18) ** 0.25:.4f}" in told  # the decoder's alpha at the depth that plan has by default


def test_text_that_is_utf_16_is_called_so(tmp_path: Path) -> None:
    for name, encoding, kind in (
        ("marked.txt", "utf-16", "UTF-16"),
        ("little.txt", "utf-16-le", "UTF-16LE"),
        ("big.txt", "utf-16-be", "UTF-16BE"),
    ):
        path = tmp_path / name
        path.write_bytes("Ein Hund schläft.\nZwei.\n".encode(encoding))
        for read in (count_lines, lambda path: list(read_lines(path))):
            with pytest.raises(InputError, match="the text is UTF-16") as found:
                read(path)
            assert f"iconv -f {kind} -t UTF-8 {path}" in found.value.fix
    (tmp_path / "odd.txt").write_bytes(b"a\x00b\nplain text, with one NUL\n\x00\x00\x00\x00\x00\x00\n")
    assert count_lines(tmp_path / "odd.txt") == len(list(read_lines(tmp_path / "odd.txt"))) == 3


@pytest.mark.slow
def test_a_corpus_and_an_input_of_utf_16_are_refused_with_the_line_that_converts_them(
    tmp_path: Path, trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_corpus(tmp_path)
    text = (tmp_path / "train.de").read_text(encoding="utf-8")
    (tmp_path / "train.de").write_text(text, encoding="utf-16")
    lines = refused("train", config, "--run", tmp_path / "run")
    assert ("UTF-16" in lines[0], str(tmp_path / "train.de") in lines[1], "iconv" in lines[2]) == (True, True, True)
    code, _, err = translate(monkeypatch, "Der Hund schläft.\n".encode("utf-16"), trained[0])
    assert (code, "iconv -f UTF-16 -t UTF-8 FILE" in err) == (2, True)


def test_the_side_that_is_empty_is_told(tmp_path: Path) -> None:
    config = write_corpus(tmp_path)
    lines = (tmp_path / "train.en").read_text(encoding="utf-8").count("\n")
    (tmp_path / "train.en").write_text("\n" * lines, encoding="utf-8")
    # Also where the other side alone is too little text for the vocabulary.
    for number, typed in enumerate(([], ["--tokenizer.vocab_size", "3000"])):
        told = refused("train", config, "--run", tmp_path / f"run{number}", *typed)
        assert told[0] == "kilolayer: every source is empty"
        assert told[1].strip() == str(tmp_path / "train.en")
        assert "filters" not in told[2]


def test_flags_of_the_search_are_the_same_for_every_verb_that_writes(
    trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = b"The dog sleeps.\n"
    drawn = [translate(monkeypatch, line, trained[0], "--temperature", "5", "--seed", seed) for seed in ("1", "1", "2")]
    assert [code for code, _, _ in drawn] == [0, 0, 0], drawn
    assert drawn[0][1] == drawn[1][1] != drawn[2][1]
    for words, told in {
        ("--temperature", "0"): "--greedy takes the most probable token",
        ("--greedy", "--beam", "3"): "ask for different searches",
        ("--beam", "3", "--top-k", "4"): "ask for different searches",
        ("--search.beam", "3"): "--beam",
    }.items():
        code, _, err = translate(monkeypatch, line, trained[0], *words)
        assert (code, told in err, len(err.splitlines())) == (2, True, 3), err


def test_counts_have_their_nouns_in_the_right_number() -> None:
    shown = [terminal.counted(number, noun) for number, noun in ((0, "line"), (1, "line"), (2000, "line"), (2, "batch"))]
    assert shown == ["0 lines", "1 line", "2,000 lines", "2 batches"]


def test_what_to_type_next_is_what_this_shell_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    for name in ("kilolayer", "activate"):
        (path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (path / name).chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(path / "kilolayer"), "train"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert terminal.command() == str(path / "kilolayer")
    assert terminal.activation_hint() == f"`source {path / 'activate'}` once in a shell, and the command there is kilolayer"
    monkeypatch.setenv("PATH", f"{path}:/usr/bin")
    assert (terminal.command(), terminal.activation_hint()) == ("kilolayer", None)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "kilolayer" / "__main__.py")])
    assert terminal.command() == f"{Path(sys.executable).name} -m kilolayer"


def test_a_finished_run_says_how_it_is_used(trained: tuple[Path, str, str]) -> None:
    folder, _, err = trained
    assert f'next: kilolayer translate {folder} <<< "a sentence"\n' in err


def test_wrong_lists_are_told_with_an_example() -> None:
    with pytest.raises(OptionError) as found:
        build(RunConfig, {"data": {"directions": "en-de"}})
    assert 'directions = ["en-de"]' in found.value.fix


def test_after_two_dashes_a_text_may_look_like_an_option() -> None:
    assert split_typed(["fill", "run", "--a.b", "1", "--", "--what.is", "--c.d=2"]) == (
        ["fill", "run", "--", "--what.is", "--c.d=2"],
        ["--a.b", "1"],
    )


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b'\xef\xbb\xbftask = "causal_lm"\n')
    assert load(path) == {"task": "causal_lm"}


def test_a_flag_without_a_value_tells_how_to_write_one_that_looks_like_a_flag() -> None:
    what, _, fix = refused("generate", "run", "--prompt", "--Yes. I")
    assert "argument --prompt: expected one argument" in what
    assert fix.strip() == "give a value after --prompt; one that begins with - is written --prompt=VALUE"


def test_a_folder_may_be_named_after_a_date_and_a_number_as_text_is_told_how_to_type() -> None:
    assert overrides(["--data.folder", "2024-05-01", "--data.valid=07:30:00"])["data"] == {
        "folder": "2024-05-01",
        "valid": "07:30:00",
    }
    with hints.for_shell(), pytest.raises(OptionError) as caught:
        build(RunConfig, overrides(["--data.folder", "2024"]))
    typed = re.findall("'(.*?)'", caught.value.fix)
    assert overrides(["--data.folder", typed[-1]]) == {"data": {"folder": "2024"}}
