"""The task of translation: its loss, its data, its validation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.data.batches import BatchConfig
from kilolayer.data.corpora import DataConfig, ScoredPart
from kilolayer.data.grammar import pairs
from kilolayer.data.parallel import Direction
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import OptionError
from kilolayer.evaluate.scores import Bleu
from kilolayer.generate.config import SearchConfig
from kilolayer.runtime.runtime import PLAIN, Runtime
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.translation import task as translation
from kilolayer.tasks.translation.config import TranslationConfig, TranslationTrainConfig
from kilolayer.tasks.translation.task import TranslationTask

PARTS = {"train": slice(0, 120), "valid": slice(120, 143), "test": slice(143, 150)}
TOKENIZER = TokenizerConfig(vocab_size=90, byte_fallback=False, character_coverage=1.0)
BATCHES = BatchConfig(tokens=400, shapes=3)
GREEDY = SearchConfig(method="greedy", max_length_factor=1.0, max_length_extra=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    sentences = list(pairs(150, seed=1, unseen=False))
    for part, chosen in PARTS.items():
        for side, language in enumerate(("en", "de")):
            (folder / f"{part}.{language}").write_text(
                "".join(f"{pair[side]}\n" for pair in sentences[chosen]), encoding="utf-8"
            )
    return folder


def prepare(
    corpus: Path, cache: Path, tokenizer: TokenizerConfig = TOKENIZER, *, bleu: bool = False, **data: Any
) -> TranslationTask:
    options = {"directions": ["en-de"], "valid": "valid", "test": "test", **data}
    train = TranslationTrainConfig(valid_bleu=bleu)
    return of_data(DataConfig(folder=str(corpus), **options), cache, tokenizer=tokenizer, search=GREEDY, train=train)


def of_data(data: DataConfig, cache: Path, **tables: Any) -> TranslationTask:
    tables = {"batches": BATCHES, "tokenizer": TOKENIZER, **tables}
    return TranslationTask.prepare(TranslationConfig(data=data, **tables), cache)


def fitted(task: TranslationTask, **options: Any) -> kl.ModelConfig:
    return task.resolve(TranslationConfig(data=task.config.data, model=kl.ModelConfig(**options))).model


def model_for(task: TranslationTask, **options: Any) -> kl.EncoderDecoder:
    model = kl.build_model(fitted(task, **{"layers": 2, "dim": 16, "heads": 2, "ffn_dim": 32, **options}), seed=1)
    assert isinstance(model, kl.EncoderDecoder)
    return model


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("runtime", [PLAIN, FAST], ids=["plain", "fast"])
def test_the_loss_is_torchs_cross_entropy_summed_over_labels_that_are_not_padding(
    smoothing: float, dtype: torch.dtype, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kilolayer.speed.runtime.can_fuse_score_statistics", lambda device: True)
    logits = (3 * torch.randn(3, 7, 11)).to(dtype).requires_grad_()
    labels = torch.randint(1, 11, (3, 7))
    labels[0, 4:], labels[2, :] = 0, 0
    loss, nll = runtime.token_losses(logits, labels, smoothing)
    flat, options = logits.float().flatten(0, 1), {"ignore_index": 0, "reduction": "sum"}
    expected = F.cross_entropy(flat, labels.flatten(), label_smoothing=smoothing, **options)
    torch.testing.assert_close(loss.float(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(nll.float(), F.cross_entropy(flat, labels.flatten(), **options), rtol=1e-6, atol=1e-5)
    theirs, ours = (torch.autograd.grad(each, logits)[0] for each in (expected, loss))
    # The operators round once where autograd rounds twice.
    close = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours, theirs, **close)
    assert not ours[2].any()
    assert (loss.dtype, nll.dtype) == (torch.float32, torch.float32)


@pytest.mark.gpu
def test_the_loss_holds_nothing_of_the_size_of_the_logits() -> None:
    labels = torch.randint(1, 8192, (16, 256), device="cuda")

    def peak() -> float:
        """Beside the logits and in their size."""
        states = torch.randn(16, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        table = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        logits = F.linear(states, table)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        FAST.token_losses(logits, labels, 0.1)[0].backward()
        return (torch.cuda.max_memory_allocated() - before) / (2 * logits.numel())

    peak()
    assert peak() < 0.2


def test_the_configuration_gets_the_size_of_the_vocabulary(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache)
    assert fitted(task).vocab_size == task.tokenizers.target.vocab_size == 90
    two = prepare(corpus, cache, TokenizerConfig(vocab_size=70, byte_fallback=False, character_coverage=1.0, shared=False))
    with pytest.raises(OptionError, match="two vocabularies"):
        fitted(two)
    separate = fitted(two, tie_embeddings="output")
    assert (separate.source_vocab_size, separate.vocab_size) == (70, 70)
    found = two.validate(model_for(two, tie_embeddings="output"), 1000)
    assert found is not None
    assert math.isfinite(found.loss)


def one_by_one(
    model: kl.EncoderDecoder, task: TranslationTask, direction: Direction, sentences: slice, roll: int = 0
) -> tuple[float, int]:
    """The summed loss and the number of target tokens of the validation part, without batches or padding.

    roll: each sentence has the source of the one so many places before it.
    """
    total, count = 0.0, 0
    text = next(text for text in task.corpora.valid if text.direction == direction)
    tag = [task.tokenizers.source.tag_id(direction.target)] if task.tagged else []
    own = list(text.pairs())[sentences]
    with torch.no_grad():
        for source, target in [(own[index - roll][0], target) for index, (_, target) in enumerate(own)]:
            read = torch.tensor([[*tag, *task.tokenizers.source.encode([source])[0], 3]])
            labels = torch.tensor([[*task.tokenizers.target.encode([target])[0], 3]])
            begun = torch.cat([torch.tensor([[2]]), labels[:, :-1]], dim=1)
            logits = model(read, begun).logits
            total += float(F.cross_entropy(logits[0], labels[0], reduction="sum"))
            count += labels.numel()
    return total, count


def test_validation_is_the_mean_over_all_target_tokens(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache)
    model = model_for(task, dropout=0.5).train()
    random_state = torch.get_rng_state()
    task.training_batches(seed=1)
    # As many as there are: rows that fill up a batch are no sentences.
    found = task.validate(model, PARTS["valid"].stop - PARTS["valid"].start)
    assert found is not None
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    total, count = one_by_one(model.eval(), task, Direction("en", "de"), slice(None))
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found.bleu is None
    assert found.directions.keys() == {"en-de"}


def test_the_gain_of_the_source_is_the_rise_of_the_loss_with_the_source_of_another_sentence(corpus: Path, cache: Path) -> None:
    data = DataConfig(folder=str(corpus), directions=["en-de", "de-en"], valid="valid")
    task = of_data(data, cache, batches=BatchConfig(tokens=100_000, shapes=1))  # all sentences of a direction are one batch
    model = model_for(task, recipe="pre_ln").eval()
    found = task.validate(model, 1000)
    assert found is not None
    losses = {
        roll: [one_by_one(model, task, Direction(*names), slice(None), roll) for names in (("en", "de"), ("de", "en"))]
        for roll in (0, 23 // 2)
    }
    own, others = (sum(loss for loss, _ in sums) / sum(tokens for _, tokens in sums) for sums in losses.values())
    assert abs(others - own) > 1e-4
    assert found.source_gain == pytest.approx(others - own, abs=1e-5)
    assert found.metrics()["source_gain"] == found.source_gain


def test_a_model_that_does_not_read_its_source_gains_nothing_from_it(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache)
    model = model_for(task, recipe="pre_ln")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "cross_attention.f.output" in name:
                weight.zero_()
    found = task.validate(model, 1000)
    assert found is not None
    assert found.source_gain == 0.0
    alone = task.validate(model, 1)
    assert alone is not None
    assert alone.source_gain is None  # no other sentence


def test_validation_scores_translations_by_bleu(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache, bleu=True)
    model = model_for(task)
    found = task.validate(model, 5)
    assert found is not None
    lines = list(task.corpora.valid[0].pairs())[:5]
    answers = list(task.translate(model.eval(), [source for source, _ in lines], Direction("en", "de"), GREEDY))
    assert len(answers) == 5
    expected = Bleu().score([answer.text for answer in answers], [target for _, target in lines])
    assert found.bleu == pytest.approx(expected.value)


def test_no_validation_part_no_validation(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache, valid=None)
    assert task.validate(model_for(task), 100) is None


def test_two_directions_are_tagged_and_validated_each(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache, directions=["en-de", "de-en"], bleu=True)
    assert task.tagged
    model = model_for(task).eval()
    batches = task.training_batches(seed=1)
    tags = {task.tokenizers.source.tag_id("de"), task.tokenizers.source.tag_id("en")}
    assert len(tags) == 2
    firsts = torch.cat([next(batches).source[:, 0] for _ in range(len(batches))]).tolist()
    assert set(firsts) <= tags | {0}
    assert all(firsts.count(tag) == 120 for tag in tags)
    assert batches.mixture.report.kept == 240
    found = task.validate(model, 1000)
    assert found is not None
    sums = [one_by_one(model, task, Direction(*names), slice(None)) for names in (("en", "de"), ("de", "en"))]
    assert [found.directions[name].loss for name in ("en-de", "de-en")] == pytest.approx([t / n for t, n in sums], rel=1e-5)
    assert found.loss == pytest.approx(sum(t for t, _ in sums) / sum(n for _, n in sums), rel=1e-5)
    scores = [each.bleu for each in found.directions.values() if each.bleu is not None]
    assert found.bleu == pytest.approx(sum(scores) / 2)


def test_a_translation_begins_with_the_tag_of_its_language(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes: list[list[int]] = []
    monkeypatch.setattr(translation, "translate_lines", lambda *_, prefix: prefixes.append(prefix))
    both, one = prepare(corpus, cache, directions=["en-de", "de-en"]), prepare(corpus, cache)
    for task, names in ((both, ("en", "de")), (both, ("de", "en")), (one, ("en", "de"))):
        task.translate(model_for(task), [], Direction(*names), GREEDY)
    tags = both.tokenizers.source
    assert prefixes == [[tags.tag_id("de")], [tags.tag_id("en")], []]


def test_one_direction_has_no_tag(corpus: Path, cache: Path) -> None:
    task = prepare(corpus, cache)
    batch = next(task.training_batches(seed=1))
    assert not task.tagged
    assert task.tokenizers.source.languages == []
    assert int(batch.source[0, 0]) > 3


def test_several_corpora_of_one_direction_all_count(corpus: Path, cache: Path) -> None:
    manifest = corpus / "manifest.toml"
    parts = [("train", "train"), ("valid", "valid"), ("valid", "test"), ("test", "test"), ("test", "valid")]
    entries = "".join(f'[[{part}]]\nfiles = "{stem}"\n' for part, stem in parts)
    manifest.write_text(f'directions = ["en-de"]\n{entries}')
    task = of_data(DataConfig(manifest=str(manifest)), cache)
    assert len(task.corpora.test_of(ScoredPart(Direction("en", "de")))) == 7 + 23
    model = model_for(task)
    both = task.validate(model, 2000)
    single = [prepare(corpus, cache, valid=stem).validate(model, 2000) for stem in ("valid", "test")]
    assert both is not None
    weights = [sum(len(row) + 1 for row in task.tokenizers.target.encode(_german(corpus, stem))) for stem in ("valid", "test")]
    expected = sum(each.loss * weight for each, weight in zip(single, weights, strict=True) if each) / sum(weights)
    assert both.loss == pytest.approx(expected, rel=1e-5)


def test_a_limited_validation_takes_pairs_from_all_over_the_set(corpus: Path, cache: Path) -> None:
    whole = prepare(corpus, cache)
    model = model_for(whole)
    for part in ("en", "de"):
        lines = (corpus / f"valid.{part}").read_text(encoding="utf-8").splitlines(keepends=True)
        (corpus / f"some.{part}").write_text("".join(lines[place * len(lines) // 5] for place in range(5)), encoding="utf-8")
    limited = whole.validate(model, 5)
    alone = prepare(corpus, cache, valid="some").validate(model, 2000)
    assert limited is not None
    assert alone is not None
    assert limited.loss == pytest.approx(alone.loss, rel=1e-5)


def test_the_resolved_data_say_everything(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus.parent)
    data = DataConfig(folder=corpus.name, directions=["en-*", "*-en"], languages=["en", "de"], valid="valid", test="test")
    task = of_data(data, cache)
    resolved = task.resolve(task.config).data
    assert (resolved.folder, resolved.directions, resolved.languages) == (str(corpus.resolve()), ["en-de", "de-en"], [])


def _german(corpus: Path, stem: str) -> list[str]:
    return (corpus / f"{stem}.de").read_text(encoding="utf-8").splitlines()


def test_a_sentence_longer_than_the_models_positions_is_refused_before_training(corpus: Path, cache: Path) -> None:
    def batches(positions: int, **data: str) -> Any:
        model = kl.ModelConfig(positions="learned", max_length=positions, layers=1, dim=16, heads=2, ffn_dim=32)
        return of_data(DataConfig(folder=str(corpus), directions=["en-de"], **data), cache, model=model).training_batches(0)

    longest = max(max(shape.source, shape.target) for shape in batches(10_000).shapes)
    assert batches(longest).shapes == batches(10_000).shapes
    with pytest.raises(OptionError, match=rf"has {longest - 1} positions, but a training sentence has up to {longest} tokens"):
        batches(longest - 1)
    for language in ("en", "de"):
        (corpus / f"long.{language}").write_text("a b\n" + "a " * (longest + 10) + "\n")
    assert batches(2 * longest + 30, valid="long").shapes
    with pytest.raises(OptionError, match=rf"has {longest} positions, but a validation sentence has up to"):
        batches(longest, valid="long")


def test_patience_needs_a_validation_set_in_the_manifest_too(corpus: Path, cache: Path) -> None:
    manifest = corpus / "patient.toml"
    manifest.write_text('directions = ["en-de"]\n[[train]]\nfiles = "train"\n')
    config = TranslationConfig(data=DataConfig(manifest=str(manifest)), train=TranslationTrainConfig(patience=2))
    with pytest.raises(OptionError, match="patience has no effect without a validation set"):
        TranslationTask.prepare(config, cache)


def test_a_vocabulary_that_exists_is_stored_by_its_absolute_path(
    corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run's config.toml trains another run from any folder."""
    (tmp_path / "own.model").write_bytes(prepare(corpus, cache).tokenizers.source.model)
    monkeypatch.chdir(tmp_path)
    config = TranslationConfig(
        data=DataConfig(folder=str(corpus), directions=["en-de"]), tokenizer=TokenizerConfig(path="own.model")
    )
    resolved = TranslationTask.prepare(config, cache).resolve(config)
    assert resolved.tokenizer.path == str(tmp_path / "own.model")
