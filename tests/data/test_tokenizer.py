"""Vocabularies: equal bytes for equal text, no text that breaks them, no tag out of text, no file that is not a model."""

from __future__ import annotations

import io
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from kilolayer.data.corpora import Corpora, DataConfig, find_corpora
from kilolayer.data.tokenizer import Tokenizer, TokenizerConfig, Tokenizers, _sampled, tokenizers_for, train_tokenizer
from kilolayer.errors import InputError, KilolayerError, OptionError

WORDS = [
    "the",
    "a",
    "red",
    "green",
    "old",
    "small",
    "house",
    "tree",
    "dog",
    "bird",
    "sees",
    "likes",
    "finds",
    "under",
    "near",
    "and",
]
LINES = [" ".join(random.Random(i).choices(WORDS, k=6)).capitalize() + "." for i in range(300)]
SMALL = {"vocab_size": 300, "character_coverage": 1.0}
TAGS = ["<2de>", "<2fr>", "<bt>"]
MODEL = train_tokenizer(LINES, TokenizerConfig(**SMALL), TAGS)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(train_tokenizer(LINES, TokenizerConfig(kind=request.param, **SMALL), TAGS))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_training_is_deterministic(kind: Literal["unigram", "bpe"]) -> None:
    config = TokenizerConfig(kind=kind, **SMALL)
    assert train_tokenizer(LINES, config, TAGS) == train_tokenizer(LINES, config, TAGS)


def test_special_tokens_and_tags_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert [tokenizer.tag_id("de"), tokenizer.tag_id("fr"), tokenizer.synthetic_id] == [4, 5, 6]
    assert tokenizer.languages == ["de", "fr"]
    with pytest.raises(OptionError, match="unknown language 'dee'; did you mean 'de'"):
        tokenizer.tag_id("dee")


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(LINES)) == LINES
    assert tokenizer.encode([""]) == [[]]
    assert tokenizer.decode([[]]) == [""]
    assert tokenizer.encode([]) == []
    strange = "Straße, 東京 🦜 x"
    assert tokenizer.decode(tokenizer.encode([strange])) == [strange]  # spelled in bytes


def test_text_never_becomes_a_tag_or_a_special_token(tokenizer: Tokenizer) -> None:
    text = "<2de> the<2fr> <bt> <s> </s> <unk> <pad> <0x41>"
    (ids,) = tokenizer.encode([text])
    assert min(ids) > tokenizer.synthetic_id
    assert tokenizer.decode([ids]) == [text]
    assert tokenizer.decode([[4, 6, 2, *ids, 3, 0, 0]]) == [text]


def test_long_lines_and_lines_with_a_reserved_character_are_trained_on() -> None:
    words = [f"word{number:03}" for number in range(300)]
    short = [f"{first} {second}" for first, second in zip(words, words[1:] + words[:1], strict=True)] * 4
    config = TokenizerConfig(vocab_size=400)
    for lines in ([" ".join(short)], [f"{line} \u2585" for line in short]):
        assert len(Tokenizer(train_tokenizer(lines, config)).encode([" ".join(words)])[0]) < 4 * len(words)


def test_text_full_of_tags_can_be_trained_on() -> None:
    lines = [line + "<2de><bt> <2de>" for line in LINES]
    trained = Tokenizer(train_tokenizer(lines, TokenizerConfig(**SMALL), TAGS))
    assert min(trained.encode([lines[0]])[0]) > 6
    assert trained.decode(trained.encode(lines)) == lines


def test_without_byte_fallback_the_unknown_is_unknown() -> None:
    config = TokenizerConfig(vocab_size=60, byte_fallback=False, character_coverage=1.0)
    trained = Tokenizer(train_tokenizer(LINES, config))
    assert 1 in trained.encode(["東"])[0]


def test_ten_thousand_random_byte_strings(tokenizer: Tokenizer) -> None:
    source = random.Random(0)
    texts = [source.randbytes(source.randrange(60)).decode("utf-8", "replace") for _ in range(10_000)]
    ids = tokenizer.encode(texts)
    assert len(ids) == 10_000
    assert all(6 < token < tokenizer.vocab_size for row in ids for token in row)
    assert len(tokenizer.decode(ids)) == 10_000


@given(st.text(st.characters(), max_size=50))
@settings(deadline=None, max_examples=150)
def test_any_text_even_half_characters(text: str) -> None:
    tokenizer = Tokenizer(MODEL)
    (ids,) = tokenizer.encode([text])
    assert all(6 < token < tokenizer.vocab_size for token in ids)
    tokenizer.decode([ids])[0].encode("utf-8")


@given(st.text(st.sampled_from("abcXYZ019 .,<>ßéж東"), max_size=50))
@settings(deadline=None, max_examples=100)
def test_plain_text_comes_back_with_single_spaces(text: str) -> None:
    tokenizer = Tokenizer(MODEL)
    assert tokenizer.decode(tokenizer.encode([text])) == [" ".join(text.split())]


