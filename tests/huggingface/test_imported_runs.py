"""Runs that started from a folder of Hugging Face leave for such a folder again: raw text gives the same there and here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.config import merge
from kilolayer.data.example_batches import encode_example, sentence_types
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.evaluate.predictions import probabilities
from kilolayer.files.reading import read_json
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.generate.fill import fill_texts, masked_tokens
from kilolayer.generate.translate import translate_lines
from kilolayer.runs.origins import open_origin
from kilolayer.runs.run import Run, cache_folder, in_steps, prepare
from kilolayer.runs.start import start_of, started_config, vocabulary_of
from kilolayer.tasks.translation.task import SidedTokenizer
from kilolayer.training.loop import train
from tests.fixtures.foreign_folders import bert_folder, gpt2_folder, marian_folder, opt_folder
from tests.fixtures.small_runs import SMALL

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

CPU = torch.device("cpu")
NEW = 6  # tokens that are written
# With small weights, and one table, an untrained translator writes one piece whatever it reads.
LARGE = {"init_std": 0.6}
STARTS: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "bert": ("masked_lm", bert_folder, {}),
    "classifier": ("classify", bert_folder, {}),
    "numbers": ("classify", bert_folder, {}),
    "gpt2": ("causal_lm", gpt2_folder, {}),
    "gpt2, untied": ("causal_lm", gpt2_folder, {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "opt": ("causal_lm", opt_folder, {}),
    "marian": ("translation", marian_folder, LARGE),
    "marian, silu": ("translation", marian_folder, {**LARGE, "activation_function": "swish", "scale_embedding": False}),
}
CLASSES = {
    "bert": "BertForMaskedLM",
    "classifier": "BertForSequenceClassification",
    "numbers": "BertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "gpt2, untied": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "marian": "MarianMTModel",
    "marian, silu": "MarianMTModel",
}
SLOW = ("gpt2, untied", "opt", "marian, silu")
OWN: dict[str, dict[str, Any]] = {
    "classifier": {"examples": {"second": "b"}},
    "numbers": {"examples": {"label": "score", "kind": "number"}},
    "gpt2": {"text": {"length": 40}},
    "gpt2, untied": {"text": {"length": 40}},
    "opt": {"text": {"length": 40}},
}
PAIRS = [("So good, we go!", "yes"), ("the sun [SEP] bad", "no dog sees the sea")]


def names(*wanted: str) -> list[Any]:
    found = [name for name in STARTS if name.partition(",")[0] in wanted]
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in found]


@dataclass(frozen=True)
class Exported:
    """A run of two steps, and the folder that it was exported to."""

    run: Run
    folder: Path

    @property
    def model(self) -> Any:
        return self.run.load_model(CPU)

    @property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def load(self, auto: Any, name: str) -> Any:
        found, info = auto.from_pretrained(self.folder, output_loading_info=True)
        assert type(found).__name__ == CLASSES[name]
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return found.eval()


@pytest.fixture(scope="module")
def exported(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Each start once."""
    known: dict[str, Exported] = {}

    @torch.enable_grad()
    def of(name: str) -> Exported:
        if name not in known:
            place = tmp_path_factory.mktemp("started")
            task, write, options = STARTS[name]
            english, german = ((corpus / f"train.{language}").read_text().splitlines() for language in ("en", "de"))
            write(place / "theirs", [english, german] if task == "translation" else english, **options)
            whole = {key: value for key, value in SMALL[task](corpus).items() if key not in ("model", "tokenizer")}
            own = {"train": {"start_from": str(place / "theirs"), "steps": 2, "warmup_steps": 1}}
            table = merge(merge(whole, own), OWN.get(name, {}))
            config = started_config(table)
            prepared = prepare(config, cache_folder(), vocabulary_of(start_of(config), config))
            run = Run.create(place / "run", in_steps(prepared.resolve(config), prepared), prepared.vocabulary)
            assert train(run, prepared) == 0
            assert main(["export", str(run.folder), "--to", "huggingface", "--out", str(place / "out")]) == 0
            known[name] = Exported(run, place / "out")
        return known[name]

    return of


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_bert_scores_masked_tokens_alike(exported: Callable[[str], Exported]) -> None:
    made = exported("bert")
    vocabulary: Any = made.run.vocabulary()
    theirs, tokenizer, texts = (
        made.load(AutoModelForMaskedLM, "bert"),
        made.tokenizer,
        ["A [MASK] sees.", "The small dog [MASK]"],
    )
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    ours = [masked_tokens(text.replace("[MASK]", "<mask>"), vocabulary, 48) for text in texts]
    real = batch["attention_mask"].bool()
    assert [row[own].tolist() for row, own in zip(batch["input_ids"], real, strict=True)] == ours
    assert_close(theirs(**batch).logits[real], made.model(batch["input_ids"], mask=real).logits[real])


