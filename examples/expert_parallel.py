"""Train a sparse language model whose experts several processes share, and save it as one model.

    torchrun --standalone --nproc-per-node 2 examples/expert_parallel.py --out experts.safetensors

The text is made up: each token is the one before, plus one or two.
"""

from __future__ import annotations

import argparse
import os

import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl


def make_text(rows: int, length: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Int64 [rows, length], from 1 on: 0 is padding."""
    steps = torch.randint(1, 3, (rows, length), generator=generator)
    return steps.cumsum(dim=1) % (vocab_size - 1) + 1


def main() -> None:
    """Run on each process that torchrun starts."""
    parser = argparse.ArgumentParser(description="Expert parallelism in a plain script.")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", help="file to which the first process saves the whole model, as safetensors")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same model on each process
    model = kl.Decoder(32, 64, 4, 128, 4, recipe="sub_ln", moe=kl.MoE(experts=options.experts), device="meta")
    kl.shard_experts(model)
    model.materialize(device).train()
    torch.manual_seed(1 + rank)  # other noise on each
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1 + rank)
    for step in range(1, options.steps + 1):
        text = make_text(32 // size, 33, 32, generator).to(device)
        out = model(text[:, :-1])
        tokens = torch.tensor(text[:, 1:].numel(), device=device)
        dist.all_reduce(tokens)
        # A process's share of the loss of all: their sum is the loss that one process would have.
        loss = F.cross_entropy(out.logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum") / tokens + out.router_loss
        optimizer.zero_grad()
        loss.backward()
        kl.reduce_gradients(model)
        norm = kl.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if step % 10 == 0 or step == options.steps:
            whole = loss.detach()
            dist.all_reduce(whole)
            if rank == 0:
                print(f"step {step}: loss {whole:.3f}, gradient norm {norm.total:.3f}", flush=True)

    state = kl.full_state_dict(model)
    if rank == 0 and options.out:
        safetensors.torch.save_file(state, options.out)
        print(f"saved {sum(tensor.numel() for tensor in state.values()):,} weights of {options.experts} experts a layer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
