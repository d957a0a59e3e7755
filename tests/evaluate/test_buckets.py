"""Error analysis by hand cases, and against a literal reading of compare-mt's definition."""

from __future__ import annotations

import json

import pytest

from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.buckets import accuracy_by_frequency, bleu_by_length, word_frequencies
from kilolayer.evaluate.scores import Bleu, words
from tests.evaluate.made_translations import references, spoiled

REFERENCES = references(60)
HYPOTHESES = spoiled(REFERENCES, 0.3, seed=5)


def test_word_accuracy_by_hand() -> None:
    frequencies = word_frequencies(["the cat sat.", "the cat ran.", "the end."])
    buckets = accuracy_by_frequency(["the cat cat flew."], ["the cat sat there."], frequencies, edges=(1, 2, 3))
    found = {bucket.label: (bucket.matched, bucket.reference, bucket.hypothesis) for bucket in buckets}
    assert found == {
        "0": (0, 1, 1),  # there; flew
        "1": (0, 1, 0),  # sat
        "2": (1, 1, 2),  # cat, produced twice and wanted once
        "3+": (2, 2, 2),  # the and the full stop
    }
    assert [bucket.f1 for bucket in buckets] == [0.0, 0.0, pytest.approx(2 / 3), 1.0]
    assert (buckets[2].precision, buckets[2].recall) == (0.5, 1.0)
    assert (buckets[1].precision, buckets[1].recall) == (0.0, 0.0)


def test_word_accuracy_as_compare_mt_walks_it() -> None:
    frequencies = word_frequencies(REFERENCES[:30])
    edges = (1, 20, 40)
    matches = {label: [0, 0, 0] for label in ("0", "1-19", "20-39", "40+")}
    for produced, wanted in zip(words(HYPOTHESES), words(REFERENCES), strict=True):
        left = list(wanted)
        for word in produced:
            bucket = matches[list(matches)[sum(frequencies[word] >= edge for edge in edges)]]
            bucket[2] += 1
            if word in left:
                left.remove(word)
                bucket[0] += 1
        for word in wanted:
            matches[list(matches)[sum(frequencies[word] >= edge for edge in edges)]][1] += 1
    buckets = accuracy_by_frequency(HYPOTHESES, REFERENCES, frequencies, edges)
    assert {b.label: [b.matched, b.reference, b.hypothesis] for b in buckets} == matches
    assert sum(b.reference for b in buckets) == sum(map(len, words(REFERENCES)))


def test_a_bucket_without_words_has_no_accuracy() -> None:
    empty = accuracy_by_frequency(["a"], ["a"], {"a": 7}, edges=(1,))[0]
    assert (empty.label, empty.f1) == ("0", None)
    assert json.loads(json.dumps(empty.to_json()))["f1"] is None


def test_bleu_by_length_scores_each_group_as_a_corpus() -> None:
    edges = (10, 15)
    buckets = bleu_by_length(HYPOTHESES, REFERENCES, edges)
    assert [(b.label, b.low, b.high) for b in buckets] == [("0-9", 0, 9), ("10-14", 10, 14), ("15+", 15, None)]
    lengths = [len(each) for each in words(REFERENCES)]
    middle = [index for index, length in enumerate(lengths) if 10 <= length < 15]
    expected = Bleu().score([HYPOTHESES[i] for i in middle], [REFERENCES[i] for i in middle])
    assert (buckets[1].sentences, buckets[1].bleu) == (len(middle), expected.value)
    assert sum(b.sentences for b in buckets) == len(REFERENCES)


def test_every_system_has_the_same_sentences_in_a_bucket() -> None:
    long_winded = [line * 3 for line in REFERENCES]
    assert [b.sentences for b in bleu_by_length(long_winded, REFERENCES)] == [
        b.sentences for b in bleu_by_length(HYPOTHESES, REFERENCES)
    ]


def test_a_length_without_sentences_has_no_bleu() -> None:
    last = bleu_by_length(["a b"], ["a b"])[-1]
    assert last.to_json() == {"label": "60+", "low": 60, "high": None, "sentences": 0, "bleu": None}


@pytest.mark.parametrize("edges", [(), (0, 5), (5, 5), (10, 5)])
def test_edges_must_rise(edges: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="edges of the buckets"):
        bleu_by_length(HYPOTHESES, REFERENCES, edges)


def test_misaligned_text_is_refused() -> None:
    with pytest.raises(InputError, match="differ in number: 1 and 2"):
        accuracy_by_frequency(["a"], ["a", "b"], {})
    with pytest.raises(InputError, match="differ in number: 1 and 2"):
        bleu_by_length(["a"], ["a", "b"])