@pytest.mark.slow
def test_masks_are_filled_alike(exported: Callable[[str], Exported]) -> None:
    made, text = exported("bert"), "A [MASK] sees."
    vocabulary: Any = made.run.vocabulary()
    ids = masked_tokens(text.replace("[MASK]", "<mask>"), vocabulary, 48)
    (wanted,) = fill_texts(made.model, [text], [ids], vocabulary, 5)
    found = pipeline("fill-mask", str(made.folder), top_k=vocabulary.vocab_size)(text)
    guesses = [(each["token"], each["score"]) for each in found if 3 < each["token"] < vocabulary.vocab_size][:5]
    assert [token for token, _ in guesses] == [guess.id for guess in wanted.masks[0]]
    assert [score for _, score in guesses] == pytest.approx([guess.probability for guess in wanted.masks[0]], rel=1e-4)


@torch.no_grad()
def test_bert_classifies_pairs_alike(exported: Callable[[str], Exported]) -> None:
    made = exported("classifier")
    vocabulary: Any = made.run.vocabulary()
    theirs, tokenizer = made.load(AutoModelForSequenceClassification, "classifier"), made.tokenizer
    batch = tokenizer(*map(list, zip(*PAIRS, strict=True)), return_tensors="pt", padding=True)
    ours = [torch.from_numpy(encode_example(*pair, vocabulary, 40)[0]) for pair in PAIRS]
    real = batch["attention_mask"].bool()
    assert [row[own].tolist() for row, own in zip(batch["input_ids"], real, strict=True)] == [row.tolist() for row in ours]
    expected = torch.cat([made.model(row[None], types=sentence_types(row[None])).logits for row in ours])
    assert_close(theirs(**batch).logits, expected)
    assert (expected - torch.cat([made.model(row[None]).logits for row in ours])).abs().max() > 1e-3


@pytest.mark.slow
@torch.no_grad()
def test_pairs_get_the_names_of_their_classes(exported: Callable[[str], Exported]) -> None:
    made = exported("classifier")
    config: Any = made.run.config
    vocabulary: Any = made.run.vocabulary()
    label = pipeline("text-classification", str(made.folder), top_k=None)
    found = {each["label"]: each["score"] for each in label({"text": PAIRS[0][0], "text_pair": PAIRS[0][1]})}
    row = torch.from_numpy(encode_example(*PAIRS[0], vocabulary, 40)[0])[None]
    shares = probabilities(made.model(row, types=sentence_types(row)).logits.numpy())[0]
    assert found == pytest.approx(dict(zip(config.examples.classes, shares, strict=True)), rel=1e-4)


@pytest.mark.slow
def test_a_pipeline_predicts_the_numbers_of_the_run(exported: Callable[[str], Exported]) -> None:
    made = exported("numbers")
    texts = ["so good we go", "so bad"]
    expected = [each.label for each in kl.load(made.run.folder).predict(texts)]
    found = pipeline("text-classification", str(made.folder))(texts)
    assert [each["score"] for each in found] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", names("gpt2", "opt"))
