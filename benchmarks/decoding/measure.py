"""Compare our decoding speed on the CPU with Hugging Face's `generate`, on the same weights.

    python benchmarks/decoding/measure.py benchmarks/decoding/results.json

A DeepNorm 6L-6L model is trained briefly on a task with outputs of different lengths (a source repeats one number; the target
counts up from it in random steps to a last number) and folded into a plain Post-LN model, whose weights are copied into a
MarianMTModel. Both decode the same batches by the same rules, and the tokens must be equal. For this, Hugging Face is
configured with no padding or start token, no forced end, and `early_stopping=True`, which is fairseq's rule and ours. Rounds
alternate between the two. The fastest round of each is compared, as the one least disturbed by other work on the machine; the
medians are also recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel

import kilolayer as kl
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.layers.stack import Stack

PAD, BOS, EOS = 0, 2, 3
VOCABULARY, DIM, HEADS, FFN_DIM, LAYERS = 8000, 256, 4, 1024, 6
FIRST, LAST = 10, 49  # the tokens used for counting
MOST = 64  # maximum tokens per hypothesis


def sources(starts: Tensor, shortest: int, longest: int) -> Tensor:
    """Int64 [batch, longest + 1]: each start repeated, then the end token, padded on the right."""
    lengths = torch.randint(shortest, longest + 1, (len(starts), 1))
    positions = torch.arange(longest + 1)
    return starts[:, None].expand(-1, longest + 1).masked_fill(positions == lengths, EOS).masked_fill(positions > lengths, PAD)


def walks(starts: Tensor) -> Tensor:
    """Int64 [batch, length]: upwards from each start by 1, 2 or 3 to LAST, then the end token; padded on the right."""
    steps = torch.tensor([0.6, 0.3, 0.1]).multinomial(len(starts) * (LAST - FIRST), replacement=True) + 1
    numbers = torch.cat([starts[:, None], starts[:, None] + steps.view(len(starts), -1).cumsum(dim=1)], dim=1)
    ends = (numbers > LAST).long().cumsum(dim=1)
    return numbers.masked_fill(ends == 1, EOS).masked_fill(ends > 1, PAD)[:, : LAST - FIRST + 2]


def random_starts(count: int) -> Tensor:
    return torch.randint(FIRST, LAST + 1, (count,))


def train(model: kl.EncoderDecoder, steps: int) -> None:
    """Train for a few steps: enough to end sentences, not enough to be certain of every token."""
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, step / 50)
        starts = random_starts(32)
        labels = walks(starts)
        target = torch.cat([torch.full((len(starts), 1), BOS), labels[:, :-1].masked_fill(labels[:, :-1] == EOS, PAD)], dim=1)
        logits = model(sources(starts, 4, 12), target).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)
        # Only the first token needs the source; unless it has extra weight, the model learns to count before it reads.
        loss = loss + F.cross_entropy(logits[:, 0], labels[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)


def as_marian(plain: kl.EncoderDecoder) -> MarianMTModel:
    """A Hugging Face model with the weights of our plain Post-LN model."""
    config = MarianConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        d_model=DIM,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=FFN_DIM,
        decoder_ffn_dim=FFN_DIM,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue], every configuration of Transformers takes it
    )
    marian = MarianMTModel(config).eval()
    ours, theirs = dict(plain.named_parameters()), dict(marian.named_parameters())
    with torch.no_grad():
        theirs["model.shared.weight"].copy_(ours["embedding.weight"])
        for side in ("encoder", "decoder"):
            for index in range(LAYERS):
                copy_layer(ours, theirs, f"{side}.blocks.{index}", f"model.{side}.layers.{index}")
    stacks: list[tuple[Stack, Any]] = [(plain.encoder, marian.model.encoder), (plain.decoder, marian.model.decoder)]
    for stack, stack_hf in stacks:
        norm = stack.sublayers()[0].out_norm
        assert isinstance(norm, nn.LayerNorm)
        stack_hf.layers[0].self_attn_layer_norm.eps = norm.eps  # folding changes the eps of a stack's first norm
    return marian


def copy_layer(ours: dict[str, Any], theirs: dict[str, Any], block: str, layer: str) -> None:
    names = {
        "self_attention.f.query_key_value": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attention.f.output": ["self_attn.out_proj"],
        "self_attention.out_norm": ["self_attn_layer_norm"],
        "cross_attention.f.query": ["encoder_attn.q_proj"],
        "cross_attention.f.key_value": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
        "cross_attention.f.output": ["encoder_attn.out_proj"],
        "cross_attention.out_norm": ["encoder_attn_layer_norm"],
        "feedforward.f.input": ["fc1"],
        "feedforward.f.output": ["fc2"],
        "feedforward.out_norm": ["final_layer_norm"],
    }
    for name, parts in names.items():
        if f"{block}.{name}.weight" not in ours:
            continue
        for kind in ("weight", "bias"):
            pieces = ours[f"{block}.{name}.{kind}"].chunk(len(parts))
            for part, piece in zip(parts, pieces, strict=True):
                theirs[f"{layer}.{part}.{kind}"].copy_(piece)


def ours_on(model: kl.EncoderDecoder, source: Tensor, beam: int) -> list[list[int]]:
    options: dict[str, Any] = {"method": "greedy"} if beam == 1 else {"beam": beam, "length_penalty": 1.0}
    config = SearchConfig(**options, max_length_factor=0.0, max_length_extra=MOST)
    return [hypotheses[0].tokens for hypotheses in generate(model, source, config)]


def theirs_on(model: MarianMTModel, source: Tensor, beam: int) -> list[list[int]]:
    config = GenerationConfig(
        num_beams=beam,
        do_sample=False,
        max_new_tokens=MOST,
        max_length=None,
        length_penalty=1.0,
        early_stopping=beam > 1,
        bad_words_ids=[[PAD], [BOS]],
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    with torch.inference_mode():
        mask = (source != PAD).long()
        rows = model.generate(source, attention_mask=mask, generation_config=config)  # pyright: ignore[reportAttributeAccessIssue]
    return [_until_end(row[1:]) for row in rows.tolist()]


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens


def measure(ours: kl.EncoderDecoder, theirs: MarianMTModel, batch: int, beam: int, rounds: int) -> dict[str, Any]:
    """Time alternating rounds on the same sources, after one warm-up round."""
    source, fast = sources(random_starts(batch), 8, 40), kl.fast(ours, compile=False)
    systems: dict[str, Callable[[], list[list[int]]]] = {
        "ours": lambda: ours_on(fast, source, beam),
        "theirs": lambda: theirs_on(theirs, source, beam),
    }
    outputs = {name: system() for name, system in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, system in systems.items():
            start = time.perf_counter()
            system()
            seconds[name].append(time.perf_counter() - start)
    tokens = sum(len(row) + 1 for row in outputs["ours"])
    times = {name: min(each) for name, each in seconds.items()}
    return {
        "batch": batch,
        "beam": beam,
        "sentences_equal": sum(a == b for a, b in zip(outputs["ours"], outputs["theirs"], strict=True)),
        "tokens": tokens,
        "lengths": [min(map(len, outputs["ours"])) + 1, max(map(len, outputs["ours"])) + 1],
        "seconds": {name: round(each, 4) for name, each in times.items()},
        "median_seconds": {name: round(median(each), 4) for name, each in seconds.items()},
        "tokens_per_second": {name: round(tokens / each, 1) for name, each in times.items()},
        "times_faster": round(times["theirs"] / times["ours"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU decoding speed compared with Hugging Face.")
    parser.add_argument("results", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=150, help="training steps before the measurement")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = kl.EncoderDecoder(VOCABULARY, DIM, HEADS, FFN_DIM, LAYERS, LAYERS, kl.recipes.get("deepnorm"))
    train(model, options.steps)
    plain = kl.fold(model.eval())
    assert isinstance(plain, kl.EncoderDecoder)
    marian = as_marian(plain)
    rows = []
    for batch, beam in [(1, 1), (16, 1), (64, 1), (1, 5), (16, 5), (64, 5)]:
        rows.append(measure(plain, marian, batch, beam, options.rounds))
        print(rows[-1], flush=True)
    document = {
        "command": "python benchmarks/decoding/measure.py benchmarks/decoding/results.json",
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {options.threads} threads",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "kilolayer": kl.__version__,
        },
        "seed": 0,
        "training_steps": options.steps,
        "rounds": options.rounds,
        "model": {"vocab_size": VOCABULARY, "dim": DIM, "heads": HEADS, "ffn_dim": FFN_DIM, "layers": [LAYERS, LAYERS]},
        "rows": rows,
    }
    options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
