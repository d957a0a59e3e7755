"""Exported folders give in Transformers and CTranslate2 what the run gives here, from raw text to text."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from torch.nn.utils.rnn import pad_sequence
from transformers import pipeline

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.data.example_batches import encode_example
from kilolayer.data.grammar import pairs
from kilolayer.data.tokenizer import Tokenizers
from kilolayer.errors import InputError, OptionError
from kilolayer.files.reading import read_json
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.continuation import continue_texts
from kilolayer.generate.search import generate
from kilolayer.generate.translate import translate_lines
from kilolayer.runs.run import Run
from kilolayer.tasks.translation.task import SidedTokenizer
from kilolayer.training.loop import train
from tests.fixtures.small_runs import new_run, new_run_of, new_text_run, task_of

NEW = 12  # tokens that a language model writes
ODD = ["A dog  sees\ta cat. ", "</s> <pad> <s> <unk>", "caf\u00e9 \U0001f600 12,345", "<2de> \u65e5\u672c"]
TRANSLATORS: dict[str, dict[str, dict[str, Any]]] = {
    "deepnorm": {"model": {"recipe": {"name": "deepnorm"}}},
    "pre_ln": {
        "model": {"recipe": {"name": "pre_ln", "init": "xavier"}, "activation": "gelu"},
        "search": {"method": "beam", "beam": 3},
    },
    "two vocabularies": {
        "model": {"recipe": {"name": "admin"}, "tie_embeddings": False},
        "tokenizer": {"shared": False, "vocab_size": 70},
    },
    "several directions": {"model": {"recipe": {"name": "post_ln"}}, "data": {"directions": ["en-de", "de-en"]}},
    "sub_ln": {"model": {"recipe": {"name": "sub_ln"}, "kv_heads": 1}},
    "experts": {"model": {"recipe": {"name": "sub_ln"}, "positions": "rotary", "moe": {"experts": 4}}},
    "dlcl": {"model": {"recipe": {"name": "dlcl"}}},
}
WRITERS: dict[str, dict[str, dict[str, Any]]] = {
    "bytes, deepnorm": {"model": {"recipe": {"name": "deepnorm"}}},
    "unigram, pre_ln": {
        "model": {"recipe": {"name": "pre_ln"}, "tie_embeddings": True},
        "tokenizer": {"kind": "unigram", "vocab_size": 320},
    },
    "bpe, trained w": {
        "model": {"recipe": {"name": "admin", "weight": "trainable"}},
        "tokenizer": {"kind": "bpe", "vocab_size": 320},
    },
    "bytes, sub_ln": {"model": {"recipe": {"name": "sub_ln"}, "positions": "xpos"}},
    "byte_bpe, experts": {
        "model": {"recipe": {"name": "resi_dual"}, "moe": {"experts": 4}},
        "tokenizer": {"kind": "byte_bpe", "vocab_size": 290},
    },
    "byte_bpe, admin": {"model": {"recipe": {"name": "admin"}}, "tokenizer": {"kind": "byte_bpe", "vocab_size": 290}},
}
READERS: dict[str, dict[str, Any]] = {
    "masked_lm": {"recipe": "sub_ln", "moe": {"experts": 4}},
    "classify": {"recipe": "deepnorm", "positions": "t5"},
}
"""Encoders, by their task."""
CLASSES = {
    "pre_ln": "PegasusForConditionalGeneration",
    **dict.fromkeys(("sub_ln", "experts", "dlcl"), "KilolayerForSeq2SeqLM"),
    **dict.fromkeys(("bytes, sub_ln", "byte_bpe, experts"), "KilolayerForCausalLM"),
    "masked_lm": "KilolayerForMaskedLM",
    "classify": "KilolayerForSequenceClassification",
}
"""All others are MarianMTModel and OPTForCausalLM."""
SOME = {"deepnorm", "sub_ln", "bytes, deepnorm", "masked_lm"}
"""What `make test` loads by Transformers: two plain classes and two of Kilolayer's own; the others are slow."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Run]:
    """A run of one of the names above, after a few steps; each once."""
    runs: dict[str, Run] = {}
    place = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Run:
        if name not in runs:
            folder, sections = place / name.replace(" ", "_"), {"train": {"steps": 4}}
            if name in READERS:
                runs[name] = new_run_of(name, folder, corpus, **sections, model=READERS[name])
            elif name in TRANSLATORS:
                runs[name] = new_run(folder, corpus, **{**sections, **TRANSLATORS[name]})
            else:
                runs[name] = new_text_run(folder, corpus, **{**sections, **WRITERS[name]}, text={"length": 32})
            assert train(runs[name], task_of(runs[name])) == 0
        return runs[name]

    return make


