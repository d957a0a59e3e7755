"""Train deep models of other libraries with and without a recipe: a 100-layer BERT, a 100L-100L Marian, a 100-layer GPT-2.

python benchmarks/adapt/deep.py --out benchmarks/adapt/deep.json

The text is sentences of the built-in grammar, English for BERT and GPT-2, English to German for Marian; a token is a word. Each
model is trained twice per seed with the same learning rate and warm-up: as its class initializes it, and after `kl.adapt`. BERT
is scored on masked words. If a class has an output bias, it is initialized to the word frequencies.

A run is alive if its last loss on unseen sentences is below MARGIN times the loss of predicting word frequencies, and dead
otherwise, or if a loss is not finite, which ends the run. It uses context if that loss is also below that of predicting each
word's frequency at its position.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
LENGTH, MASKED, EVERY = 20, 0.25, 20
MARGIN = 0.95  # of the loss of predicting word frequencies
LEARNING_RATES = {"bert": 3e-3, "gpt2": 2e-2, "marian": 2e-3}
RECIPES = {"bert": "deepnorm", "marian": "deepnorm", "gpt2": "sub_ln"}
WIDTHS = {"bert": 768, "gpt2": 768, "marian": 1024}  # default widths, for which the default standard deviation of 0.02 is meant


@dataclass(frozen=True)
class Setting:
    """The settings of one run."""

    kind: str
    adapted: bool
    lr: float
    seed: int
    layers: int = 100
    steps: int = 200
    warmup: int = 30
    batch: int = 16
    dim: int = 32
    deviation: float | None = None
    """Standard deviation of the initial weights. None: the class's own at its default width, rescaled to `dim` so that
    products keep their size."""

    def std(self) -> float:
        """The standard deviation passed to the class."""
        return self.deviation or 0.02 * math.sqrt(WIDTHS[self.kind] / self.dim)

    def described(self) -> dict[str, Any]:
        """The settings as they are written to the results."""
        same = {name: getattr(self, name) for name in ("layers", "dim", "lr", "warmup", "steps", "batch", "seed")}
        recipe = RECIPES[self.kind] if self.adapted else None
        return {"model": self.kind, "recipe": recipe, **same, "deviation": round(self.std(), 4)}


@dataclass(frozen=True)
class Texts:
    """Sentences as ids, [count, LENGTH] each, padded; and the words of both languages."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    words: int


def read_texts() -> Texts:
    """Training and unseen sentences from the grammar."""
    seen, unseen = (list(grammar.pairs(count, seed=0, unseen=new)) for count, new in ((4000, False), (128, True)))
    known = sorted({word for pair in (*seen, *unseen) for side in pair[:2] for word in side.split()})
    ids = {word: number for number, word in enumerate(known, 4)}

    def rows(pairs: list[Any], side: int) -> Tensor:
        sentences = [[*(ids[word] for word in pair[side].split()[: LENGTH - 1]), END] for pair in pairs]
        return torch.tensor([[*row, *[PAD] * (LENGTH - len(row))] for row in sentences])

    return Texts((rows(seen, 0), rows(seen, 1)), (rows(unseen, 0), rows(unseen, 1)), len(ids) + 4)


def build(setting: Setting, words: int) -> Any:
    """The model as its own class initializes it, without dropout."""
    kind, layers, dim = setting.kind, setting.layers, setting.dim
    if kind == "bert":
        config: Any = transformers.BertConfig(
            vocab_size=words,
            hidden_size=dim,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=2 * dim,
            max_position_embeddings=LENGTH,
            initializer_range=setting.std(),
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
            initializer_range=setting.std(),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=START,
            eos_token_id=END,
            activation_function="gelu_pytorch_tanh",  # the same function as the default, as a single operation
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
        init_std=setting.std(),
        pad_token_id=PAD,
        decoder_start_token_id=START,
        eos_token_id=END,
        use_cache=False,
    )
    return transformers.MarianMTModel(config)


def nll(kind: str, model: Any, english: Tensor, german: Tensor, generator: torch.Generator) -> Tensor:
    """Nats per predicted word."""
    if kind == "bert":
        hidden = masked(english, generator)
        logits = model(english.masked_fill(hidden, MASK), attention_mask=(english != PAD).long()).logits
        return F.cross_entropy(logits[hidden], english[hidden])
    target = german if kind == "marian" else english
    shifted = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], dim=1)
    if kind == "gpt2":
        logits = model(shifted).logits
    else:
        logits = model(english, attention_mask=(english != PAD).long(), decoder_input_ids=shifted).logits
    return F.cross_entropy(logits.transpose(1, 2), target, ignore_index=PAD)


def masked(english: Tensor, generator: torch.Generator) -> Tensor:
    """Which words BERT has to predict."""
    return (torch.rand(english.shape, generator=generator) < MASKED) & (english > END)


def frequencies(kind: str, texts: Texts) -> Tensor:
    """The log of each word's frequency in the training text, among the words to predict, with add-one smoothing."""
    words = texts.train[1 if kind == "marian" else 0]
    counts = torch.bincount(words[words > first_word(kind)], minlength=texts.words) + 1.0
    return (counts / counts.sum()).log()


