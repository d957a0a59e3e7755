"""The text of several languages: from all over a sorted corpus, and no sentence of a held-out set in the training set."""

from __future__ import annotations

import lzma
from pathlib import Path

from kilolayer.reproduce.texts import many_languages


def test_the_text_of_several_languages_is_from_all_over_a_sorted_corpus(tmp_path: Path) -> None:
    english = sorted(f"{letter}{number}" for letter in "ABCDEFGHIJ" for number in range(400))
    # Each sentence has two translations, and each translation is also that of the sentence after the next.
    rows = [(each, f"x{number + more}") for number, each in enumerate(english) for more in (0, 2)]
    lines = [f"deu\teng\t{other}\t{each}\n" for each, other in rows]
    (tmp_path / "tatoeba_multi").mkdir()
    (tmp_path / "tatoeba_multi/train.en-xx.tsv.xz").write_bytes(lzma.compress("".join(lines).encode()))
    folder = tmp_path / "text"
    assert many_languages(tmp_path, folder, least=100, most=1000) == ["deu"]
    found = {
        part: [(folder / f"{part}.eng-deu.{language}").read_text().split() for language in ("eng", "deu")]
        for part in ("train", "valid", "test")
    }
    assert len(found["train"][0]) == 1000
    assert {sentence[0] for sentence in found["train"][0]} == set("ABCDEFGHIJ")
    for part in ("valid", "test"):
        sentences, translations = found[part]
        assert len(sentences) == len(set(sentences)) > 20
        assert len({sentence[0] for sentence in sentences}) > 5
        for side, own in enumerate((sentences, translations)):
            assert not set(own) & set(found["train"][side])