def sentences(run: Run) -> list[str]:
    """Raw text, of which nothing is unknown to the vocabulary."""
    tags = [">>de<< ", ">>en<< "] if len(run.config.data.directions) > 1 else [""]
    return [f"{tag}{english}" for english, _ in pairs(2, seed=3, unseen=True) for tag in tags] + [f"{tags[0]} A  dog.\t"]


def plain_text(run: Run, text: str) -> tuple[list[int], str]:
    """The tag as a token, and the text without it."""
    if not text.startswith(">>"):
        return [], text
    tokenizer = Tokenizers.load(run.folder).source
    return [tokenizer.tag_id(text[2:4])], text[6:]


def ids_here(run: Run, text: str) -> list[int]:
    tag, text = plain_text(run, text)
    return [*tag, *Tokenizers.load(run.folder).source.encode([text])[0], 3]


def translate_here(run: Run, texts: list[str], search: SearchConfig) -> list[str]:
    tokenizer, model = SidedTokenizer(Tokenizers.load(run.folder)), run.load_reader(torch.device("cpu"))
    parts = [plain_text(run, text) for text in texts]
    found = [next(translate_lines(model, tokenizer, [text], search, prefix=tag)) for tag, text in parts]  # pyright: ignore
    return [each.text for each in found]


def searches(run: Run) -> dict[str, SearchConfig]:
    limits = {"max_length_factor": run.config.search.max_length_factor, "max_length_extra": run.config.search.max_length_extra}
    return {
        "greedy": SearchConfig(method="greedy", **limits),
        "beam": SearchConfig(method="beam", beam=5, length_penalty=1.0, **limits),
    }


def translation_task(run: Run, folder: Path) -> dict[str, Any]:
    texts = sentences(run)
    limits = [run.config.search.max_length(len(ids_here(run, text))) for text in texts]
    return {"do": "translate", "folder": str(folder), "texts": [*texts, *ODD[:2]], "limits": [*limits, 4, 4], "new": NEW}


def writing_task(run: Run, folder: Path) -> dict[str, Any]:
    tokens = torch.randint(4, run.config.model.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    texts = [*ODD, "a\n\nb \n", *(english for english, _ in pairs(8, seed=4, unseen=True))]
    prompts = [english[:9] for english, _ in pairs(3, seed=5, unseen=True)]
    return {
        "do": "write",
        "folder": str(folder),
        "texts": texts,
        "tokens": tokens.tolist(),
        "prompts": prompts,
        "new": NEW,
        "pipeline": run.config.tokenizer.kind == "byte_bpe",  # its import is slow
    }


def reading_task(run: Run, folder: Path) -> dict[str, Any]:
    texts = [english for english, _ in pairs(4, seed=6, unseen=True)]
    return {"do": "encode", "folder": str(folder), "texts": [*texts, *ODD[::2]], "task": run.config.task}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, trained: Callable[[str], Run]) -> Callable[[str], Any]:
    """The task of a name, what Transformers answers to it without Kilolayer, and the run; several names share a process."""
    place, known = tmp_path_factory.mktemp("exported"), {}

    def ask(name: str) -> Any:
        if name not in known:
            names = sorted(SOME) if name in SOME else [name]
            tasks = []
            for each in names:
                folder = kl.export(trained(each), to="huggingface", out=place / each).folder
                make = translation_task if each in TRANSLATORS else reading_task if each in READERS else writing_task
                tasks.append({**make(trained(each), folder), "trust": (folder / "modeling_kilolayer.py").exists()})
            environment = {**os.environ, "HF_MODULES_CACHE": str(place / "modules")}
            script = Path(__file__).with_name("outside.py")
            done = subprocess.run(
                [sys.executable, str(script)], input=json.dumps(tasks), text=True, capture_output=True, env=environment
            )
            assert done.returncode == 0, done.stderr[-3000:]
            answers = json.loads(done.stdout)
            known.update({each: (task, answer) for each, task, answer in zip(names, tasks, answers, strict=True)})
        return *known[name], trained(name)

    return ask


