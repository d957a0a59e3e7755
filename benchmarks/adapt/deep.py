"""Deep models from their own classes, with and without a recipe: a 100-layer BERT, a 100L-100L Marian, a 100-layer GPT-2.

python benchmarks/adapt/deep.py --out benchmarks/adapt/deep.json

Text: sentences of the embedded grammar, English for BERT and GPT-2, English to German for Marian; a token is a word. Each model is
trained twice for each seed at the same learning rate: as its class starts it, and after `kl.adapt`. A model is alive if it predicts
unseen sentences better than the frequencies of single words do; `margin` says by how much. BERT is scored at masked words.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import kilolayer as kl
from kilolayer.data import grammar

PAD, MASK, START, END = range(4)
LENGTH, WARMUP, MASKED = 20, 20, 0.25
MARGIN = 0.95  # of the loss of single words' frequencies: a model that is not below it has learned nothing from context
RECIPES = {"bert": "deepnorm", "marian": "deepnorm", "gpt2": "sub_ln"}


@dataclass(frozen=True)
class Texts:
    """Sentences as ids, [count, LENGTH] each, padded; and the words of both languages."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    words: int


def read_texts() -> Texts:
    """Sentences to train on and unseen ones, from the grammar."""
    seen, unseen = (list(grammar.pairs(count, seed=0, unseen=new)) for count, new in ((4000, False), (256, True)))
    known = sorted({word for pair in (*seen, *unseen) for side in pair[:2] for word in side.split()})
    ids = {word: number for number, word in enumerate(known, 4)}

    def rows(pairs: list[Any], side: int) -> Tensor:
        sentences = [[ids[word] for word in pair[side].split()][: LENGTH - 1] + [END] for pair in pairs]
        return torch.tensor([row + [PAD] * (LENGTH - len(row)) for row in sentences])

    return Texts((rows(seen, 0), rows(seen, 1)), (rows(unseen, 0), rows(unseen, 1)), len(ids) + 4)


def build(kind: str, layers: int, words: int, dim: int = 32) -> Any:
    """The model as its own class starts it, without dropout."""
    if kind == "bert":
        config: Any = transformers.BertConfig(
            vocab_size=words,
            hidden_size=dim,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * dim,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.BertForMaskedLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=words,
            n_embd=dim,
            n_layer=layers,
            n_head=2,
            n_inner=2 * dim,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=START,
            eos_token_id=END,
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.MarianConfig(
        vocab_size=words,
        d_model=dim,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=2 * dim,
        decoder_ffn_dim=2 * dim,
        max_position_embeddings=LENGTH,
        dropout=0.0,
        scale_embedding=True,
        init_std=dim**-0.5,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=END,
        use_cache=False,
    )
    return transformers.MarianMTModel(config)


def nll(kind: str, model: Any, english: Tensor, german: Tensor, generator: torch.Generator) -> Tensor:
    """Nats a predicted word."""
    if kind == "bert":
        hidden = (torch.rand(english.shape, generator=generator) < MASKED) & (english > END)
        logits = model(english.masked_fill(hidden, MASK), attention_mask=(english != PAD).long()).logits
        return F.cross_entropy(logits[hidden], english[hidden])
    target = german if kind == "marian" else english
    shifted = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], dim=1)
    if kind == "gpt2":
        logits = model(shifted).logits
    else:
        logits = model(english, attention_mask=(english != PAD).long(), decoder_input_ids=shifted).logits
    return F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD)


def frequencies_nll(kind: str, texts: Texts) -> float:
    """Nats a word by the frequencies of single words, of the training text on the unseen one."""
    side = 1 if kind == "marian" else 0
    low = END if kind == "bert" else PAD
    counts = Counter(texts.train[side][texts.train[side] > low].tolist())
    words = texts.valid[side][texts.valid[side] > low].tolist()
    total = sum(counts.values()) + texts.words
    return -sum(math.log((counts[word] + 1) / total) for word in words) / len(words)


def train(kind: str, adapted: bool, texts: Texts, layers: int, lr: float, steps: int, seed: int, batch: int) -> dict[str, Any]:
    """One run: its validation loss by step, and what it is beside the frequencies of single words."""
    torch.manual_seed(seed)
    model = build(kind, layers, texts.words)
    if adapted:
        kl.adapt(model, RECIPES[kind], seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.98))
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    valid, began = {}, time.perf_counter()
    for step in range(1, steps + 1):
        rows = torch.tensor(dice.sample(range(len(texts.train[0])), batch))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, step / WARMUP)
        loss = nll(kind, model, texts.train[0][rows], texts.train[1][rows], generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps:
            valid[step] = validate(kind, model, texts)
            if not math.isfinite(valid[step]):
                break
    reference, last = frequencies_nll(kind, texts), valid[max(valid)]
    return {
        "model": kind,
        "recipe": RECIPES[kind] if adapted else None,
        "layers": layers,
        "lr": lr,
        "seed": seed,
        "valid": valid,
        "frequencies": round(reference, 4),
        "margin": None if not math.isfinite(last) else round(reference - last, 4),
        "alive": math.isfinite(last) and last < MARGIN * reference,
        "seconds": round(time.perf_counter() - began, 1),
    }


@torch.no_grad()
def validate(kind: str, model: Any, texts: Texts) -> float:
    """Nats a word of the unseen sentences."""
    model.eval()
    loss = nll(kind, model, *texts.valid, torch.Generator().manual_seed(0)).item()
    model.train()
    return round(loss, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert,gpt2,marian")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--lr", type=float, nargs="*", help="one for each of --models")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--only", choices=("plain", "adapted"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, rows = read_texts(), []
    forms = {"plain": (False,), "adapted": (True,), None: (False, True)}[args.only]
    kinds = args.models.split(",")
    for kind, lr in zip(kinds, args.lr or [LEARNING_RATES[kind] for kind in kinds], strict=True):
        for seed in map(int, args.seeds.split(",")):
            for adapted in forms:
                rows.append(train(kind, adapted, texts, args.layers, lr, args.steps, seed, args.batch))
                print(json.dumps(rows[-1]), flush=True)
                if args.out:
                    args.out.write_text(json.dumps(document(rows), indent=1) + "\n")


LEARNING_RATES = {"bert": 1e-3, "gpt2": 1e-2, "marian": 1e-3}


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The results with what made them."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "command": f"python {shlex.join(sys.argv)}",
        "versions": {**versions, "kilolayer": kl.__version__},
        "hardware": f"CPU, {platform.machine()}, one thread",
        "runs": rows,
    }


if __name__ == "__main__":
    main()
