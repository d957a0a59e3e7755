"""Whatever is in a folder of Hugging Face or of `kl.save`: a model that can be used, or an error, soon, and no traceback."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

import kilolayer as kl
from kilolayer.errors import KilolayerError
from kilolayer.runs.hashed_file import PIECE
from kilolayer.runs.origins import open_origin
from kilolayer.training.trainer import Trainer
from tests.faults.odd_folders import ODD_TENSORS, WEIGHTS, edited_json, mutate
from tests.fixtures.foreign_folders import bert_folder, gpt2_folder, marian_folder, opt_folder

SECONDS = 30.0  # on a machine that does other things too
LINES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "a small text"] * 3
TEXT = "the lazy fox"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each class that can be imported, with every kind of vocabulary."""
    base = tmp_path_factory.mktemp("foreign")
    bert_folder(base / "bert", LINES)
    BertWordPieceTokenizer(str(base / "bert/vocab.txt")).save(str(base / "bert/tokenizer.json"))
    gpt2_folder(base / "gpt2", LINES)
    tokenizer = ByteLevelBPETokenizer(str(base / "gpt2/vocab.json"), str(base / "gpt2/merges.txt"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(base / "gpt2/tokenizer.json"))
    opt_folder(base / "opt", LINES)
    marian_folder(base / "marian", [LINES, LINES[::-1]])
    return {path.name: path for path in base.iterdir()}


def use(folder: Path) -> None:
    """Everything that a start from this folder reads."""
    origin = open_origin(folder)
    vocabulary: Any = origin.vocabulary()
    if folder.name.startswith("marian"):
        vocabulary.source.decode(vocabulary.source.encode([TEXT]))
    else:
        vocabulary.decode(vocabulary.encode(TEXT.encode()))
    weights = origin.weights(vocabulary, {})
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    kl.from_huggingface(folder)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["bert", "gpt2", "opt", "marian"])
@pytest.mark.parametrize("count", [12, pytest.param(250, marks=pytest.mark.slow)])
def test_a_mutated_folder_is_used_or_refused(kind: str, count: int, folders: dict[str, Path], tmp_path: Path) -> None:
    use(folders[kind])
    refused = 0
    for seed in range(count):
        folder = tmp_path / f"{kind}-{seed}"
        odd = mutate(folders[kind], folder, random.Random(f"{kind} {seed}"))
        start = time.monotonic()
        told = None
        try:
            use(folder)
        except KilolayerError as error:
            told = error
            refused += 1
        except BaseException as error:
            raise AssertionError(odd) from error
        assert told is None or (told.fix and len(str(told)) < 2000), odd
        assert time.monotonic() - start < SECONDS, odd
    assert refused > count // 4