def some_are_slow(names: Any) -> list[Any]:
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some_are_slow(TRANSLATORS))
def test_transformers_translates_raw_text_as_the_run_does(name: str, outside: Callable[[str], Any]) -> None:
    task, answer, run = outside(name)
    assert answer["class"] == CLASSES.get(name, "MarianMTModel")
    assert answer["not_loaded"] == []
    assert answer["ids"] == [ids_here(run, text) for text in task["texts"]]
    count = len(sentences(run))
    source = pad_sequence([torch.tensor(ids) for ids in answer["ids"]], batch_first=True)
    for method, search in searches(run).items():
        limit = replace(search, max_length_factor=0.0, max_length_extra=NEW)
        found = [each[0].tokens for each in generate(run.load_reader(torch.device("cpu")), source, limit)]  # pyright: ignore
        assert [row[1 : row.index(3) if 3 in row else None] for row in answer[f"padded {method}"]] == found
        # MarianTokenizer strips what it decodes.
        assert answer[method][:count] == [text.strip() for text in translate_here(run, task["texts"][:count], search)]
    tag = ">>de<< " if name == "several directions" else ""
    (own,) = translate_here(run, [f"{tag}A sentence."], run.config.search)
    assert answer["card"] == f"{[own.strip()]}\n"


@pytest.mark.parametrize("name", some_are_slow(WRITERS))
def test_transformers_reads_and_writes_as_the_language_model_does(name: str, outside: Callable[[str], Any]) -> None:
    task, answer, run = outside(name)
    vocabulary, model = run.vocabulary(), run.load_model(torch.device("cpu"))
    assert answer["class"] == CLASSES.get(name, "OPTForCausalLM")
    assert answer["not_loaded"] == []
    assert answer["ids"] == [vocabulary.encode(text.encode()).tolist() for text in task["texts"]]
    assert answer["decoded"] == task["texts"]
    tokens = torch.tensor(task["tokens"])
    with torch.no_grad():
        expected = model(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(torch.tensor(answer["likelihoods"]), expected, rtol=0, atol=1e-5)
    prompts = [vocabulary.encode(prompt.encode()).tolist() for prompt in task["prompts"]]
    search = SearchConfig(method="greedy", max_length_factor=0, max_length_extra=NEW)
    found = [continue_texts(model, [prompt], search, context=run.config.text.length)[0][0] for prompt in prompts]
    assert answer["greedy"] == [vocabulary.decode(each.tokens) for each in found]


@pytest.mark.parametrize("name", some_are_slow(READERS))
def test_transformers_reads_as_the_encoder_does(name: str, outside: Callable[[str], Any]) -> None:
    task, answer, run = outside(name)
    assert answer["class"] == CLASSES[name]
    assert answer["not_loaded"] == []
    ids = [encode_example(text, None, run.vocabulary(), 10**6)[0].tolist() for text in task["texts"]]
    assert [[token for token in row if token != 0] for row in answer["ids"]] == ids
    for row, alone in zip(answer["logits"], ids, strict=True):
        with torch.no_grad():
            expected = run.load_model(torch.device("cpu"))(torch.tensor([alone])).logits[0]
        torch.testing.assert_close(torch.tensor(row)[: len(expected)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", some_are_slow(name for name in TRANSLATORS if not CLASSES.get(name, "").startswith("Kilo")))
def test_ctranslate2_translates_as_the_run_does(
    name: str,
    trained: Callable[[str], Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    import sentencepiece

    run = trained(name)
    folder = kl.export(run, to="ctranslate2", out=tmp_path / "out").folder
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    reader = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    second = folder / "tokenizer.target.model"
    writer = sentencepiece.SentencePieceProcessor(str(second)) if second.exists() else reader
    texts = sentences(run)
    for method, search in searches(run).items():
        answers = []
        for text in texts:
            tag, plain = plain_text(run, text)
            source = [*reader.id_to_piece(tag), *reader.encode(plain, out_type=str)]
            limit = search.max_length(len(source) + 1)
            found = translator.translate_batch([source], beam_size=search.width, max_decoding_length=limit)
            answers.append(writer.decode(found[0].hypotheses[0]))
        assert answers == translate_here(run, texts, search), method
    tag = ">>de<< " if name == "several directions" else ""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(folder.parent)
    exec(code, {})
    assert capsys.readouterr().out == f"{translate_here(run, [f'{tag}A sentence.'], run.config.search)[0]}\n"


def test_the_search_of_the_run_goes_along(trained: Callable[[str], Run], tmp_path: Path) -> None:
    beam = read_json(kl.export(trained("pre_ln"), to="huggingface", out=tmp_path / "a").folder / "generation_config.json")
    assert (beam["num_beams"], beam["length_penalty"], beam["early_stopping"]) == (3, 1.0, True)
    assert beam["bad_words_ids"] == [[0], [2]]
    assert (beam["eos_token_id"], beam["pad_token_id"], beam["decoder_start_token_id"]) == (3, 0, 2)
    greedy = read_json(kl.export(trained("deepnorm"), to="huggingface", out=tmp_path / "b").folder / "generation_config.json")
    assert (greedy["num_beams"], greedy["do_sample"]) == (1, False)


def test_a_language_model_samples_as_generate_does_in_a_pipeline_too(trained: Callable[[str], Run], tmp_path: Path) -> None:
    folder = kl.export(trained("bytes, deepnorm"), to="huggingface", out=tmp_path / "out").folder
    used: list[Any] = []

    def search(model: Any, ids: torch.Tensor, generation_config: Any, **_: Any) -> torch.Tensor:
        used.append(generation_config)
        return ids

    pipeline("text-generation", str(folder))("A dog", custom_generate=search)
    (config,) = used
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 1.0, 0, 1.0)
    assert config.max_length == trained("bytes, deepnorm").config.text.length


def test_the_command_says_which_class_and_why_and_leaves_a_card(
    trained: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = trained("deepnorm"), tmp_path / "out"
    run.score(task_of(run), torch.device("cpu"))
    assert main(["export", str(run.folder), "--to", "huggingface", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "MarianMTModel: the recipe is DeepNorm: it has a plain Post-LN form" in said
    text = (out / "README.md").read_text()
    assert "BLEU" in text
    assert "tok:13a" in text
    assert "AutoModelForSeq2SeqLM" in text
    assert not list(tmp_path.glob(".*"))
    assert main(["export", str(run.folder), "--to", "huggingface", "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", some_are_slow(["deepnorm", "sub_ln", "bytes, sub_ln", "masked_lm"]))
def test_the_hub_reads_the_card(name: str, trained: Callable[[str], Run], tmp_path: Path) -> None:
    folder = kl.export(trained(name), to="huggingface", out=tmp_path / "out").folder
    card = ModelCard((folder / "README.md").read_text())
    tags = {"deepnorm": "translation", "sub_ln": "translation", "masked_lm": "fill-mask"}
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", tags.get(name, "text-generation"))
    assert card.data.language == (["de", "en"] if name in TRANSLATORS else None)
    assert card.data.tags == ["kilolayer", trained(name).config.model.recipe.name]
    assert ("Loading needs `trust_remote_code=True`" in card.text) is (name in CLASSES)


def test_a_run_that_has_not_finished_says_so(
    trained: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained("pre_ln").folder, folder)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("steps = 4\n", "steps = 9\n"))
    assert main(["export", str(folder), "--to", "huggingface", "--out", str(tmp_path / "out"), "--json"]) == 0
    printed = capsys.readouterr()
    assert "is not finished" in printed.err
    assert json.loads(printed.out)["finished"] is False
    assert "is not finished" in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_as_text_and_an_object_with_a_folder_are_runs(trained: Callable[[str], Run], tmp_path: Path) -> None:
    folder = trained("deepnorm").folder
    kl.export(str(folder), to="huggingface", out=str(tmp_path / "a"))
    kl.export(SimpleNamespace(folder=folder), to="huggingface", out=tmp_path / "b")
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert a == b
    with pytest.raises(InputError, match="is not a run"):
        kl.export(5, to="huggingface", out=tmp_path / "c")
    with pytest.raises(OptionError, match="huggingface"):
        kl.export(folder, to="huggingfaec", out=tmp_path / "c")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"^unknown format 'onnx'\nto\nvalid: ctranslate2, huggingface$"):
        kl.export(folder, to="onnx", out=tmp_path / "c")  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="unknown format 'None'"):
        kl.export(folder, to=None, out=tmp_path / "c")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="the folder to write is None, not a path"):
        kl.export(folder, to="huggingface", out=None)  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "c").exists()


def test_what_ctranslate2_has_no_form_for_is_refused_with_the_reason(trained: Callable[[str], Run], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no translator"):
        kl.export(trained("bytes, deepnorm"), to="ctranslate2", out=tmp_path / "out")
