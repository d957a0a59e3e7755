"""Time steps of a language model whose experts two processes share on the CPU, with its layers compiled and not.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/sparse/shared_experts.py OUT

Every second of 12 layers is sparse. All forms are of the same weights and take turns; a step is a forward and a backward pass.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import kilolayer as kl
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.fast_stack import FastStack

SHAPE: dict[str, Any] = {"vocab_size": 1000, "dim": 128, "heads": 4, "ffn_dim": 512, "layers": 12}
EXPERTS = kl.MoE(experts=8)
TOKENS = (4, 128)
ROUNDS, STEPS = 15, 2


def build() -> dict[str, Any]:
    torch.manual_seed(0)
    model = kl.Decoder(**SHAPE, moe=EXPERTS, recipe="sub_ln", dropout=0.1).train()
    kl.shard_experts(model)
    forms: dict[str, Any] = {"plain": model, "dense layers compiled": fast_form(model), "all layers compiled": fast_form(model)}
    for name in list(forms)[1:]:
        compile_layers(forms[name])
    for stack in forms["dense layers compiled"].modules():
        if isinstance(stack, FastStack):
            stack.compiled = {kind: run for kind, run in stack.compiled.items() if not kind[1]}
    return forms


def step(model: Any, tokens: torch.Tensor) -> None:
    out = model(tokens)
    (out.logits.logsumexp(-1).mean() + out.router_loss).backward()


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    forms = build()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(1, SHAPE["vocab_size"], TOKENS, generator=generator) for _ in range(STEPS)]
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(ROUNDS + 1):
        for name, model in forms.items():
            dist.barrier()
            start = time.perf_counter()
            for tokens in batches:
                step(model, tokens)
            dist.barrier()
            if turn:  # the first turn compiles
                seconds[name].append((time.perf_counter() - start) / STEPS)
    if dist.get_rank() == 0:
        times = {name: median(found) for name, found in seconds.items()}
        result = {
            "command": "OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/sparse/shared_experts.py OUT",
            "versions": {"torch": torch.__version__, "kilolayer": kl.__version__},
            "hardware": {"processor": platform.processor() or platform.machine(), "processes": dist.get_world_size()},
            "model": {**SHAPE, "experts": EXPERTS.experts, "every": EXPERTS.every, "tokens": TOKENS},
            "milliseconds of a step": {name: round(1000 * each, 1) for name, each in times.items()},
            "times the speed of plain layers": {name: round(times["plain"] / each, 2) for name, each in times.items()},
        }
        out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