@pytest.mark.matrix(3)
@pytest.mark.parametrize("odd", [name for name in ODD_TENSORS if name not in ("fp64", "bf16", "2-d")])
def test_a_tensor_of_another_rank_or_dtype_is_named(odd: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for kind, name in (("gpt2", "transformer.h.0.attn.c_attn.weight"), ("opt", "model.decoder.embed_positions.weight")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_bytes((folders[kind] / "config.json").read_bytes())
        tensors = safetensors.torch.load_file(folders[kind] / WEIGHTS)
        safetensors.torch.save_file({**tensors, name: ODD_TENSORS[odd](tensors[name]).clone()}, tmp_path / kind / WEIGHTS)
        with pytest.raises(KilolayerError, match=f"the tensor {name} "):
            kl.from_huggingface(tmp_path / kind)


def test_fp8_weights_are_refused_when_a_model_is_loaded(tmp_path: Path) -> None:
    folder = kl.save(kl.Decoder(layers=1, dim=8, heads=2, ffn_dim=16, vocab_size=9), tmp_path / "model")
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    safetensors.torch.save_file({name: tensor.to(torch.float8_e5m2) for name, tensor in tensors.items()}, folder / WEIGHTS)
    with pytest.raises(KilolayerError, match="of float8_e5m2, which is not supported"):
        kl.load_model(folder)


def sparse_weights(path: Path) -> None:
    """Replace a file by one that claims a tensor of two terabytes and takes no room on the disk."""
    size = 2 << 40
    entries = {f"{number}": {"dtype": "F32", "shape": [0], "data_offsets": [size, size]} for number in range(50)}
    text = json.dumps({**entries, "0": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text.encode())
        file.truncate(8 + len(text) + size)


def many_empty(path: Path) -> None:
    names = {f"{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(100_000)}
    text = json.dumps(names).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def replaced(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def edit_tokenizer(**parts: Any) -> Callable[[Path], None]:
    return lambda folder: edited_json(folder / "tokenizer.json", lambda table: table.update(parts))


def edit_model(**parts: Any) -> Callable[[Path], None]:
    return lambda folder: edited_json(folder / "tokenizer.json", lambda table: table["model"].update(parts))


def edit_config(**parts: Any) -> Callable[[Path], None]:
    return lambda folder: edited_json(folder / "config.json", lambda table: table.update(parts))


def varints_without_end(folder: Path) -> None:
    (folder / "source.spm").write_bytes(b"\xff" * (1 << 20))


HUGE = [
    ("marian", varints_without_end, "not a SentencePiece model"),
    ("bert", edit_tokenizer(normalizer=replaced("a" * 100_000)), "its normalizer is 'Replace'"),
    ("bert", edit_tokenizer(normalizer={"type": "Sequence", "normalizers": [replaced("aa")] * 40}), "normalizer is 'Replace'"),
    ("bert", edit_tokenizer(normalizer={"type": "Prepend", "prepend": "a" * 10_000_000}), "its normalizer is 'Prepend'"),
    ("bert", edit_tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "normalizer is 'Precompiled'"),
    ("bert", edit_tokenizer(pre_tokenizer=-1), "its pre_tokenizer is None"),
    ("bert", edit_tokenizer(added_tokens=[1]), "added_tokens are not a list of tables"),
    ("gpt2", edit_tokenizer(added_tokens=[1]), "added_tokens are not a list of tables"),
    ("bert", edit_model(continuing_subword_prefix="#" * 10_000_000), "its continuing_subword_prefix is"),
    ("bert", edit_model(max_input_chars_per_word=10**9), "its max_input_chars_per_word is 1000000000"),
    ("bert", edit_model(unk_token="none"), r"its unk_token is 'none', not \[UNK\]"),
    ("bert", edit_config(architectures=5), "the architecture is 5"),
    ("bert", edit_config(num_hidden_layers=10_000), "fewer than the 40,000 tensors"),
    ("gpt2", lambda folder: many_empty(folder / WEIGHTS), "more than the 1,1.. tensors"),
]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("kind", "damage", "what"), HUGE, ids=[f"{kind}: {what}" for kind, _, what in HUGE])
def test_what_is_huge_or_blows_up_is_refused_before_the_work(
    kind: str, damage: Callable[[Path], None], what: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    for path in folders[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    start = time.process_time()
    with pytest.raises(KilolayerError, match=what):
        use(tmp_path)
    assert time.process_time() - start < 2


@pytest.mark.slow
def test_a_saved_model_is_not_built_for_weights_of_a_smaller_one(tmp_path: Path) -> None:
    folder = kl.save(kl.Decoder(layers=1, dim=8, heads=2, ffn_dim=16, vocab_size=9), tmp_path / "model")
    text = (folder / "config.toml").read_text()
    for change in (("layers = 1", "layers = 10000"), ("[model]", "[model]\nmoe = {experts = 65536}")):
        (folder / "config.toml").write_text(text.replace(*change))
        start = time.process_time()
        with pytest.raises(KilolayerError, match=r"fewer than the 40,000 tensors|do not fit"):
            kl.load_model(folder)
        assert time.process_time() - start < 2
    (folder / "config.toml").write_text(text)
    start = time.process_time()
    sparse_weights(folder / WEIGHTS)
    with pytest.raises(KilolayerError, match=r"2\.0 TiB, more than the 1\.\d GiB"):
        kl.load_model(folder)
    (folder / "config.toml").write_text(text.replace("vocab_size = 9", "vocab_size = 16000000").replace("dim = 8", "dim = 512"))
    with pytest.raises(KilolayerError, match="the weights do not fit the configuration"):
        kl.load_model(folder)
    assert time.process_time() - start < 2
    (folder / "config.toml").write_text(text)
    many_empty(folder / WEIGHTS)
    with pytest.raises(KilolayerError, match="more than the 1,099 tensors"):
        kl.load_model(folder)


@pytest.mark.slow
def test_a_runs_model_is_not_built_for_weights_of_a_smaller_one(finished: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(finished("translation"), tmp_path / "run")
    text = (folder / "config.toml").read_text()
    for pattern, change in ((r"(?m)layers = \d+$", "layers = 10000"), (r"\[model\]", "[model]\nmoe = {experts = 65536}")):
        (folder / "config.toml").write_text(re.sub(pattern, change, text))
        start = time.process_time()
        with pytest.raises(KilolayerError, match=r"fewer than the [48]0,000 tensors|does not fit"):
            kl.load(folder).model  # noqa: B018
        assert time.process_time() - start < 5


def hide(folder: Path, edit: Callable[[str], str]) -> None:
    """Change the configuration of a run everywhere that it stands, with hashes that match."""
    path = folder / "config.toml"
    path.write_text(edit(path.read_text()))
    for step in (folder / "checkpoints").iterdir():
        edited_json(step / "state.json", lambda state: state.update(config=path.read_text()))
        renew_hashes(step, "state.json")


def renew_hashes(step: Path, name: str) -> None:
    data = (step / name).read_bytes()
    written = {"bytes": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}
    edited_json(step / "manifest.json", lambda manifest: manifest["files"].update({name: written}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "change"), [(r"(?m)layers = \d+$", "layers = 10000"), (r"\[model\]", "[model]\nmoe = {experts = 65536}")]
)
def test_a_run_is_not_resumed_with_weights_of_a_smaller_one(
    pattern: str, change: str, finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(finished("translation"), tmp_path / "run")
    hide(folder, lambda text: re.sub(pattern, change, text))
    monkeypatch.setattr(Trainer, "__init__", None)  # which builds the model
    start = time.process_time()
    with pytest.raises(KilolayerError, match=r"fewer than the [48]0,000 tensors|does not fit"):
        kl.train(resume=folder, train={"steps": 100})
    assert time.process_time() - start < 10


@pytest.mark.slow
def test_weights_that_claim_terabytes_are_not_hashed(finished: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(finished("translation"), tmp_path / "run")
    for step in (folder / "checkpoints").iterdir():
        sparse_weights(step / WEIGHTS)
        size = (step / WEIGHTS).stat().st_size
        written = {"bytes": size, "sha256": ["0" * 64] * -(-size // PIECE)}
        edited_json(step / "manifest.json", lambda manifest, written=written: manifest["files"].update({WEIGHTS: written}))
    start = time.process_time()
    with pytest.raises(KilolayerError, match="the run has no complete checkpoint"):
        kl.load(folder).model  # noqa: B018
    with pytest.raises(KilolayerError, match="the run has no complete checkpoint"):
        kl.diagnose(folder)
    assert time.process_time() - start < 5