def frequencies_by_position(kind: str, texts: Texts) -> Tensor:
    """The same at each position, [LENGTH, words], smoothed by the overall frequencies with the weight of ten words."""
    words = texts.train[1 if kind == "marian" else 0]
    columns = [column[column > first_word(kind)] for column in words.unbind(1)]
    counts = torch.stack([torch.bincount(column, minlength=texts.words) for column in columns])
    counts = counts + 10 * frequencies(kind, texts).exp()
    return (counts / counts.sum(1, keepdim=True)).log()


def references(kind: str, texts: Texts) -> dict[str, float]:
    """Nats per scored word of the unseen sentences without context: from its frequency, and from its frequency by position."""
    words = texts.valid[1 if kind == "marian" else 0]
    scored = masked(words, torch.Generator().manual_seed(0)) if kind == "bert" else words != PAD
    single = frequencies(kind, texts)[words]
    by_position = frequencies_by_position(kind, texts).gather(1, words.T).T
    return {
        "frequencies": round(-single[scored].mean().item(), 4),
        "frequencies_by_position": round(-by_position[scored].mean().item(), 4),
    }


def first_word(kind: str) -> int:
    """The id before the first one that is predicted: masked words only, or every word and the end token."""
    return END if kind == "bert" else PAD


@torch.no_grad()
def start_output(kind: str, model: Any, texts: Texts) -> None:
    """Initialize the output bias, if the class has one, to the word frequencies, so that what is learned from then on is
    context."""
    bias = {"bert": "cls.predictions.bias", "marian": "final_logits_bias", "gpt2": None}[kind]
    if bias is not None:
        model.state_dict(keep_vars=True)[bias].copy_(frequencies(kind, texts))


def train(setting: Setting, texts: Texts) -> dict[str, Any]:
    """Train one model; returns its validation loss by step, and how it compares with predictions without context."""
    torch.manual_seed(setting.seed)
    kind, model = setting.kind, build(setting, texts.words)
    if setting.adapted:
        kl.adapt(model, RECIPES[kind], seed=setting.seed)
    start_output(kind, model, texts)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), fused=True)
    generator, dice = torch.Generator().manual_seed(setting.seed), random.Random(setting.seed)
    valid, began = {}, time.perf_counter()
    for step in range(1, setting.steps + 1):
        rows = torch.tensor(dice.sample(range(len(texts.train[0])), setting.batch))
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * min(1, step / setting.warmup)
        loss = nll(kind, model, texts.train[0][rows], texts.train[1][rows], generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0 or step == setting.steps:
            valid[step] = validate(kind, model, texts)
            print(f"{setting} step={step}: {valid[step]}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            if not math.isfinite(valid[step]):
                break
    without_context, last = references(kind, texts), valid[max(valid)]
    finite = math.isfinite(last)
    return {
        **setting.described(),
        "valid": valid if finite else {step: loss if math.isfinite(loss) else None for step, loss in valid.items()},
        **without_context,
        "margin": round(without_context["frequencies"] - last, 4) if finite else None,
        "alive": finite and last < MARGIN * without_context["frequencies"],
        "uses_context": finite and last < without_context["frequencies_by_position"],
    }


@torch.no_grad()
def validate(kind: str, model: Any, texts: Texts) -> float:
    """Nats per word of the unseen sentences."""
    model.eval()
    loss = nll(kind, model, *texts.valid, torch.Generator().manual_seed(0)).item()
    model.train()
    return round(loss, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert,gpt2,marian")
    parser.add_argument("--lr", type=float, nargs="*", help="one learning rate for each of --models")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--deviation", type=float, help="standard deviation of the class's initial weights [0.02, rescaled to this width]"
    )
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument("--out", type=Path, help="results file; runs that it already has are not repeated")
    args = parser.parse_args()
    texts, kinds = read_texts(), args.models.split(",")
    settings = [
        Setting(kind, adapted, lr, int(seed), layers=args.layers, steps=args.steps, deviation=args.deviation)
        for kind, lr in zip(kinds, args.lr or [LEARNING_RATES[kind] for kind in kinds], strict=True)
        for seed in args.seeds.split(",")
        for adapted in (False, True)
    ]
    earlier = json.loads(args.out.read_text())["runs"] if args.out and args.out.exists() else []
    rows = {
        place: row for place, setting in enumerate(settings) for row in earlier if setting.described().items() <= row.items()
    }
    with ProcessPoolExecutor(args.jobs, initializer=start_worker) as pool:
        under_way = {pool.submit(train, setting, texts): place for place, setting in enumerate(settings) if place not in rows}
        for done in as_completed(under_way):
            rows[under_way[done]] = done.result()
            print(json.dumps(done.result()), flush=True)
            if args.out:
                args.out.write_text(json.dumps(document([rows[place] for place in sorted(rows)], args.jobs), indent=1) + "\n")


def start_worker() -> None:
    """Use one thread, and torch's own matrix products: at this width oneDNN's call overhead exceeds the products' time."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)


def document(rows: list[dict[str, Any]], jobs: int) -> dict[str, Any]:
    """The results with their settings and environment."""
    processor = {"aarch64": "ARM", "x86_64": "x86-64"}.get(platform.machine(), platform.machine())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "command": f"python {shlex.join(sys.argv)}",
        "versions": {**versions, "kilolayer": kl.__version__},
        "hardware": f"{os.cpu_count()} cores of an {processor} processor, {jobs} runs side by side with one thread each",
        "runs": rows,
    }


if __name__ == "__main__":
    main()
