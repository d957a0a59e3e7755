"""Folders as `save_pretrained` of Transformers writes them: a small model, in fp32, with a tokenizer of its own beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from foreign_models import bert_config, gpt2_config, marian_config, opt_config, spread
from tokenizers import ByteLevelBPETokenizer
from transformers import BertForMaskedLM, GPT2LMHeadModel, MarianMTModel, OPTForCausalLM, PreTrainedModel

BYTES = 280  # pieces: 256 bytes and a few merges


def gpt2_folder(folder: Path, lines: Sequence[str], **options: Any) -> GPT2LMHeadModel:
    """The end of text stands among the first ids, as it does in none of ours."""
    size = _byte_pieces(folder, lines, ["<|endoftext|>"])
    return _saved(GPT2LMHeadModel(gpt2_config(size, bos_token_id=0, eos_token_id=0, **options)), folder)


def opt_folder(folder: Path, lines: Sequence[str]) -> OPTForCausalLM:
    size = _byte_pieces(folder, lines, ["<s>", "<pad>", "</s>", "<unk>"])
    return _saved(OPTForCausalLM(opt_config(size)), folder)


def _byte_pieces(folder: Path, lines: Sequence[str], special: list[str]) -> int:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=BYTES, special_tokens=special, show_progress=False)
    folder.mkdir(parents=True)
    tokenizer.save_model(str(folder))
    return tokenizer.get_vocab_size()


def bert_folder(folder: Path, lines: Sequence[str], model: type[PreTrainedModel] = BertForMaskedLM, **options: Any) -> Any:
    """Special tokens in an order of their own, with one that is not used, as BERT's."""
    letters = sorted({letter for line in lines for letter in line.lower() if not letter.isspace()})
    words = sorted({word for line in lines for word in line.lower().split() if word.isalpha()})[:30]
    pieces = ["[PAD]", "[unused0]", "[MASK]", "[UNK]", "[SEP]", "[CLS]", *letters, *(f"##{each}" for each in letters), *words]
    folder.mkdir(parents=True)
    pieces = list(dict.fromkeys(pieces))
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return _saved(model(bert_config(len(pieces), **options)), folder)


def marian_folder(folder: Path, sides: Sequence[Sequence[str]], **options: Any) -> MarianMTModel:
    """Two SentencePiece models of different pieces, and a vocabulary that numbers both in an order of its own."""
    folder.mkdir(parents=True)
    pieces: set[str] = set()
    for name, lines in zip(("source", "target"), sides, strict=True):
        with (folder / f"{name}.spm").open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines), model_writer=file, vocab_size=70, hard_vocab_limit=False, minloglevel=2
            )
        found = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        pieces |= {found.id_to_piece(token) for token in range(found.vocab_size())}
    rest = sorted(pieces - {"<unk>", "<s>", "</s>"}, key=lambda piece: piece[::-1])
    numbers = {piece: token for token, piece in enumerate(["</s>", "<unk>", *rest, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(numbers), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    return _saved(MarianMTModel(marian_config(len(numbers), **options)), folder)


def _saved(model: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = spread(model).float()
    model.save_pretrained(folder)
    return model