def test_long_lines_and_control_characters(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode(["the dog " * 40_000])
    assert tokenizer.decode([ids])[0].count("dog") == 40_000
    assert len(tokenizer.encode(["a\0b\u2028c\x0bd\ufeff", "\0", "\u2028"])) == 3


@given(st.lists(st.integers(-5, 400), max_size=20))
@settings(deadline=None)
def test_any_ids_decode(ids: list[int]) -> None:
    assert isinstance(Tokenizer(MODEL).decode([ids])[0], str)


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    path, canary = tmp_path / "tokenizer.model", tmp_path / "canary"
    for content in (b"", b"some text\n", MODEL[:1000], b"PK\x03\x04", pickle.dumps(Bomb(canary))):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a SentencePiece model") as caught:
            Tokenizer.load(path)
        assert caught.value.where == str(path)
    assert not canary.exists()
    with pytest.raises(InputError, match="does not exist"):
        Tokenizer.load(tmp_path / "absent")


def test_damaged_models_are_refused_or_work(tmp_path: Path) -> None:
    """In a process of its own: a crash of the library would end it."""
    path = tmp_path / "model"
    path.write_bytes(MODEL)
    script = (
        "import random, sys; from pathlib import Path; from kilolayer.data.tokenizer import Tokenizer\n"
        "from kilolayer.errors import InputError\n"
        "model, source = Path(sys.argv[1]).read_bytes(), random.Random(0)\n"
        "for _ in range(200):\n"
        "    broken = bytearray(model)\n"
        "    for _ in range(3): broken[source.randrange(len(broken))] ^= 1 << source.randrange(8)\n"
        "    try: Tokenizer(bytes(broken)).decode([range(1000)])\n"
        "    except InputError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_with_other_special_ids_is_refused() -> None:
    other = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=other, vocab_size=60, minloglevel=2)
    with pytest.raises(InputError, match="--pad_id=0"):
        Tokenizer(other.getvalue())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 50_000}, "vocab_size to [0-9]+ or less"),
        ({"vocab_size": 20}, "vocab_size to [0-9]+ or more"),
        ({"vocab_size": 2}, "at least 8"),
        ({"kind": "bpee"}, "did you mean 'bpe'"),
        ({"path": "x.model", "vocab_size": 100}, "vocab_size has no effect"),
        ({"character_coverage": 0.1}, "character_coverage is 0.1"),
    ],
)
def test_bad_options_are_refused_with_what_to_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        train_tokenizer(LINES, TokenizerConfig(**options))


def corpora(folder: Path, *directions: str) -> Corpora:
    upper, lower = [line.upper() for line in LINES], [line.lower() for line in LINES]
    for language, lines in {"en": LINES, "de": upper, "fr": lower}.items():
        (folder / f"train.{language}").write_text("\n".join(lines))
    return find_corpora(DataConfig(folder=str(folder), directions=list(directions)))


def test_vocabularies_are_trained_once_and_kept_by_content(tmp_path: Path) -> None:
    cache, config = tmp_path / "cache", TokenizerConfig(**SMALL)
    first = tokenizers_for(corpora(tmp_path, "en-de"), config, cache)
    (folder,) = cache.iterdir()
    before = (folder / "tokenizer.model").stat().st_mtime_ns
    again = tokenizers_for(corpora(tmp_path, "en-de"), config, cache)
    assert again.source.model == first.source.model
    assert (folder / "tokenizer.model").stat().st_mtime_ns == before
    tokenizers_for(corpora(tmp_path, "en-de"), TokenizerConfig(**{**SMALL, "vocab_size": 301}), cache)
    texts = corpora(tmp_path, "en-de")
    (tmp_path / "train.en").write_text("\n".join([*LINES[:-1], "Another bird."]))
    tokenizers_for(texts, config, cache)
    assert len(list(cache.iterdir())) == 3


def test_a_damaged_vocabulary_is_trained_again(tmp_path: Path) -> None:
    cache, config = tmp_path / "cache", TokenizerConfig(**SMALL)
    first = tokenizers_for(corpora(tmp_path, "en-de"), config, cache)
    (model,) = cache.glob("*/tokenizer.model")
    model.write_bytes(first.source.model[:-1] + b"\0")
    assert tokenizers_for(corpora(tmp_path, "en-de"), config, cache).source.model == first.source.model


def test_shared_and_separate(tmp_path: Path) -> None:
    config = TokenizerConfig(shared=False, **{**SMALL, "kind": "bpe"})
    two = tokenizers_for(corpora(tmp_path, "en-de"), config, tmp_path / "cache")
    assert not two.shared
    assert len(two.source.encode(["The old tree"])[0]) < len(two.target.encode(["The old tree"])[0])
    two.save(tmp_path)
    loaded = Tokenizers.load(tmp_path)
    assert (loaded.source.model, loaded.target.model) == (two.source.model, two.target.model)
    Tokenizers(two.target, two.target).save(tmp_path)  # over the two
    assert Tokenizers.load(tmp_path).source.model == two.target.model
    with pytest.raises(OptionError, match="two vocabularies cannot serve"):
        tokenizers_for(corpora(tmp_path, "en-de", "de-en"), config, tmp_path / "cache")


