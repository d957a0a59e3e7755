"""Deep models from their own classes, with and without a recipe: a 100-layer BERT, a 100L-100L Marian, a 100-layer GPT-2.

python benchmarks/adapt/deep.py --out benchmarks/adapt/deep.json

Text: sentences of the embedded grammar, English for BERT and GPT-2, English to German for Marian; a token is a word. Each model
is trained twice for each seed at the same learning rate: as its class starts it, and after `kl.adapt`. A model is alive if it
predicts unseen sentences better than the frequencies of single words do; `margin` says by how much. BERT is scored at masked
words. Where a class has a bias on its scores, it starts at those frequencies.
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
from concurrent.futures import ProcessPoolExecutor, as_completed
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
LENGTH, WARMUP, MASKED = 20, 10, 0.25
MARGIN = 0.95  # of the loss of single words' frequencies: a model that is not below it has learned nothing from context
LEARNING_RATES = {"bert": 3e-3, "gpt2": 1e-2, "marian": 2e-3}
RECIPES = {"bert": "deepnorm", "marian": "deepnorm", "gpt2": "sub_ln"}


@dataclass(frozen=True)
class Texts:
    """Sentences as ids, [count, LENGTH] each, padded; and the words of both languages."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    words: int


def read_texts() -> Texts:
    """Sentences to train on and unseen ones, from the grammar."""
    seen, unseen = (list(grammar.pairs(count, seed=0, unseen=new)) for count, new in ((4000, False), (128, True)))
    known = sorted({word for pair in (*seen, *unseen) for side in pair[:2] for word in side.split()})
    ids = {word: number for number, word in enumerate(known, 4)}

    def rows(pairs: list[Any], side: int) -> Tensor:
        sentences = [[*(ids[word] for word in pair[side].split()[: LENGTH - 1]), END] for pair in pairs]
        return torch.tensor([[*row, *[PAD] * (LENGTH - len(row))] for row in sentences])

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


def frequencies(kind: str, texts: Texts) -> Tensor:
    """The logarithm of each word's share in the training text, among what the model predicts; each counts once more."""
    words = texts.train[1 if kind == "marian" else 0]
    counts = torch.bincount(words[words > first_word(kind)], minlength=texts.words) + 1.0
    return (counts / counts.sum()).log()


def frequencies_nll(kind: str, texts: Texts) -> float:
    """Nats a word of the unseen sentences by the frequencies of single words."""
    words = texts.valid[1 if kind == "marian" else 0]
    return -frequencies(kind, texts)[words[words > first_word(kind)]].mean().item()


def first_word(kind: str) -> int:
    """What is predicted has a larger id: masked words, or every word and the end."""
    return END if kind == "bert" else PAD


@torch.no_grad()
def start_output(kind: str, model: Any, texts: Texts) -> None:
    """Start at the frequencies where the class has a bias on its scores: what is learned from then on is context."""
    bias = {"bert": "cls.predictions.bias", "marian": "final_logits_bias", "gpt2": None}[kind]
    if bias is not None:
        model.state_dict(keep_vars=True)[bias].copy_(frequencies(kind, texts))


def train(kind: str, adapted: bool, texts: Texts, layers: int, lr: float, steps: int, seed: int, batch: int) -> dict[str, Any]:
    """One run: its validation loss by step, and what it is beside the frequencies of single words."""
    torch.manual_seed(seed)
    model = build(kind, layers, texts.words)
    if adapted:
        kl.adapt(model, RECIPES[kind], seed=seed)
    start_output(kind, model, texts)
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
        if step % 30 == 0 or step == steps:
            valid[step] = validate(kind, model, texts)
            print(f"{kind} adapted={adapted} lr={lr:g} seed={seed} step={step}: {valid[step]}", file=sys.stderr, flush=True)
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
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts, kinds = read_texts(), args.models.split(",")
    settings = [
        (kind, adapted, texts, args.layers, lr, args.steps, int(seed), args.batch)
        for kind, lr in zip(kinds, args.lr or [LEARNING_RATES[kind] for kind in kinds], strict=True)
        for seed in args.seeds.split(",")
        for adapted in (False, True)
    ]
    rows: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        under_way = {pool.submit(train, *setting): place for place, setting in enumerate(settings)}
        for done in as_completed(under_way):
            rows[under_way[done]] = done.result()
            print(json.dumps(done.result()), flush=True)
            if args.out:
                args.out.write_text(json.dumps(document([rows[place] for place in sorted(rows)]), indent=1) + "\n")


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
