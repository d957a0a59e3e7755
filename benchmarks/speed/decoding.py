"""Compare decoding with Hugging Face's `generate` on the same folded weights, with the functions of benchmarks/decoding."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Generator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from jobs import Job
from torch import nn

import kilolayer as kl

BEAM = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 3  # with Hugging Face, which takes seconds
NEVER = 50.0  # below the other logits, which are about N(0, 1)


def decoding(job: Job, device: torch.device) -> Generator[dict[str, Any], None, None]:
    """One warm-up round, then timed rounds; ours and Hugging Face's alternate if the job has a peer.

    Every hypothesis has the full length: twice the source's.
    """
    setting = job.setting
    reference = _functions(
        VOCABULARY=setting.vocabulary,
        DIM=setting.dim,
        HEADS=setting.heads,
        FFN_DIM=setting.ffn_dim,
        LAYERS=setting.layers,
        MOST=2 * setting.length,
    )
    plain = _endless(job, reference.EOS)
    marian = reference.as_marian(plain).to(device, DTYPES[setting.precision]) if job.peer else None
    plain.to(device)
    if setting.precision == "bf16":
        plain.cast_weights(torch.bfloat16)
    fast = kl.fast(plain, compile=False)
    source = torch.randint(4, setting.vocabulary, (setting.rows, setting.length)).to(device)
    systems: dict[str, Callable[[], list[list[int]]]] = {"ours": lambda: reference.ours_on(fast, source, BEAM)}
    if marian is not None:
        systems["theirs"] = lambda: reference.theirs_on(marian, source, BEAM)
    outputs: dict[str, list[list[int]]] = {}
    first: dict[str, float] = {}
    for name, system in systems.items():
        start = time.perf_counter()
        outputs[name] = system()
        first[name] = time.perf_counter() - start
    yield {"first_s": first["ours"]}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS if job.peer else job.timed):
        for name, system in systems.items():
            start = time.perf_counter()
            system()
            seconds[name].append(time.perf_counter() - start)
    ours = median(seconds["ours"])
    facts: dict[str, Any] = {
        "ms": ours * 1e3,
        "all_ms": [round(each * 1e3, 3) for each in seconds["ours"]],
        "lengths": {name: sorted({len(row) for row in rows}) for name, rows in outputs.items()},
        "sentences": setting.rows,
        "sentences_per_s": setting.rows / ours,
    }
    if device.type == "cuda" and marian is None:
        facts["gigabytes"] = torch.cuda.max_memory_allocated() / 2**30
    if marian is not None:
        theirs = median(seconds["theirs"])
        facts["sentences_equal"] = sum(a == b for a, b in zip(outputs["ours"], outputs["theirs"], strict=True))
        facts |= {"hf_sentences_per_s": setting.rows / theirs, "times": theirs / ours}
    yield facts


def _functions(**sizes: int) -> ModuleType:
    """benchmarks/decoding/measure.py, with its constants replaced by `sizes`."""
    path = Path(__file__).parents[1] / "decoding" / "measure.py"
    spec = importlib.util.spec_from_file_location("decoding_measure", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(sizes)
    return module


def _endless(job: Job, end: int) -> kl.EncoderDecoder:
    """An untrained, folded model that never ends: the sum of a norm's output is that of its bias, so the end token scores
    -NEVER."""
    setting = job.setting
    torch.manual_seed(1)
    model = kl.EncoderDecoder(
        setting.vocabulary, setting.dim, setting.heads, setting.ffn_dim, setting.layers, setting.layers, setting.recipe
    )
    last = model.decoder.sublayers()[-1].out_norm
    assert isinstance(last, nn.LayerNorm)
    with torch.no_grad():
        last.bias.fill_(NEVER / setting.dim)
        model.embedding.weight[end] = -1.0
    plain = kl.fold(model.eval())
    assert isinstance(plain, kl.EncoderDecoder)
    return plain
