"""Scores against sacreBLEU, hand cases, and the refusal of what cannot be scored."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import sentencepiece
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers.tokenizer_spm import TokenizerSPM

from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.scores import (
    STANDARD,
    Bleu,
    Chrf,
    Meteor,
    Metric,
    Score,
    SpBleu,
    Ter,
    TokenisedBleu,
    Unavailable,
    check_tokenised,
    score_all,
    words,
)
from tests.evaluate.made_translations import references, spoiled

REFERENCES = references(80)
HYPOTHESES = spoiled(REFERENCES, 0.3, seed=1)

ODD_PAIRS = [
    (["der Hund"], ["der Hund"]),  # no 3- or 4-gram at all
    (["x y z w"], ["der Hund sieht die Katze"]),  # nothing matches
    ([""], ["der Hund"]),
    (["der Hund"], [""]),
    ([""], [""]),
    (["der Hund sieht die"], ["der Hund jagt eine Katze im Garten"]),  # short, and no 3-gram matches
    (["a b c d e f a b", ""], ["a b c d x f", "a"]),
    (["D"], ["d"]),
]


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("spm") / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(REFERENCES), model_prefix=str(prefix), vocab_size=50, minloglevel=2
    )
    return prefix.with_suffix(".model")


def test_scores_are_sacrebleus() -> None:
    found = score_all(HYPOTHESES, REFERENCES)
    assert list(found) == ["bleu", "chrf", "ter"]
    expected = {
        "bleu": sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score,
        "chrf": sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES], word_order=2).score,
        "ter": sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score,
    }
    assert {key: score.value for key, score in found.items() if isinstance(score, Score)} == expected
    assert 20 < expected["bleu"] < 90


def test_signatures_say_how() -> None:
    version = f"version:{sacrebleu.__version__}"
    assert Bleu().signature() == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|{version}"
    assert Bleu(lowercase=True, tokenize="none").signature() == f"nrefs:1|case:lc|eff:no|tok:none|smooth:exp|{version}"
    assert Chrf().signature() == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:2|space:no|{version}"
    assert Ter().signature() == f"nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|{version}"


@pytest.mark.matrix(3)
@pytest.mark.parametrize("metric", [*STANDARD, Bleu(lowercase=True), TokenisedBleu(), Chrf(lowercase=True)], ids=str)
def test_values_of_summed_statistics_are_the_corpus_score(metric: Metric) -> None:
    for hypotheses, wanted in [(HYPOTHESES, REFERENCES), *ODD_PAIRS]:
        sums = metric.statistics(hypotheses, wanted).sum(axis=0)
        assert float(metric.values(sums)) == pytest.approx(metric.score(hypotheses, wanted).value, abs=1e-9), hypotheses


@pytest.mark.parametrize("metric", STANDARD, ids=str)
def test_many_sums_are_scored_at_once(metric: Metric) -> None:
    per_sentence = metric.statistics(HYPOTHESES, REFERENCES)
    together = metric.values(per_sentence.reshape(4, 20, -1))
    assert together.shape == (4, 20)
    assert together.ravel().tolist() == pytest.approx([float(metric.values(row)) for row in per_sentence])
    assert np.isfinite(together).all()


def test_bleu_by_hand() -> None:
    # 4 of 5 words, 3 of 4, 2 of 3 and 1 of 2 n-grams match; lengths are equal.
    score = Bleu(tokenize="none").score(["a b c d x"], ["a b c d e"])
    assert score.value == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4))
    assert str(score).startswith("BLEU 66.87 (nrefs:1|")


def test_case_and_tokens_are_options() -> None:
    hypothesis, wanted = ["das ist ein haus ."], ["Das ist ein Haus."]
    assert Bleu(lowercase=True).score(hypothesis, wanted).value == pytest.approx(100)
    assert Bleu().score(hypothesis, wanted).value < 50
    assert Bleu(lowercase=True, tokenize="none").score(hypothesis, wanted).value < 100


def test_tokenised_bleu_counts_the_words_between_spaces() -> None:
    hypotheses, wanted = ["Das ist ein Haus .", "He said : no"], ["Das ist ein Haus .", "He said : yes"]
    score = TokenisedBleu().score(hypotheses, wanted)
    # Of 9 words 8 match, of 7 pairs 6, of 5 triples 4, of 3 fours 2; lengths are equal.
    assert score.value == pytest.approx(100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** (1 / 4))
    assert "|case:mixed|eff:no|tok:none|" in score.signature
    assert TokenisedBleu().score(["Haus."] * 4, ["Haus ."] * 4).value == 0


def test_text_that_no_tokeniser_has_split_is_refused() -> None:
    check_tokenised(["Das ist ein Haus .", "Gut !", "und so weiter usw.", "ohne Ende", ".", ""])
    check_tokenised(["ohne", "Ende"])
    with pytest.raises(InputError, match="not tokenised: 2 of 3 final punctuation marks are attached to a word"):
        check_tokenised(["Das ist ein Haus.", "Gut!", "Ja ."])


def test_spbleu_is_bleu_on_the_models_pieces(piece_model: Path) -> None:
    ours = SpBleu(piece_model).score(HYPOTHESES, REFERENCES)
    peer = BLEU()
    tokenizer = TokenizerSPM.__new__(TokenizerSPM)  # sacreBLEU's class would download its model
    tokenizer.sp = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    peer.tokenizer = tokenizer
    assert ours.value == pytest.approx(peer.corpus_score(HYPOTHESES, [REFERENCES]).score)
    assert ours.name == "spBLEU"
    assert "|tok:spm-" in ours.signature
    assert "tok:none" not in ours.signature
    sums = SpBleu(piece_model).statistics(HYPOTHESES, REFERENCES).sum(axis=0)
    assert float(SpBleu(piece_model).values(sums)) == pytest.approx(ours.value)


def test_spbleu_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        SpBleu(tmp_path / "absent.model")
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(OptionError, match=r"not a SentencePiece model\n.*broken\.model"):
        SpBleu(tmp_path / "broken.model").score(HYPOTHESES, REFERENCES)


def test_meteor_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = score_all(HYPOTHESES, REFERENCES, [Meteor(), Bleu()])
    assert isinstance(found["meteor"], Unavailable)
    assert str(found["meteor"]) == "METEOR not available: nltk is not installed (pip install nltk)"
    assert isinstance(found["bleu"], Score)
    with pytest.raises(OptionError, match="nltk is not installed"):
        Meteor().score(HYPOTHESES, REFERENCES)


def fake_nltk(monkeypatch: pytest.MonkeyPatch, *, has_data: bool) -> None:
    """A stand-in with nltk's names; its METEOR is the share of the reference's words that were produced."""

    def ensure_loaded() -> None:
        if not has_data:
            raise LookupError("wordnet")

    modules = {
        name: types.ModuleType(name) for name in ("nltk", "nltk.corpus", "nltk.translate", "nltk.translate.meteor_score")
    }
    modules["nltk"].__spec__ = importlib.machinery.ModuleSpec("nltk", None)
    vars(modules["nltk"])["__version__"] = "0.0"
    vars(modules["nltk.corpus"])["wordnet"] = types.SimpleNamespace(ensure_loaded=ensure_loaded)
    vars(modules["nltk.translate.meteor_score"])["meteor_score"] = lambda wanted, got: (
        len({*wanted[0]} & {*got}) / len(wanted[0])
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_meteor_needs_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nltk(monkeypatch, has_data=False)
    assert "WordNet data is not there" in Meteor().missing()


def test_meteor_is_the_mean_over_sentences_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nltk(monkeypatch, has_data=True)
    score = Meteor().score(["a b.", "c"], ["a b.", "c d"])
    assert score == Score("METEOR", pytest.approx(75.0), "nrefs:1|case:lc|tok:13a|mean:sentences|nltk:0.0")  # pyright: ignore


def test_words_are_those_of_bleu() -> None:
    assert words(["Ein Haus, 3.5 m hoch.", ""]) == [["Ein", "Haus", ",", "3.5", "m", "hoch", "."], []]


@pytest.mark.parametrize("metric", STANDARD, ids=str)
def test_misaligned_and_empty_text_is_refused(metric: Metric) -> None:
    with pytest.raises(InputError, match="differ in number: 2 and 1"):
        metric.score(["a", "b"], ["a"])
    with pytest.raises(InputError, match="nothing to score"):
        metric.statistics([], [])
    with pytest.raises(InputError, match="nothing to score"):
        score_all([], [], [metric])


def test_an_unknown_tokeniser_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean '13a'"):
        Bleu(tokenize="13")
