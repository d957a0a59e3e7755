"""Which files a configuration or a manifest names, and what is refused before anything is read."""

from __future__ import annotations

import gzip
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kilolayer.config import build
from kilolayer.data.corpora import DataConfig, Direction, ParallelText, ScoredPart, expand, find_corpora
from kilolayer.errors import InputError, KilolayerError, OptionError

TABLE = "deu\teng\tHallo\tHello\neng\tfra\tHello\tBonjour\neng\tdeu\tYes\tJa\ndeu\teng\tNein\r\r\tNo\r\r\n"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        data = text.encode()
        path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data))


def pairs(texts: list[ParallelText]) -> dict[str, list[tuple[str, str]]]:
    return {text.direction.name: list(text.pairs()) for text in texts}


def test_line_aligned_files_plain_and_compressed(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\nb\n", train__de__gz="A\nB\n", val__en__xz="c\n", val__de="C")
    corpora = find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de", "de-en"], valid="val"))
    assert pairs(corpora.train) == {"en-de": [("a", "A"), ("b", "B")], "de-en": [("A", "a"), ("B", "b")]}
    assert pairs(corpora.valid) == {"en-de": [("c", "C")], "de-en": [("C", "c")]}
    assert corpora.test == []
    assert [text.size for text in corpora.train] == [2, 2]
    assert corpora.tags == ["de", "en"]


def test_several_test_sets_are_scored_apart(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write(tmp_path, train__en="a\n", train__de="A\n", one__en="b\n", one__de="B\n")
    write(tmp_path / "old", two__en="c\nd\n", two__de="C\nD\n")
    config = DataConfig(folder=str(tmp_path), directions=["en-de", "de-en"], test=["one", "old/two"])
    corpora = find_corpora(config)
    there, back = Direction("en", "de"), Direction("de", "en")
    assert corpora.scored_parts == [ScoredPart(way, name) for name in ("one", "two") for way in (there, back)]
    assert corpora.test_of(ScoredPart(back, "two")) == [("C", "c"), ("D", "d")]
    alone = find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de"], test=["one"]))
    assert alone.scored_parts == [ScoredPart(there)]


def test_corpora_of_one_name_are_one_test_set(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n", one__en="b\n", one__de="B\n", two__en="c\n", two__de="C\n")
    sets = [("one", "both"), ("two", "both"), ("two", "second")]
    entries = "".join(f'[[test]]\nfiles = "{stem}"\nname = "{name}"\n' for stem, name in sets)
    write(tmp_path, manifest__toml=f'directions = ["en-de"]\n[[train]]\nfiles = "train"\n{entries}')
    corpora = find_corpora(DataConfig(manifest=str(tmp_path / "manifest.toml")))
    found = {part.name: corpora.test_of(part) for part in corpora.scored_parts}
    assert found == {"both": [("b", "B"), ("c", "C")], "second": [("c", "C")]}


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        ('[[train]]\nfiles = "train"\nname = "x"\n', "name has no effect on the corpus 'train'"),
        ('[[train]]\nfiles = "train"\n[[test]]\nfiles = "train"\nname = "../x"\n', "the name of a test set"),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, entries: str, what: str) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n", manifest__toml=f'directions = ["en-de"]\n{entries}')
    with pytest.raises(OptionError, match=what):
        find_corpora(DataConfig(manifest=str(tmp_path / "manifest.toml")))


def test_two_test_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n")
    with pytest.raises(OptionError, match="the same name: a/test, b/test"):
        find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de"], test=["a/test", "b/test"]))


def test_one_direction_needs_no_tag(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n")
    assert find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de"])).tags == []


def test_files_may_name_the_pair(tmp_path: Path) -> None:
    write(tmp_path, **{"train__en-de__en": "a\n", "train__en-de__de": "A\n"})
    write(tmp_path, **{"train__fr-en__en": "b\n", "train__fr-en__fr": "B\n"})
    corpora = find_corpora(DataConfig(folder=str(tmp_path), languages=["en", "de", "fr"], directions=["en-*", "*-en"]))
    assert pairs(corpora.train) == {"en-de": [("a", "A")], "en-fr": [("b", "B")], "de-en": [("A", "a")], "fr-en": [("B", "b")]}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_two_columns_with_given_languages(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, **{f"train__tsv{suffix}": "Hi.\tHallo!\nRun!\tLauf!\n"})
    config = DataConfig(folder=str(tmp_path), directions=["de-en"], columns=["en", "de"])
    assert pairs(find_corpora(config).train) == {"de-en": [("Hallo!", "Hi."), ("Lauf!", "Run!")]}


@pytest.mark.parametrize("cached", [False, True])
def test_four_columns_hold_many_languages(tmp_path: Path, cached: bool) -> None:
    write(tmp_path, **{"all.tsv.xz": TABLE})
    config = DataConfig(folder=str(tmp_path), train=["all"], directions=["eng-deu", "eng-fra", "deu-eng"])
    corpora = find_corpora(config, tmp_path / "cache" if cached else None)
    english = [("Hello", "Hallo"), ("Yes", "Ja"), ("No\r", "Nein\r\r")]
    german = [(target, source) for source, target in english]
    assert pairs(corpora.train) == {"eng-deu": english, "eng-fra": [("Hello", "Bonjour")], "deu-eng": german}
    assert [text.size for text in corpora.train] == [3, 1, 3]


def test_a_manifest_lists_corpora_languages_and_directions(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n", bt__en="x\ny\n", bt__de="X\nY\n", val__en="v\n", val__de="V\n")
    (tmp_path / "news.toml").write_text(
        'languages = ["en", "de"]\ndirections = ["*-*"]\n[[train]]\nfiles = "train"\nupsample = 2\n'
        '[[train]]\nfiles = "bt"\nsynthetic = true\ndirections = ["en-de"]\n[[valid]]\nfiles = "val"\n'
    )
    corpora = find_corpora(DataConfig(manifest=str(tmp_path / "news.toml")))
    found = [(text.direction.name, text.synthetic, text.upsample, text.size) for text in corpora.train]
    assert found == [("en-de", False, 2, 1), ("de-en", False, 2, 1), ("en-de", True, 1.0, 2)]
    one = find_corpora(DataConfig(manifest=str(tmp_path / "news.toml"), directions=["en-de"]))
    assert [direction.name for direction in one.directions] == ["en-de"]
    back = find_corpora(DataConfig(manifest=str(tmp_path / "news.toml"), directions=["de-en"]))
    assert [(text.direction.name, text.synthetic) for text in back.train] == [("de-en", False)]
    with pytest.raises(OptionError, match="did you mean 'en-de'"):
        find_corpora(DataConfig(manifest=str(tmp_path / "news.toml"), directions=["en-dd"]))


def test_synthetic_corpora_without_a_manifest(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\n", train__de="A\n", bt__en="x\n", bt__de="X\n")
    config = DataConfig(folder=str(tmp_path), directions=["en-de"], synthetic=["bt"], upsample=3)
    assert [(text.synthetic, text.upsample) for text in find_corpora(config).train] == [(False, 3), (True, 1.0)]


def test_back_translations_are_read_in_one_direction(tmp_path: Path) -> None:
    write(tmp_path, **{"train.en": "a\n", "train.de": "A\n", "bt.en": "b\n", "bt.de": "B\n"})
    both = DataConfig(folder=str(tmp_path), directions=["en-de", "de-en"], synthetic=["bt"])
    with pytest.raises(OptionError, match="'bt' would be read as") as caught:
        find_corpora(both)
    assert "list it in a manifest" in caught.value.fix


def test_directions_without_validation_text_are_named(tmp_path: Path) -> None:
    write(tmp_path, **{f"{part}.{language}": "a\n" for part in ("train", "valid", "test") for language in ("en", "de")})
    write(tmp_path, **{"train.en-fr.en": "a\n", "train.en-fr.fr": "A\n", "test.en-fr.en": "a\n", "test.en-fr.fr": "A\n"})
    config = DataConfig(folder=str(tmp_path), directions=["en-de", "en-fr"], valid="valid", test="test")
    assert [*find_corpora(config).gaps()] == ["no validation text for en-fr"]


def test_files_of_any_name_are_test_sets(tmp_path: Path) -> None:
    write(tmp_path, **{f"{stem}.{language}": "a\n" for stem in ("train", "test 2016", ".old") for language in ("en", "de")})
    config = DataConfig(folder=str(tmp_path), directions=["en-de"], test=["test 2016", ".old"])
    assert [text.set_name for text in find_corpora(config).test] == ["test_2016", "_old"]


def test_patterns_of_directions() -> None:
    languages = ["en", "de", "fr"]
    assert [each.name for each in expand(["en-*", "en-de", "*-en"], languages)] == ["en-de", "en-fr", "de-en", "fr-en"]
    assert len(expand(["*-*"], languages)) == 6
    assert Direction.parse("en-pt_BR").reverse.name == "pt_BR-en"


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({"train__en": "a\nb\n", "train__de": "A\n"}, {}, ["2 lines and 1 line", "train.en", "train.de"]),
        ({"train__en": "", "train__de": ""}, {}, ["the file is empty", "train.en"]),
        ({"train__en": "a\n"}, {}, ["no text for en-de", "train.de", "there is train.en"]),
        ({}, {"directions": ["en-xx"]}, ["no text for en-xx", "train.xx"]),
        ({"train__en": "a\n", "train__de": "A\n"}, {"directions": ["en-de", "en-fr"]}, ["no training text for en-fr"]),
        ({"train__en": "a\n", "train__de": "A\n"}, {"valid": "vall"}, ["'vall' has no text for en-de", "vall.en"]),
        ({"train__tsv": "a\tb\n"}, {}, ["2 columns, not 4", "line 1", "data.columns"]),
        ({"train__tsv": ""}, {}, ["empty", "train.tsv"]),
        ({"train__tsv": "en\t../de\ta\tb\n"}, {}, ["'../de' is not a language", "line 1"]),
        ({"train__tsv": "en\tfr\ta\tb\n"}, {}, ["no text for en-de"]),
    ],
)
def test_bad_files_are_refused_in_three_lines(
    tmp_path: Path, files: dict[str, str], options: dict[str, Any], words: list[str]
) -> None:
    write(tmp_path, **files)
    with pytest.raises(InputError) as caught:
        find_corpora(DataConfig(**{"folder": str(tmp_path), "directions": ["en-de"], **options}), tmp_path / "cache")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": ".", "directions": ["en-de-fr"]}, "'en-de-fr' is not a direction"),
        ({"folder": ".", "directions": ["en-en"]}, "'en-en' is not a direction"),
        ({"folder": ".", "directions": []}, "no direction is given"),
        ({"folder": ".", "directions": ["en-*"]}, "no languages are listed"),
        ({"folder": ".", "directions": ["enn-*"], "languages": ["en", "de"]}, "did you mean 'en'"),
        ({"folder": ".", "manifest": "x.toml"}, "both given"),
        ({"manifest": "x.toml", "valid": "val"}, "valid has no effect with a manifest"),
        ({"directions": ["en-de"]}, "no training text is given"),
        ({"folder": ".", "directions": ["en-de"], "temperature": 0.5}, "temperature is 0.5"),
        ({"folder": ".", "directions": ["en-de"], "columns": ["en"]}, "columns is"),
        ({"folder": ".", "directions": ["en-de"], "upsample": 0}, "upsample is 0"),
        ({"folder": ".", "direction": ["en-de"]}, "did you mean 'directions'"),
        ({"folder": ".", "filters": {"max_token": 3}}, "did you mean 'max_tokens'"),
        ({"folder": ".", "filters": {"max_ratio": 0.5}}, "max_ratio is 0.5"),
        ({"manifest": "absent.toml"}, "does not exist"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("*", r"\*")):
        find_corpora(build(DataConfig, options, "data"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('directions = ["en-de"]\n', "no train"),
        ('directions = ["en-de"]\ntrain = "train"\n', "a list of corpora"),
        ('directions = ["en-de"]\n[[train]]\nfiles = "t"\nsyntetic = true\n', "did you mean 'synthetic'"),
        ('directions = ["en-de"]\n[[train]]\nfiles = "t"\ndirections = ["en-fr"]\n', "did you mean 'en-de'"),
        ('directions = ["en-de"]\n[[train]]\nsynthetic = true\n', "files"),
    ],
)
def test_bad_manifests_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "m.toml").write_text(text)
    with pytest.raises(KilolayerError, match=words):
        find_corpora(DataConfig(manifest=str(tmp_path / "m.toml")))


def test_files_that_change_after_the_check_are_still_refused(tmp_path: Path) -> None:
    write(tmp_path, train__en="a\nb\n", train__de="A\nB\n")
    (text,) = find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de"])).train
    write(tmp_path, train__de="A\n")
    with pytest.raises(InputError, match="2 lines and 1 line"):
        list(text.pairs())


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder does not exist"):
        find_corpora(DataConfig(folder=str(tmp_path / "absent"), directions=["en-de"]))


def test_configuration_of_data_imports_no_torch() -> None:
    modules = ", ".join(
        f"kilolayer.data.{name}" for name in ("corpora", "tokenizer", "encode", "shapes", "documents", "token_text")
    )
    probe = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