def test_several_directions_get_tags_and_a_given_model_must_have_them(tmp_path: Path) -> None:
    texts = corpora(tmp_path, "en-de", "en-fr")
    trained = tokenizers_for(texts, TokenizerConfig(**{**SMALL, "vocab_size": 320}), tmp_path / "cache")
    assert trained.shared
    assert trained.source.languages == ["de", "fr"]
    trained.save(tmp_path)
    path = str(tmp_path / "tokenizer.model")
    assert tokenizers_for(texts, TokenizerConfig(path=path), tmp_path).source.model == trained.source.model
    with pytest.raises(KilolayerError, match="unknown language 'en'"):
        tokenizers_for(corpora(tmp_path, "en-de", "de-en"), TokenizerConfig(path=path), tmp_path)


def test_fewer_sentences_are_every_nth(tmp_path: Path) -> None:
    few = TokenizerConfig(vocab_size=300, sentences=100, character_coverage=1.0)
    model = tokenizers_for(corpora(tmp_path, "en-de"), few, tmp_path / "cache").source.model
    assert model == train_tokenizer([*LINES[::6], *(line.upper() for line in LINES[::6])], few, ["<bt>"])


def test_a_fault_in_the_text_is_told_as_such() -> None:
    def broken() -> Iterator[str]:
        yield "some text"
        raise InputError("not valid UTF-8: byte 0xff", where="train.en, line 7, byte 5")

    with pytest.raises(InputError, match="line 7, byte 5"):
        train_tokenizer(broken(), TokenizerConfig(vocab_size=20))
    with pytest.raises(OptionError, match="the text has only white space"):
        train_tokenizer(["", ""], TokenizerConfig(vocab_size=20))


def many(folder: Path, temperature: float) -> Corpora:
    """4,000 pairs of English and German, 40 of English and a language in a script of its own; all made up."""
    letters = {"en": "abcdefghij", "de": "ABCDEFGHIJ", "bg": "абцдефгхий"}
    for name, count in {"en-de.en": 4000, "en-de.de": 4000, "en-bg.en": 40, "en-bg.bg": 40}.items():
        source, alphabet = random.Random(name), letters[name[-2:]]
        words = ["".join(source.choices(alphabet, k=5)) for _ in range(100)]
        text = "".join(" ".join(source.choices(words, k=6)) + "\n" for _ in range(count))
        (folder / f"train.{name}").write_text(text, encoding="utf-8")
    config = DataConfig(folder=str(folder), directions=["en-de", "de-en", "en-bg"], temperature=temperature)
    return find_corpora(config)


def shown(texts: Corpora, limit: int, temperature: float) -> Counter[str]:
    """How often the vocabulary's training sees each line."""
    return Counter(line for side in _sampled(texts.train, (0, 1), limit, temperature) for line in side.lines())


@pytest.mark.matrix(3)
@pytest.mark.parametrize("limit", [1_000_000, 2000])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_languages_share_the_vocabularys_text_by_temperature(tmp_path: Path, limit: int, temperature: float) -> None:
    counts = shown(many(tmp_path, temperature), limit, temperature)
    found = {
        "bg": sum(count for line, count in counts.items() if not line.isascii()),
        "de": sum(count for line, count in counts.items() if line.isupper() and line.isascii()),
        "en": sum(count for line, count in counts.items() if not line.isupper() and line.isascii()),
    }
    sizes = {"en": 4040, "de": 4000, "bg": 40}  # English has two files, and each counts once
    total = sum(found.values())
    assert 0.8 * min(limit, 8080) <= total <= min(limit, 8080) + 4
    for language, size in sizes.items():
        share = size ** (1 / temperature) / sum(each ** (1 / temperature) for each in sizes.values())
        assert found[language] == pytest.approx(share * total, rel=0.01, abs=3), language
    if temperature == 5:
        own = [count for line, count in counts.items() if not line.isascii()]
        assert min(own) > 1  # all of its lines, again and again


@pytest.mark.slow
def test_a_small_language_gets_its_pieces_by_temperature(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=300, kind="bpe", byte_fallback=False, character_coverage=1.0)
    lengths = []
    for temperature in (1.0, 5.0):
        trained = tokenizers_for(many(tmp_path, temperature), config, tmp_path / "cache")
        lines = (tmp_path / "train.en-bg.bg").read_text(encoding="utf-8").splitlines()
        lengths.append(sum(map(len, trained.source.encode(lines))))
        again = tokenizers_for(many(tmp_path, temperature), config, tmp_path / f"cache {temperature}")
        assert again.source.model == trained.source.model
    assert lengths[1] < 0.7 * lengths[0], lengths
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("shared", [True, False])
def test_the_temperature_changes_nothing_for_one_direction(tmp_path: Path, shared: bool) -> None:
    config = TokenizerConfig(sentences=100, shared=shared, **{**SMALL, "kind": "bpe"})
    for temperature in (1.0, 3.0, 5.0):
        corpora(tmp_path, "en-de")
        texts = find_corpora(DataConfig(folder=str(tmp_path), directions=["en-de"], temperature=temperature))
        tokenizers_for(texts, config, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
