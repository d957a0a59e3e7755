"""A run's configuration: what each task needs, and what contradicts it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kilolayer import hints
from kilolayer.config import build, dump, merge
from kilolayer.errors import OptionError
from kilolayer.tasks.config import RunConfig
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.tasks.translation.config import TranslationConfig

TEXT: dict[str, Any] = {"task": "causal_lm", "text": {"train": "book.txt", "valid_share": 0.1, "length": 64}}
BYTES: dict[str, Any] = {**TEXT, "tokenizer": {"kind": "bytes"}}
SGD: dict[str, Any] = {"train": {"optimizer": "torch.optim:SGD"}}


def test_a_configuration_without_a_task_is_a_translators() -> None:
    config = build(RunConfig, {})
    assert (config.task, config.model.shape, config.train.label_smoothing) == ("translation", "encoder_decoder", 0.1)
    assert config.model == dataclasses.replace(TranslationConfig().model, vocab_size=config.tokenizer.size)
    assert config == dataclasses.replace(TranslationConfig(), model=config.model)


def test_two_vocabularies_have_two_tables_unless_the_configuration_says_otherwise() -> None:
    for tied, given in (("output", {}), (False, {"tie_embeddings": False}), (True, {"tie_embeddings": True})):
        assert build(RunConfig, {"tokenizer": {"shared": False}, "model": given}).model.tie_embeddings == tied
    assert build(RunConfig, {"tokenizer": {"shared": True}}).model.tie_embeddings is True


def test_a_language_model_has_defaults_of_its_own() -> None:
    pieces, of_bytes = build(RunConfig, TEXT), build(RunConfig, BYTES)
    for config in (pieces, of_bytes):
        assert (config.model.shape, config.model.pad_id, config.model.tie_embeddings) == ("decoder", None, False)
        assert config.train.label_smoothing == 0.0
    assert (pieces.model.vocab_size, pieces.tokenizer.normalization) == (8000, "identity")
    assert of_bytes.model.vocab_size == 260
    small = build(RunConfig, merge(TEXT, {"tokenizer": {"vocab_size": 500}}))
    assert small.model.vocab_size == 500
    typed = build(RunConfig, merge(BYTES, {"model": {"tie_embeddings": True}, "train": {"label_smoothing": 0.1}}))
    assert (typed.model.tie_embeddings, typed.train.label_smoothing) == (True, 0.1)
    byte_bpe = build(RunConfig, merge(TEXT, {"tokenizer": {"kind": "byte_bpe", "vocab_size": 500}}))
    assert (byte_bpe.model.vocab_size, build(RunConfig, byte_bpe.table())) == (500, byte_bpe)
    foreign = build(RunConfig, merge(TEXT, {"tokenizer": {"path": "some.model"}, "model": {"vocab_size": 99}}))
    assert foreign.model.vocab_size == 99


@pytest.mark.parametrize(
    "table",
    [TEXT, BYTES, {"data": {"directions": ["en-de"]}}, SGD, {"train": {"epochs": 2}}, {"train": {"warmup_share": 0.1}}],
)
def test_what_a_run_keeps_reads_back_and_names_no_foreign_tables(table: dict[str, Any]) -> None:
    config = build(RunConfig, table)
    kept = config.table()
    for same in (config, dataclasses.replace(config, train=config.train.in_steps(500))):
        assert build(RunConfig, same.table()) == same
    own, foreign = ({"text"}, {"data", "search"}) if config.task == "causal_lm" else ({"data", "search"}, {"text"})
    assert own <= kept.keys()
    assert not foreign & kept.keys()
    assert dump(kept).startswith(f'task = "{config.task}"\n')


CONTRADICTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (BYTES, {"model": {"shape": "encoder_decoder"}}, "cannot be trained in the shape 'encoder_decoder'", '"translation"'),
    (BYTES, {"model": {"pad_id": 0}}, "pad_id has no effect", "remove it"),
    (BYTES, {"model": {"vocab_size": 300}}, "vocab_size is 300, but the vocabulary has 260", "remove"),
    (TEXT, {"model": {"vocab_size": 300}}, "vocab_size is 300, but the vocabulary has 8000", "remove"),
    (BYTES, {"model": {"positions": "learned", "max_length": 32}}, "32 positions", "text.length"),
    (BYTES, {"data": {"directions": ["en-de"]}}, "data.directions has no effect on the task 'causal_lm'", '"translation"'),
    (BYTES, {"data": {"filters": {"max_tokens": 9}}}, "data.filters.max_tokens has no effect", '"translation"'),
    (BYTES, {"search": {"beam": 4}}, "search.beam has no effect", '"translation"'),
    (BYTES, {"batches": {"shapes": 3}}, "shapes has no effect", "remove it"),
    (BYTES, {"batches": {"tokens": 63}}, "63 tokens cannot hold a window of 64", "batches.tokens"),
    (TEXT, {"tokenizer": {"shared": False}}, "shared has no effect", "remove it"),
    (TEXT, {"tokenizer": {"byte_fallback": False}}, "give every text back", "byte_fallback"),
    (TEXT, {"tokenizer": {"normalization": "nfkc"}}, "give every text back", "normalization"),
    (BYTES, {"tokenizer": {"vocab_size": 300}}, "vocab_size has no effect on bytes", "remove it"),
    (BYTES, {"train": {"valid_bleu": True}}, "valid_bleu has no effect", "remove it"),
    (BYTES, {"train": {"patience": 2}, "text": {"valid_share": 0.0}}, "patience has no effect", "text.valid"),
    (BYTES, {"text": {"stride": 8}}, "stride has no effect without a test set", "test_share"),
    ({}, {"model": {"shape": "decoder"}}, "a translator cannot be trained", '"causal_lm"'),
    ({}, {"text": {"train": "book.txt"}}, "text.train has no effect on the task 'translation'", '"causal_lm"'),
    ({}, {"tokenizer": {"kind": "bytes"}}, "cannot use bytes", "unigram"),
    ({}, {"tokenizer": {"kind": "byte_bpe"}}, "a translator cannot use byte-level BPE", "unigram"),
    ({}, {"train": {"steps": 100_000, "epochs": 2}}, "epochs and steps are both given", "remove one"),
    ({}, {"train": {"warmup_steps": 0, "warmup_share": 0.3}}, "warmup_share and warmup_steps are both given", "remove one"),
    (SGD, {"train": {"beta1": 0.8}}, "beta1 has no effect on the optimizer 'torch.optim:SGD'", "remove it"),
    ({}, {"task": "causal_ml"}, "did you mean 'causal_lm'", "translation"),
    ({}, {"task": "causal_lm", "tokenizer": 5}, "tokenizer is 5", "table"),
]


@pytest.mark.parametrize(("base", "wrong", "what", "fix"), CONTRADICTIONS, ids=[what for _, _, what, _ in CONTRADICTIONS])
def test_contradictions_and_options_without_effect_are_told(
    base: dict[str, Any], wrong: dict[str, Any], what: str, fix: str
) -> None:
    with pytest.raises(OptionError) as caught:
        build(RunConfig, merge(base, wrong))
    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("steps", "every", "measured"),
    [
        (25, "auto", [1, 10, 20]),
        (1000, "auto", [1, *range(10, 1001, 10)]),
        (1234, "auto", [1, *range(13, 1235, 13)]),
        (100_000, "auto", [1, *range(1000, 100_001, 1000)]),
        (7, 3, [1, 3, 6]),
        (7, 0, []),
    ],
)
def test_layers_are_measured_a_hundred_times_unless_the_configuration_says_otherwise(
    steps: int, every: Any, measured: list[int]
) -> None:
    config = TrainConfig(steps=steps, layers_every=every)
    assert [step for step in range(1, steps + 1) if config.measures_layers(step)] == measured


@pytest.mark.parametrize(
    ("every", "fix"), [(-1, "at least 0"), ("often", "'auto', a whole number"), (2.5, "'auto', a whole number")]
)
def test_layers_every_is_a_count_or_auto(every: Any, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        TrainConfig(layers_every=every)
    assert f"layers_every is {every!r}" in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "tables",
    [
        {"task": "causal_lm", "text": {"train": ""}},
        {"task": "causal_lm", "text": {"train": "a.txt", "test": ["b.txt", ""]}},
        {"task": "causal_lm", "text": {"train": "a.txt"}, "tokenizer": {"path": ""}},
        {"task": "translation", "data": {"folder": "", "directions": ["en-de"]}},
        {"task": "classify", "examples": {"train": "", "label": "label", "first": "text"}},
        {"task": "classify_image", "images": {"train": ""}},
    ],
)
def test_an_empty_path_is_refused(tables: dict[str, Any]) -> None:
    """It would be the working folder, with every file below it."""
    with pytest.raises(OptionError, match=r"is empty\n.*\nname a file or a folder"):
        build(RunConfig, tables)


def test_a_warm_up_of_all_steps_leaves_none_for_the_decay() -> None:
    with pytest.raises(OptionError, match="warm-up of 20 steps leaves none of 10: shorten it"):
        TrainConfig(steps=10, warmup_steps=20, schedule="warmup_stable_decay", decay_steps=3)


def test_the_use_of_a_translator_of_several_directions_names_one() -> None:
    one, two = (build(RunConfig, {"data": {"directions": names}}) for names in (["en-de"], ["en-de", "de-en"]))
    assert one.usage.format("run") == 'translate run <<< "a sentence"'
    with hints.for_shell():
        assert two.usage.format("run") == 'translate run --direction en-de <<< "a sentence"'


def test_one_process_without_shards_keeps_no_option_of_shards() -> None:
    train = TrainConfig(shard="full", shard_unit=3, reshard_after_forward=False)
    assert train.unsharded() == TrainConfig()


@pytest.mark.parametrize("task", ["masked_image", "classify_image", "segment"])
def test_the_defaults_of_drawn_images_are_the_same_after_a_depth_was_given(task: str) -> None:
    before = build(RunConfig, {"task": task})
    deep = build(RunConfig, {"task": task, "model": {"encoder_layers": 7}})
    assert deep.model.depths.encoder == 7
    assert build(RunConfig, {"task": task}) == before
    assert build(RunConfig, {"task": task, "model": {"encoder_layers": 7}}) == deep
