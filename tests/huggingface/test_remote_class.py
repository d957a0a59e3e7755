"""Runs that no class of Transformers computes, exported, loaded by the Auto classes, and used on raw text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

import kilolayer as kl
import kilolayer.huggingface.auto_classes
from kilolayer.data.example_batches import encode_example, sentence_types
from kilolayer.data.text import read_lines
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.data.vocabulary import load_vocabulary
from kilolayer.evaluate.predictions import probabilities
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.generate.fill import fill_texts, masked_tokens
from kilolayer.generate.search import generate
from kilolayer.huggingface.text_tokenizer import encoder_files
from kilolayer.runs.run import Run
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run_of, task_of

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

CPU = torch.device("cpu")
SHORT = {"train": {"steps": 2, "valid_every": 2, "save_every": 2}}
SUB_LN: dict[str, Any] = {"recipe": "sub_ln", "tie_embeddings": False}
SPARSE: dict[str, Any] = {**SUB_LN, "positions": "rotary", "moe": {"experts": 4}}
TEXTS = ["The dog sings.", "</s> <pad> <mask> <s>", "  two  spaces\n\tand a line", "日本語 \ufffd é", " ", "a"]


@pytest.fixture(scope="module")
def exported(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Run, Path]]:
    """A run of a task, trained for two steps, and the folder that it is exported to; each is made once."""
    made: dict[str, tuple[Run, Path]] = {}

    def of(task: str, model: dict[str, Any]) -> tuple[Run, Path]:
        key = json.dumps([task, model])
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            own = {} if task != "classify" else {"train": {"steps": 2}}
            run = new_run_of(task, folder / "run", corpus, **{**SHORT, **own}, model=model)
            assert train(run, task_of(run)) == 0
            made[key] = run, kl.export(run.folder, to="huggingface", out=folder / "out").folder
        return made[key]

    return of


def without_end(row: list[int]) -> list[int]:
    return row[: row.index(3)] if 3 in row else row


@pytest.mark.parametrize(
    "model", [SPARSE, pytest.param(SUB_LN, marks=pytest.mark.slow), pytest.param({"recipe": "dlcl"}, marks=pytest.mark.slow)]
)
def test_a_translator_writes_the_same_tokens_by_greedy_and_beam(
    model: dict[str, Any], exported: Callable[..., tuple[Run, Path]], corpus: Path
) -> None:
    run, folder = exported("translation", model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(loaded).__name__ == "KilolayerForSeq2SeqLM"
    before_code = (folder / "README.md").read_text().partition("```")[0]
    assert [line for line in before_code.splitlines() if "`trust_remote_code=True`" in line]
    lines = [*read_lines(corpus / "test.en")]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    ours = Tokenizers.load(run.folder)
    assert [row[row != 0].tolist() for row in batch["input_ids"]] == [[*ids, 3] for ids in ours.source.encode(lines)]
    reader: Any = run.load_reader(CPU)
    for method, options in (("greedy", {"num_beams": 1}), ("beam", {"num_beams": 5, "early_stopping": True})):
        search = SearchConfig(method=method, max_length_factor=0, max_length_extra=9)  # type: ignore[arg-type]
        wanted = [found[0].tokens for found in generate(reader, batch["input_ids"], search)]
        assert len({*map(tuple, wanted)}) > 1
        found = loaded.generate(**batch, max_new_tokens=9, **options)
        assert [without_end(row[1:]) for row in found.tolist()] == wanted
        # Transformers leaves out unknown tokens with the special ones; Kilolayer shows them.
        texts = ours.target.decode([[token for token in row if token != 1] for row in wanted])
        assert [text.strip() for text in tokenizer.batch_decode(found, skip_special_tokens=True)] == [*map(str.strip, texts)]


@pytest.mark.slow
def test_a_language_model_has_the_same_likelihoods_and_goes_on_alike(exported: Callable[..., tuple[Run, Path]]) -> None:
    run, folder = exported("causal_lm", SPARSE)
    tokenizer, loaded = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    reader: Any = run.load_reader(CPU)
    vocabulary = run.vocabulary()
    assert isinstance(vocabulary, kilolayer.data.vocabulary.ByteVocabulary)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == vocabulary.encode(TEXTS[0].encode()).tolist()
    theirs, own = (
        logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]) for logits in (loaded(ids).logits, reader(ids).logits)
    )
    assert float((theirs.sum() - own.sum()).detach().abs()) < 1e-5
    write = pipeline("text-generation", str(folder))
    prompts = ["The dog", "A"]
    found = write(prompts, max_new_tokens=6, max_length=None, do_sample=False, batch_size=2)
    search = SearchConfig(method="greedy", max_length_factor=0, max_length_extra=6)
    texts = [vocabulary.encode(prompt.encode()).tolist() for prompt in prompts]
    continued = continue_texts(reader, texts, search, context=16)
    wanted = [prompt + vocabulary.decode(each[0].tokens) for prompt, each in zip(prompts, continued, strict=True)]
    assert [each[0]["generated_text"] for each in found] == wanted
    # Without a prompt, a document begins: after the end of another.
    assert loaded.generate(max_new_tokens=3, do_sample=False)[0, 0] == 3


def test_masks_are_filled_with_the_same_tokens(exported: Callable[..., tuple[Run, Path]]) -> None:
    run, folder = exported("masked_lm", SPARSE)
    reader: Any = run.load_reader(CPU)
    text = "The <mask>og sings."
    vocabulary: Any = run.vocabulary()
    fill = pipeline("fill-mask", str(folder), top_k=vocabulary.vocab_size)
    (wanted,) = fill_texts(reader, [text], [masked_tokens(text, vocabulary, 48)], vocabulary, 20)
    found = [guess for guess in fill(text) if 3 < guess["token"] < vocabulary.vocab_size][:20]
    assert [guess["token"] for guess in found] == [guess.id for guess in wanted.masks[0]]
    assert [guess["score"] for guess in found] == pytest.approx([guess.probability for guess in wanted.masks[0]], rel=1e-4)
    assert found[0]["sequence"] == wanted.filled


@pytest.mark.slow
def test_texts_are_classified_alike(exported: Callable[..., tuple[Run, Path]]) -> None:
    run, folder = exported("classify", {"recipe": "sub_ln"})
    label = pipeline("text-classification", str(folder), top_k=None)
    config: Any = run.config
    reader: Any = run.load_reader(CPU)
    vocabulary: Any = run.vocabulary()
    for text in TEXTS[:3]:
        tokens, _ = encode_example(text, None, vocabulary, config.examples.length)
        shares = probabilities(reader(torch.from_numpy(tokens)[None]).logits.detach().numpy())[0]
        found = {each["label"]: each["score"] for each in label([text])[0]}
        assert found == pytest.approx(dict(zip(config.examples.classes, shares, strict=True)), rel=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    "bytes": {"kind": "bytes"},
    "unigram": {"kind": "unigram", "vocab_size": 380},
    "bpe": {"kind": "bpe", "vocab_size": 380},
    "byte_bpe": {"kind": "byte_bpe", "vocab_size": 300},
}
MASKED = ["The <mask> sings.", "The<mask>", "a  <mask> <mask>\n<mask>b", "<mask>"]


@pytest.mark.parametrize("kind", ["bytes", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])])
def test_the_tokenizer_gives_the_ids_of_kilolayer(kind: str, corpus: Path, tmp_path: Path) -> None:
    run = new_run_of("masked_lm", tmp_path / "masked", corpus, tokenizer=KINDS[kind])
    config: Any = run.config
    vocabulary = load_vocabulary(run.folder, config.tokenizer)
    for masked in (True, False):
        folder = tmp_path / str(masked)
        folder.mkdir()
        for name, content in encoder_files(vocabulary, 64, token_types=None, masked=masked).items():
            (folder / name).write_bytes(content)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == vocabulary.vocab_size + masked
        for text in MASKED if masked else []:
            assert tokenizer(text)["input_ids"] == masked_tokens(text, vocabulary, 10**6)
        for text in [text for text in TEXTS if not (masked and "<" in text)]:
            ids = tokenizer(text)["input_ids"]
            assert ids == encode_example(text, None, vocabulary, 10**6)[0].tolist()
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            pair, _ = encode_example(text, TEXTS[0], vocabulary, 12)
            cut = tokenizer(text, TEXTS[0], truncation=True, max_length=12, return_token_type_ids=True)
            assert cut["input_ids"] == pair.tolist()
            assert cut["token_type_ids"] == sentence_types(torch.from_numpy(pair)[None])[0].tolist()


def test_a_loaded_folder_is_saved_with_all_its_files(exported: Callable[..., tuple[Run, Path]], tmp_path: Path) -> None:
    _, folder = exported("masked_lm", SPARSE)
    fill, again = pipeline("fill-mask", str(folder)), tmp_path / "again"
    fill.model.save_pretrained(again)
    fill.tokenizer.save_pretrained(again)
    assert {path.name for path in folder.iterdir()} - {path.name for path in again.iterdir()} == {"README.md"}
    assert (again / "modeling_kilolayer.py").read_text() == (folder / "modeling_kilolayer.py").read_text()
    maps = [json.loads((place / "config.json").read_text())["auto_map"] for place in (folder, again)]
    assert maps[0] == maps[1]
