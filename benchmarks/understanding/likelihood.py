"""Compare the speed of our likelihood scoring on two CPU cores with lm-eval's Hugging Face backend, on the same weights.

    pip install "kilolayer[eval]" transformers
    python benchmarks/understanding/likelihood.py hellaswag.val.jsonl.xz benchmarks/understanding/likelihood.json

The model is a GPT-2 with 6 layers, d 512, and random weights that are large enough for its answers to differ. It has 16,384
tokens, so that the output table has the same fraction of the work as in GPT-2 (12 layers, d 768, 50,257 tokens). Its weights
are copied into our model, and both score the same texts, HellaSwag's prompts with our examples, from text to likelihoods.
Rounds alternate. If other programs are running, CPU seconds are more reliable than wall-clock seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import kilolayer as kl
from kilolayer.data.vocabulary import TextVocabulary
from kilolayer.evaluate.choices import score_choices
from kilolayer.evaluate.shots import SETS
from kilolayer.evaluate.shots.examples import Examples, read_examples

LAYERS, DIM, HEADS, VOCABULARY, LENGTH = 6, 512, 8, 16_384, 1024
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


class Bytes:
    """The tokenizer, with the part of a vocabulary's interface that likelihood scoring uses."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, data: bytes) -> np.ndarray:
        return np.array(self.tokenizer.encode(data.decode()).ids, np.int64)


def trained_tokenizer(examples: Examples) -> Tokenizer:
    """Byte-level BPE, trained on the questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((question.solved for question in examples.asked.questions), trainer)
    return tokenizer


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        activation_function="gelu",
        bos_token_id=3,
        eos_token_id=3,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def ours_of(theirs: GPT2LMHeadModel) -> kl.Decoder:
    """A Kilolayer model with the same weights and function."""
    recipe = kl.recipes.get("pre_ln")
    options = {"activation": "gelu", "positions": "learned", "max_length": LENGTH, "pad_id": None, "tie_embeddings": True}
    ours = kl.Decoder(VOCABULARY, DIM, HEADS, 4 * DIM, LAYERS, recipe, **options, scale_embeddings=False)
    trunk: Any = theirs.transformer
    tensors = {"embedding.weight": trunk.wte.weight, "decoder.positions.at_input.weight": trunk.wpe.weight}
    tensors |= _of("decoder.top_norm", trunk.ln_f)
    for index, layer in enumerate(trunk.h):
        attention, feedforward = (f"decoder.blocks.{index}.{name}" for name in ("self_attention", "feedforward"))
        tensors |= _of(f"{attention}.pre_norm", layer.ln_1) | _of(f"{feedforward}.pre_norm", layer.ln_2)
        tensors |= _of(f"{attention}.f.query_key_value", layer.attn.c_attn) | _of(f"{attention}.f.output", layer.attn.c_proj)
        tensors |= _of(f"{feedforward}.f.input", layer.mlp.c_fc) | _of(f"{feedforward}.f.output", layer.mlp.c_proj)
    ours.load_state_dict({name: tensor.detach() for name, tensor in tensors.items()})
    return ours.eval()


def _of(name: str, module: Any) -> dict[str, Tensor]:
    """GPT-2 stores its matrices as [inputs, outputs]."""
    return {f"{name}.weight": module.weight.T if module.weight.dim() == 2 else module.weight, f"{name}.bias": module.bias}


def answers(values: list[float], pairs: list[tuple[str, str]]) -> list[int]:
    """The most likely of the four choices of each question, normalized by bytes."""
    sizes = [len(text.removeprefix(" ").encode()) for _, text in pairs]
    return (np.array(values) / np.array(sizes)).reshape(-1, 4).argmax(axis=1).tolist()


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The settings and environment that the numbers depend on."""
    return {
        "command": " ".join(["python benchmarks/understanding/likelihood.py", "hellaswag.val.jsonl.xz", *sys.argv[2:]]),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads",
        "versions": {
            **{package: version(package) for package in ("torch", "lm_eval", "transformers", "tokenizers")},
            "python": platform.python_version(),
            "kilolayer": kl.__version__,
        },
        "model": {"layers": LAYERS, "dim": DIM, "heads": HEADS, "vocab_size": VOCABULARY, "length": LENGTH},
        "batch_of_lm_eval": options.batch,
        "seed": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of likelihood scoring compared with lm-eval's Hugging Face backend.")
    parser.add_argument("questions", type=Path, help="hellaswag.val.jsonl, plain or compressed")
    parser.add_argument("results", type=Path)
    parser.add_argument("--shots", default="0,4")
    parser.add_argument("--counts", default="100,100", help="number of questions for each number of shots")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="batch size of lm-eval's backend")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    examples = read_examples(SETS["hellaswag"], options.questions.parent)
    tokenizer, theirs = trained_tokenizer(examples), gpt2()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[3], bos_token=SPECIAL[3], pad_token=SPECIAL[0])
    peer = HFLM(pretrained=theirs, tokenizer=fast, batch_size=options.batch, device="cpu", max_length=LENGTH)
    model, vocabulary = kl.fast(ours_of(theirs), compile=False), cast("TextVocabulary", Bytes(tokenizer))
    rows: list[dict[str, Any]] = []
    for shots, count in zip(*(map(int, each.split(",")) for each in (options.shots, options.counts)), strict=True):
        prompts = [examples.prompt(number, shots, seed=0) for number in range(count)]
        pairs = [pair for prompt in prompts for pair in zip(prompt.contexts, prompt.continuations, strict=True)]
        requests = [
            Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(pairs)
        ]
        systems: dict[str, Callable[[], list[float]]] = {
            "ours": lambda pairs=pairs: [each.log_likelihood for each in score_choices(model, vocabulary, pairs, LENGTH)],
            "lm-eval": lambda requests=requests: [value for value, _ in peer.loglikelihood(requests, disable_tqdm=True)],
        }
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        processor: dict[str, list[float]] = {name: [] for name in systems}
        values: dict[str, list[float]] = {}
        loads = []
        for _ in range(options.rounds):
            loads.append(os.getloadavg()[0])
            for name, score in systems.items():
                start, before = time.perf_counter(), time.process_time()
                values[name] = score()
                seconds[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - before)
            print(shots, {name: (round(seconds[name][-1], 2), round(processor[name][-1], 2)) for name in systems}, flush=True)
        found, expected = values["ours"], values["lm-eval"]
        theirs_first, ours_first = answers(expected, pairs), answers(found, pairs)
        rows.append(
            {
                "shots": shots,
                "questions": count,
                "tokens_by_lm_eval": sum(len(tokenizer.encode(context + text).ids) for context, text in pairs),
                "seconds": {name: [round(each, 2) for each in times] for name, times in seconds.items()},
                "processor_seconds": {name: [round(each, 2) for each in times] for name, times in processor.items()},
                "times_lm_eval_by_median": round(median(seconds["lm-eval"]) / median(seconds["ours"]), 2),
                "times_lm_eval_by_best": round(min(seconds["lm-eval"]) / min(seconds["ours"]), 2),
                "times_lm_eval_by_median_of_processor": round(median(processor["lm-eval"]) / median(processor["ours"]), 2),
                "largest_difference": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
                "log_likelihood_mean": float(np.mean(found)),
                "same_answers": sum(a == b for a, b in zip(ours_first, theirs_first, strict=True)),
                "load_before_each_round": [round(load, 2) for load in loads],
            }
        )
        print(rows[-1], flush=True)
        options.results.write_text(json.dumps({**about(options), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
