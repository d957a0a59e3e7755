"""Runs that start from a folder of Hugging Face: its tokens, its loss before the first step, and training from there on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import dump, merge
from kilolayer.data.masking import inputs_of
from kilolayer.data.word_pieces import WordPieceVocabulary, read_word_pieces
from kilolayer.errors import InputError, KilolayerError
from kilolayer.probe.diagnose import diagnose
from kilolayer.runs.origins import ForeignOrigin, open_origin
from kilolayer.runs.run import Run, cache_folder, in_steps, prepare
from kilolayer.runs.start import start_of, started_config, vocabulary_of
from kilolayer.training.trainer import Trainer
from tests.fixtures.foreign_folders import bert_folder, gpt2_folder, marian_folder, opt_folder
from tests.fixtures.small_runs import SMALL, last_checkpoint, stopped_and_resumed

TASKS = {"gpt2": "causal_lm", "opt": "causal_lm", "bert": "masked_lm", "classifier": "classify", "marian": "translation"}


@dataclass(frozen=True)
class Made:
    """A folder, the model in it, and a corpus to train on."""

    folder: Path
    model: Any
    corpus: Path


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("foreign")
    english, german = ((corpus / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
    models = {
        "gpt2": gpt2_folder(folder / "gpt2", english, n_positions=20),
        "opt": opt_folder(folder / "opt", english),
        "bert": bert_folder(folder / "bert", english),
        "marian": marian_folder(folder / "marian", [english, german]),
    }
    models["classifier"] = models["bert"]
    return {name: Made(folder / model.config.model_type, model, corpus) for name, model in models.items()}


def table_of(name: str, made: Made, **sections: Any) -> dict[str, Any]:
    """The configuration of a small run that starts there, and says nothing of model and vocabulary."""
    whole = SMALL[TASKS[name]](made.corpus)
    own = {key: value for key, value in whole.items() if key not in ("model", "tokenizer")}
    return merge(merge(own, {"train": {"start_from": str(made.folder)}}), sections)


def created(name: str, made: Made, folder: Path, **sections: Any) -> Run:
    """A run that starts there and has not begun."""
    config = started_config(table_of(name, made, **sections))
    task = prepare(config, cache_folder(), vocabulary_of(start_of(config), config))
    return Run.create(folder, in_steps(task.resolve(config), task), task.vocabulary)


def start_of_run(run: Run) -> tuple[Any, Any]:
    """Its task, and its model before the first step."""
    task = run.task(cache_folder())
    trainer = Trainer(run, task)
    trainer.begin(None)
    return task, trainer.model.eval()


def their_ids(made: Made) -> Tensor:
    """The id of theirs for each of ours; -1 where they have none."""
    origin = open_origin(made.folder)
    assert isinstance(origin, ForeignOrigin)
    return torch.tensor([-1 if row is None else row for row in origin.tokens.rows])


def their_loss(name: str, made: Made, parts: Any) -> Tensor:
    """The mean loss of a batch of ours by their own model, on their own ids."""
    model, rows = made.model, their_ids(made)
    if name == "marian":
        source, target, labels = parts
        real, read = labels != 0, rows[target].clamp(min=0)
        mask = (source != 0).long()
        logits = model(rows[source].clamp(min=0), attention_mask=mask, decoder_input_ids=read).logits
        return F.cross_entropy(logits[real], rows[labels][real])
    if name == "bert":
        return torch.stack(list(masked_losses(model, rows, parts))).mean()
    tokens, labels = parts
    return F.cross_entropy(model(rows[tokens]).logits.flatten(0, 1), rows[labels].flatten())


def masked_losses(model: Any, rows: Tensor, parts: Any) -> Iterator[Tensor]:
    """Of each hidden token, every document read by itself."""
    inputs, labels = inputs_of(parts)
    tokens = inputs["tokens"]
    segments = inputs.get("segments", inputs.get("mask", torch.ones_like(tokens)).long())
    for row, positions, own in zip(range(len(tokens)), inputs["positions"], labels, strict=True):
        for position, label in zip(positions[own != 0].tolist(), own[own != 0].tolist(), strict=True):
            document = (segments[row] == segments[row, position]).nonzero()[:, 0]
            logits = model(rows[tokens[row, document]][None]).logits[0, int((document == position).nonzero())]
            yield F.cross_entropy(logits, rows[label])


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "marian"])
def test_the_first_loss_is_that_of_the_imported_model(name: str, made: dict[str, Made], tmp_path: Path) -> None:
    task, model = start_of_run(created(name, made[name], tmp_path))
    parts = next(task.training_batches(1)).parts
    with torch.no_grad():
        found = task.loss(model, parts, hidden_states=False)
        expected = their_loss(name, made[name], parts)
    torch.testing.assert_close(found.nll / found.count, expected, rtol=2e-5, atol=2e-5)


def test_a_language_model_of_their_vocabulary_predicts_what_is_in_it_alone(made: dict[str, Made], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump(table_of("gpt2", made["gpt2"])))
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 0
    run = Run.open(tmp_path / "run")
    assert run.config.model.first_predicted == 3
    model = run.load_model(torch.device("cpu"))
    probabilities = model(torch.tensor([[5, 6, 7]])).logits.softmax(dim=-1)
    assert bool((probabilities[..., :3] == 0).all())
    assert last_checkpoint(run).step == 6


def test_a_classifier_takes_berts_body_pooler_and_types(made: dict[str, Made], tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    start = made["classifier"]
    folder = tmp_path / "with a pooler"
    theirs = bert_folder(
        folder,
        (start.corpus / "train.en").read_text().splitlines(),
        BertForSequenceClassification,
        num_labels=2,
    )
    pair = Made(folder, theirs, start.corpus)
    sections: dict[str, Any] = {"examples": {"second": "b"}}
    task, model = start_of_run(created("classifier", pair, tmp_path / "run", **sections))
    tokens, _ = next(task.training_batches(1)).parts
    rows = their_ids(pair)
    types = ((tokens == 3).cumsum(dim=1) > 0).long() - ((tokens == 3).cumsum(dim=1) == 1).long() * (tokens == 3).long()
    assert 0 < int(types.sum()) < types.numel()
    with torch.no_grad():
        found = task.loss(model, (tokens, torch.zeros(len(tokens)).long()), hidden_states=False).output.logits
        expected = theirs(rows[tokens], attention_mask=(tokens != 0).long(), token_type_ids=types).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_pooler_alone_begins_the_head_and_classes_are_learned_anew(made: dict[str, Made], tmp_path: Path) -> None:
    from transformers import BertModel

    lines = (made["bert"].corpus / "train.en").read_text().splitlines()
    theirs = bert_folder(tmp_path / "alone", lines, BertModel)
    _, model = start_of_run(created("classifier", Made(tmp_path / "alone", theirs, made["bert"].corpus), tmp_path / "run"))
    torch.testing.assert_close(model.head.dense.weight, theirs.pooler.dense.weight, rtol=0, atol=0)
    assert model.head.output.weight.shape == (2, 16)


def test_a_run_starts_from_a_model_that_was_saved(corpus: Path, tmp_path: Path) -> None:
    saved = kl.Decoder(260, 16, 2, 32, 2, "pre_ln")
    kl.save(saved, tmp_path / "saved")
    whole = Made(tmp_path / "saved", None, corpus)
    run = created("gpt2", whole, tmp_path / "run", tokenizer={"kind": "bytes"})
    _, model = start_of_run(run)
    assert run.config.model.recipe == saved.config.recipe
    assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in model.state_dict().items())
    with pytest.raises(KilolayerError, match="cannot start from a saved model of the shape 'decoder'"):
        created("bert", whole, tmp_path / "other", tokenizer={"kind": "bytes"})


def test_word_pieces_are_the_same_from_either_file_and_from_a_run(made: dict[str, Made], tmp_path: Path) -> None:
    from transformers import BertTokenizer

    theirs = BertTokenizer.from_pretrained(made["bert"].folder)
    theirs.save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    read = [WordPieceVocabulary.load(path) for path in (made["bert"].folder, tmp_path, tmp_path / "tokenizer.json")]
    (tmp_path / "run").mkdir()
    read[0].save(tmp_path / "run")
    read.append(WordPieceVocabulary.load(tmp_path / "run" / "tokenizer.json"))
    text = "The Dog [MASK] sees\na  cat."
    assert len({each.encode(text.encode()).tobytes() for each in read}) == 1
    assert read[0].digest == read[3].digest
    assert read[0].decode(read[0].encode(b"the dog sees")) == "the dog sees"
    assert read_word_pieces(tmp_path / "run" / "tokenizer.json").ids == list(range(read[0].vocab_size + 1))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    with pytest.raises(KilolayerError, match="not hold a WordPiece vocabulary"):
        WordPieceVocabulary.load(tmp_path)


def test_a_run_is_resumed_to_the_bit(made: dict[str, Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = (created("bert", made["bert"], tmp_path / name) for name in ("whole", "broken"))
    stopped_and_resumed(whole, broken, monkeypatch)


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_tokens_are_those_of_their_own_tokenizers(made: dict[str, Made]) -> None:
    from transformers import BertTokenizer, GPT2Tokenizer, MarianTokenizer

    text = "The small dog reads 3 books, unbelievably!"
    for name, kind in (("gpt2", GPT2Tokenizer), ("bert", BertTokenizer)):
        vocabulary: Any = open_origin(made[name].folder).vocabulary()
        ours = their_ids(made[name])[torch.from_numpy(vocabulary.encode(text.encode()))]
        assert ours.tolist() == kind.from_pretrained(made[name].folder)(text, add_special_tokens=False)["input_ids"]
    sides: Any = open_origin(made["marian"].folder).vocabulary()
    theirs = MarianTokenizer.from_pretrained(made["marian"].folder)
    rows = their_ids(made["marian"])
    for line in (made["marian"].corpus / "test.en").read_text().splitlines():
        assert rows[torch.tensor(sides.source.encode([line])[0])].tolist() == theirs(line)["input_ids"][:-1]
    for line in (made["marian"].corpus / "test.de").read_text().splitlines():
        ids = sides.target.encode([line])[0]
        assert rows[torch.tensor(ids)].tolist() == theirs(text_target=line)["input_ids"][:-1]
        assert sides.target.decode([ids]) == [line]


def test_plan_and_diagnosis_know_such_a_start(made: dict[str, Made], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump(table_of("gpt2", made["gpt2"])))
    assert main(["plan", str(path), "--json"]) == 0
    assert '"parameters"' in capsys.readouterr().out
    assert diagnose(path, steps=1).findings is not None


def test_a_model_whose_configuration_names_no_end_is_refused(made: dict[str, Made], tmp_path: Path) -> None:
    folder = shutil.copytree(made["gpt2"].folder, tmp_path / "model")
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**theirs, "eos_token_id": None}))
    with pytest.raises(InputError, match="a token None") as caught:
        open_origin(folder).vocabulary()
    assert "eos_token_id" in caught.value.fix


@pytest.mark.matrix(2)
@pytest.mark.parametrize(
    ("name", "sections", "what"),
    [
        ("gpt2", {"task": "masked_lm"}, "cannot start from a model of the type 'gpt2'"),
        ("gpt2", {"tokenizer": {"kind": "bytes"}}, "the vocabulary is not that of the model"),
        ("gpt2", {"model": {"dim": 32}}, "fit"),
        ("gpt2", {"text": {"length": 64}}, "the model has 20 positions"),
        ("marian", {"tokenizer": {"vocab_size": 50}}, "the vocabulary is not that of the model"),
    ],
)
def test_what_contradicts_the_start_is_refused(
    name: str, sections: dict[str, Any], what: str, made: dict[str, Made], tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump(table_of(name, made[name], **sections)))
    assert main(["train", str(path), "--run", str(tmp_path / "run")]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()
