"""What `kilolayer evaluate` adds to a finished run: further scores, averages, where the errors lie."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.tokenizers.tokenizer_spm import TokenizerSPM

from kilolayer.data.corpora import ScoredPart
from kilolayer.runs.run import Run
from tests.cli.typed_commands import quietly, refused

DIRECTIONS = ["en-de", "de-en", "en-up", "up-en"]


@pytest.fixture(scope="module")
def several(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four directions around English, whose translations are then made partly right by hand."""
    folder = tmp_path_factory.mktemp("runs") / "several"
    typed = ["--data.directions", json.dumps(DIRECTIONS), "--tokenizer.vocab_size", "120", "--train.steps", "1"]
    assert quietly("train", config, "--run", folder, *typed)[0] == 0
    (folder / "scores.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kilolayer.tasks.translation.task.TranslationTask.translate", _half_right)
        assert quietly("evaluate", folder)[0] == 0
    return folder


def _half_right(task: Any, model: object, lines: list[str], direction: Any, search: object) -> Any:
    """The references; every second one lacks its first words, none in the first direction, one in the second, and so on."""
    from kilolayer.generate.translate import Translation

    for index, (_, target) in enumerate(task.corpora.test_of(ScoredPart(direction))):
        drop = DIRECTIONS.index(direction.name) * (index % 2)
        yield Translation([" ".join(target.split()[drop:])], [0.0], cut=False)


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture(autouse=True)
def _nothing_is_translated(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("the run's translations are kept: nothing is to be translated")

    monkeypatch.setattr(Run, "load_model", forbidden)


def evaluated(*words: object) -> dict[str, Any]:
    code, out, err = quietly("evaluate", *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_averages_into_and_out_of_the_shared_language(several: Path) -> None:
    found = evaluated(several)
    value = {name: each["bleu"]["value"] for name, each in found["scores"].items()}
    assert value["test en-de"] == pytest.approx(100)
    assert len(set(value.values())) == 4
    assert found["averages"].keys() == {"xx-en", "en-xx"}
    assert found["averages"]["xx-en"]["bleu"] == pytest.approx((value["test de-en"] + value["test up-en"]) / 2)
    assert found["averages"]["en-xx"]["bleu"] == pytest.approx((value["test en-de"] + value["test en-up"]) / 2)
    assert json.loads((several / "scores.json").read_text())["averages"] == found["averages"]
    _, out, _ = quietly("evaluate", several)
    table = out.partition("word accuracy")[0]
    rows = {" ".join(line.split()[:2]): line.split() for line in table.splitlines()}
    assert rows["test up-en"][2] == f"{value['test up-en']:.2f}"
    assert rows["average xx-en"][2] == f"{found['averages']['xx-en']['bleu']:.2f}"
    assert rows["average xx-en"][3] == f"{found['averages']['xx-en']['chrf']:.2f}"
    assert out.count("nrefs:1") == 3  # a signature appears once, not once per direction


def test_spbleu_of_every_direction_from_the_kept_translations(several: Path, config: Path) -> None:
    model = several / "tokenizer.model"
    found = evaluated(several, "--spbleu", model)
    tokenizer = TokenizerSPM.__new__(TokenizerSPM)  # sacreBLEU's class would download its model
    tokenizer.sp = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for direction in DIRECTIONS:
        peer = BLEU()
        peer.tokenizer = tokenizer
        references = lines_of(config.parent / f"test.{direction.partition('-')[2]}")
        expected = peer.corpus_score(lines_of(several / f"test.{direction}.txt"), [references]).score
        assert found["scores"][f"test {direction}"]["spbleu"]["value"] == pytest.approx(expected)
    assert "|tok:spm-" in found["scores"]["test en-de"]["spbleu"]["signature"]
    assert found["averages"]["en-xx"].keys() == {"bleu", "chrf", "ter", "spbleu"}
    _, out, _ = quietly("evaluate", several, "--spbleu", model)
    assert out.count("spBLEU") == 2  # the column, and how it was computed


def test_tokenised_bleu_is_of_tokenised_text_alone(several: Path, config: Path, tmp_path: Path) -> None:
    lines = refused("evaluate", several, "--tokenised")
    assert ("not tokenised: 10 of 10" in lines[0], "en-de" in lines[1]) == (True, True)
    data, run = shutil.copytree(config.parent, tmp_path / "data"), shutil.copytree(several, tmp_path / "run")
    for path in [*data.glob("test.??"), *run.glob("test.*.txt")]:
        path.write_text("".join(f"{' '.join(pieces(line))}\n" for line in lines_of(path)), encoding="utf-8")
    settings, scores = run / "config.toml", json.loads((run / "scores.json").read_text())
    settings.write_text(settings.read_text().replace(str(config.parent), str(data)))
    (run / "scores.json").write_text(json.dumps({name: entry for name, entry in scores.items() if name != "held_out"}))
    found = evaluated(run, "--tokenised")
    for direction in DIRECTIONS:
        hypotheses, references = lines_of(run / f"test.{direction}.txt"), lines_of(data / f"test.{direction[-2:]}")
        score = found["scores"][f"test {direction}"]["tokenised_bleu"]
        assert score["value"] == pytest.approx(BLEU(tokenize="none", force=True).corpus_score(hypotheses, [references]).score)
        assert "|tok:none|" in score["signature"]
    assert "tokenised_bleu" in found["averages"]["xx-en"]


def test_a_file_that_is_no_sentencepiece_model_is_refused_in_three_lines(several: Path, config: Path) -> None:
    lines = refused("evaluate", several, "--spbleu", "absent.model")
    assert ("does not exist" in lines[0], "absent.model" in lines[1]) == (True, True)
    lines = refused("evaluate", several, "--spbleu", config)
    assert ("not a SentencePiece model" in lines[0], str(config) in lines[1]) == (True, True)


@pytest.mark.slow
def test_meteor_that_cannot_be_had_says_why(
    several: Path, trained: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilolayer.evaluate.scores.Meteor.missing", lambda self: "no WordNet here")
    found = evaluated(several, "--meteor")
    assert all(each["meteor"] == {"name": "METEOR", "reason": "no WordNet here"} for each in found["scores"].values())
    assert "meteor" not in found["averages"]["xx-en"]
    for run in (several, trained[0]):
        code, out, _ = quietly("evaluate", run, "--meteor")
        assert (code, out.count("not available: no WordNet here")) == (0, 1)
        assert any("BLEU" in line for line in out.splitlines())


def test_words_are_counted_by_their_frequency_in_training_for_every_direction(several: Path, config: Path) -> None:
    found = evaluated(several)
    for direction in DIRECTIONS:
        target = direction.partition("-")[2]
        texts = sum(each.endswith(f"-{target}") for each in DIRECTIONS)  # English is the target of two
        seen = Counter(word for line in lines_of(config.parent / f"train.{target}") for word in pieces(line))
        wanted, matched = Counter[bool](), Counter[bool]()
        for line, reference in zip(
            lines_of(several / f"test.{direction}.txt"), lines_of(config.parent / f"test.{target}"), strict=True
        ):
            for word in pieces(reference):
                wanted[seen[word] * texts >= 100] += 1
            for word in (Counter(pieces(line)) & Counter(pieces(reference))).elements():
                matched[seen[word] * texts >= 100] += 1
        buckets = found["frequency_buckets"][f"test {direction}"]
        for common in (False, True):
            few = [each for each in buckets if (each["low"] >= 100) == common]
            assert sum(each["reference"] for each in few) == wanted[common]
            assert sum(each["matched"] for each in few) == matched[common]
        assert sum(each["sentences"] for each in found["length_buckets"][f"test {direction}"]) == 10


def pieces(line: str) -> list[str]:
    """The words of the corpus's simple sentences: a full stop, comma or question mark stands alone."""
    return "".join(f" {letter} " if letter in ".,?!" else letter for letter in line).split()


def test_where_the_errors_lie_is_shown(several: Path, trained: tuple[Path, str, str]) -> None:
    _, out, _ = quietly("evaluate", trained[0])
    scores = json.loads((trained[0] / "scores.json").read_text())
    tables = out.partition("word accuracy")[2]
    for bucket in scores["frequency_buckets"]:
        f1 = "-" if bucket["f1"] is None else f"{bucket['f1']:.3f}"
        row = [bucket["label"], *(str(bucket[key]) for key in ("matched", "reference", "hypothesis")), f1]
        assert row in [line.split() for line in tables.splitlines()]
    found = evaluated(trained[0])
    assert found["frequency_buckets"] == scores["frequency_buckets"]
    assert found["length_buckets"] == scores["length_buckets"]
    assert "averages" not in found
    _, out, _ = quietly("evaluate", several)
    label, value = next((each["label"], each["bleu"]) for each in evaluated(several)["length_buckets"]["test up-en"])
    header, *rows = [line.split() for line in out.partition("BLEU by words")[2].splitlines()[1:6]]
    assert header[0] == label
    assert [row[:3] for row in rows if row[1] == "up-en"] == [["test", "up-en", "-" if value is None else f"{value:.1f}"]]


def test_the_report_of_many_directions(several: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(several, tmp_path / "run")
    assert quietly("report", folder)[0] == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "average xx-en" in page
    assert "Where the errors are" in page
    assert page.count('<th scope="row">test up-en</th>') == 3  # scores, words, sentences


@pytest.fixture(scope="module")
def two_sets(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two test sets, whose translations lack their first words."""
    folder = tmp_path_factory.mktemp("runs") / "sets"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kilolayer.tasks.translation.task.TranslationTask.translate", _without_first_words)
        typed = ["--data.test", '["valid", "test"]', "--train.steps", "1"]
        assert quietly("train", config, "--run", folder, *typed)[0] == 0
    return folder


def _without_first_words(task: Any, model: object, lines: list[str], direction: Any, search: object) -> Any:
    from kilolayer.generate.translate import Translation

    targets = {source: target for text in task.corpora.test for source, target in text.pairs()}
    for line in lines:
        yield Translation([" ".join(targets[line].split()[1:])], [0.0], cut=False)


def test_each_test_set_has_scores_and_translations_of_its_own(two_sets: Path) -> None:
    corpus = Path(Run.open(two_sets).config.table()["data"]["folder"])
    found = evaluated(two_sets)
    assert list(found["scores"]) == list(found["frequency_buckets"]) == ["test valid", "test test"]
    for name in ("valid", "test"):
        lines, references = lines_of(two_sets / f"test.{name}.en-de.txt"), lines_of(corpus / f"{name}.de")
        expected = BLEU()
        score = found["scores"][f"test {name}"]["bleu"]
        assert score["value"] == pytest.approx(expected.corpus_score(lines, [references]).score)
        assert 0 < score["value"] < 100
        assert score["signature"].startswith("nrefs:1|")
    _, out, _ = quietly("evaluate", two_sets)
    rows = {" ".join(line.split()[:2]): line.split() for line in out.partition("word accuracy")[0].splitlines()}
    assert rows["test valid"][2] == f"{found['scores']['test valid']['bleu']['value']:.2f}"