@torch.no_grad()
def test_language_models_have_the_same_scores_and_go_on_alike(name: str, exported: Callable[[str], Exported]) -> None:
    made = exported(name)
    vocabulary: Any = made.run.vocabulary()
    model, theirs, tokenizer = made.model, made.load(AutoModelForCausalLM, name), made.tokenizer
    first = model.config.first_predicted
    assert first == (0 if name == "opt" else 3)
    for text in ("A dog sees\n caf\u00e9 <|endoftext|> <pad>", "  12 \U0001f600"):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        own = torch.from_numpy(vocabulary.encode(text.encode()))[None]
        assert torch.equal(ids + first, own)
        assert tokenizer.decode(ids[0]) == text
        assert_close(theirs(ids).logits, model(own).logits[..., first:])
    prompts = ["The dog", "A small cat sees"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    written = theirs.generate(**batch, do_sample=False, max_length=None, max_new_tokens=NEW)[:, batch["input_ids"].shape[1] :]
    search = SearchConfig(method="greedy", max_length_factor=0, max_length_extra=NEW)
    found = continue_texts(model, [vocabulary.encode(each.encode()).tolist() for each in prompts], search, context=40)
    assert len({token for each in found for token in each[0].tokens}) > 1
    texts = [vocabulary.decode(each[0].tokens) for each in found]
    assert tokenizer.batch_decode(written, skip_special_tokens=True) == texts


def source_lines(corpus: Path) -> list[str]:
    """Among them a letter that the target's pieces alone have."""
    return [*(corpus / "test.en").read_text().splitlines()[:4], "The dog \u00fc sees.", "</s> A  <pad> cat"]


@pytest.mark.parametrize("name", names("marian"))
@torch.no_grad()
def test_marian_has_the_same_scores_and_writes_alike(name: str, exported: Callable[[str], Exported], corpus: Path) -> None:
    made, lines = exported(name), source_lines(corpus)
    model, theirs, tokenizer = made.model, made.load(AutoModelForSeq2SeqLM, name), made.tokenizer
    tokenizers = Tokenizers.load(made.run.folder)
    assert model.config.first_predicted == 1
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    real = batch["attention_mask"].bool()
    source = torch.where(real, batch["input_ids"] + 1, 0)
    own = [[*ids, 3] for ids in tokenizers.source.encode(lines)]
    assert [row[each].tolist() for row, each in zip(source, real, strict=True)] == own
    target = torch.randint(4, model.config.vocab_size, (len(lines), 7), generator=torch.Generator().manual_seed(0))
    target[:, 0] = 2
    assert_close(theirs(**batch, decoder_input_ids=target - 1).logits, model(source, target).logits[..., 1:])
    written = {}
    for method, options in {"greedy": {"num_beams": 1}, "beam": {"num_beams": 3, "early_stopping": True}}.items():
        search = SearchConfig(method=method, beam=3 if method == "beam" else None, max_length_factor=0, max_length_extra=NEW)  # type: ignore[arg-type]
        found = theirs.generate(**batch, max_new_tokens=NEW, **options)
        written[method] = [each.text for each in translate_lines(model, SidedTokenizer(tokenizers), lines, search)]
        assert len({*written[method]}) > 1
        assert tokenizer.batch_decode(found, skip_special_tokens=True) == [text.strip() for text in written[method]]


@pytest.mark.parametrize("name", names("marian"))
def test_marian_goes_to_ctranslate2_too(name: str, exported: Callable[[str], Exported], corpus: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    import sentencepiece

    made, lines = exported(name), source_lines(corpus)
    folder = kl.export(made.run, to="ctranslate2", out=tmp_path / "out").folder
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    reader, writer = (
        sentencepiece.SentencePieceProcessor(str(folder / each)) for each in ("tokenizer.model", "tokenizer.target.model")
    )
    answers = translator.translate_batch(
        [reader.encode(line, out_type=str) for line in lines], beam_size=1, max_decoding_length=NEW
    )
    search = SearchConfig(method="greedy", max_length_factor=0, max_length_extra=NEW)
    sides = SidedTokenizer(Tokenizers.load(made.run.folder))
    found = [each.text for each in translate_lines(made.model, sides, lines, search)]
    assert [writer.decode(answer.hypotheses[0]) for answer in answers] == found
    assert "tokenizer.target.model" in (folder / "README.md").read_text()


@pytest.mark.matrix(2)
@pytest.mark.parametrize("name", names("bert", "classifier", "gpt2", "opt", "marian"))
def test_a_run_that_starts_from_what_was_exported_has_the_same_weights_and_tokens(
    name: str, exported: Callable[[str], Exported]
) -> None:
    made = exported(name)
    origin = open_origin(made.folder)
    origin.check_task(made.run.registration)
    vocabulary: Any = origin.vocabulary()
    assert vocabulary.digest == made.run.vocabulary().digest
    own = made.model.state_dict()
    weights = origin.weights(vocabulary, own)
    assert weights.keys() == own.keys()
    assert all(torch.equal(weight, own[key]) for key, weight in weights.items())
    assert read_json(made.folder / "config.json")["architectures"] == [CLASSES[name]]
