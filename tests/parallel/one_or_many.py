"""Models on several processes, each with a batch of its own, beside the whole model on all batches. Run on each process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.search import generate
from kilolayer.layers.routing import Routing
from kilolayer.moe.full_state import own_experts
from kilolayer.moe.layer import expert_parameters, sparse_layers
from kilolayer.moe.shard import expert_group
from kilolayer.parallel.collectives import exchange, gather, sum_gradients, sum_over
from kilolayer.parallel.peers import Peers
from kilolayer.speed.fast import compile_layers, fast_form
from kilolayer.speed.operators import kernels

AnyModel = kl.Encoder | kl.Decoder | kl.EncoderDecoder
TOLERANCE = {torch.float32: {"rtol": 1e-6, "atol": 1e-6}, torch.float64: {"rtol": 1e-10, "atol": 1e-12}}


@dataclass(frozen=True)
class Case:
    """A model, and how its tokens fall."""

    moe: kl.MoE
    shape: str = "decoder"
    recipe: str = "sub_ln"
    dtype: torch.dtype = torch.float64
    crowded: tuple[int, ...] = ()
    """Experts that all tokens are sent to; the others have none."""
    recompute: str | None = None
    """What the fast form recomputes; None: the plain model."""
    training: bool = True
    dropout: float = 0.0


def build(case: Case, device: str | None = None) -> AnyModel:
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 4, "vocab_size": 13, "moe": case.moe}
    sizes |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "drop_path"), case.dropout)
    config = kl.ModelConfig(shape=case.shape, recipe=kl.recipes.get(case.recipe), **sizes)  # pyright: ignore
    model = kl.build_model(config, device=device, dtype=case.dtype, seed=3).train(case.training)
    if case.recompute is not None:
        model = fast_form(model, case.recompute)  # pyright: ignore[reportArgumentType]
    for layer in sparse_layers(model).values() if case.crowded else ():
        assert layer.router.selection_bias is not None
        layer.router.selection_bias[list(case.crowded)] = 10.0
    return model


def batches(size: int, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Source and target of each process: other numbers of sentences, other lengths, padding on the right."""
    made, generator = [], torch.Generator().manual_seed(100 + step)
    for rank in range(size):
        rows, source, target = 2 + rank % 2, 5 + rank, 6 - rank % 3
        pair = tuple(torch.randint(1, 13, (rows, length), generator=generator) for length in (source, target))
        for tokens in pair:
            tokens[0, tokens.shape[1] - 1 - rank % 3 :] = 0
        made.append(pair)
    return made


def equally_long(made: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The batches with more padding. In fp32 attention over more positions is rounded differently, padding or not."""
    source, target = (max(part.shape[1] for part in parts) for parts in zip(*made, strict=True))
    return [(F.pad(a, (0, source - a.shape[1])), F.pad(b, (0, target - b.shape[1]))) for a, b in made]


def union(made: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """All batches as one."""
    padded = equally_long(made)
    return torch.cat([source for source, _ in padded]), torch.cat([target for _, target in padded])


def read(model: AnyModel, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Sequence[Routing]]:
    """Logits of real positions, the sum of the losses there, and what the routers did."""
    out = model(*batch) if isinstance(model, kl.EncoderDecoder) else model(batch[1])
    assert out.logits is not None
    assert out.routing is not None
    logits = out.logits[batch[1] != 0]
    return logits, logits.logsumexp(-1).square().sum(), out.router_loss, out.routing


def count(made: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(int((target != 0).sum()) for _, target in made)


def check_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype, what: str) -> None:
    if expected is None:
        assert found is None, what
        return
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype], msg=lambda message: f"{what}: {message}")


def check_equal_to_one_process(processes: dist.ProcessGroup, case: Case) -> None:
    """Outputs, losses, statistics and gradients."""
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    group = expert_group(shared)
    assert group is not None
    made = batches(group.size) if case.dtype == torch.float64 else equally_long(batches(group.size))
    # The noise of second experts is the same for all tokens, so that it does not matter where a token is.
    with patch("torch.rand_like", lambda like: torch.full_like(like, 0.6)):
        logits, losses, router_loss, routing = read(whole, union(made))
        (losses / count(made) + router_loss).backward()
        own_logits, own_losses, own_router_loss, own_routing = read(shared, made[group.rank])
        (own_losses / count(made) + own_router_loss).backward()
    kl.reduce_gradients(shared)

    starts = [count(made[:rank]) for rank in range(group.size + 1)]
    check_close(own_logits, logits[starts[group.rank] : starts[group.rank + 1]], case.dtype, "logits")
    check_close(sum_over(own_losses, group), losses.detach(), case.dtype, "losses")
    check_close(sum_over(own_router_loss, group), router_loss.detach(), case.dtype, "router_loss")
    for own_told, told in zip(own_routing, routing, strict=True):
        assert torch.equal(own_told.load, told.load)
        for name in ("tokens", "first", "entropy", "dropped", "temperature"):
            check_close(getattr(own_told, name), getattr(told, name), case.dtype, name)
        if case.crowded:
            assert int(told.load.sum()) == int(told.load[list(case.crowded)].sum()) > 0
    check_gradients(shared, whole, case.dtype)


def check_gradients(shared: AnyModel, whole: AnyModel, dtype: torch.dtype) -> None:
    group, of_experts = expert_group(shared), {name for name, _ in expert_parameters(whole)}
    assert group is not None
    for (name, found), (_, expected) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        assert expected.grad is not None
        gradient = own_experts(expected.grad, group) if name in of_experts else expected.grad
        check_close(found.grad, gradient, dtype, name)


def check_start(processes: dist.ProcessGroup, recipe: str) -> None:
    """A model of the meta device starts as the whole one, and holds its part of the experts alone."""
    case = Case(kl.MoE(experts=4, loss_free=1e-3), recipe=recipe, dtype=torch.float32)
    whole, shared, direct = build(case), build(case, "meta"), build(case)
    kl.shard_experts(shared, processes)
    kl.shard_experts(direct, processes)
    assert all(len(weight) == 4 // processes.size() for _, weight in expert_parameters(shared))
    shared.materialize("cpu")
    group, of_experts = expert_group(shared), {name for name, _ in expert_parameters(whole)}
    assert group is not None
    for name, value in whole.state_dict().items():
        expected = own_experts(value, group) if name in of_experts else value
        assert torch.equal(shared.state_dict()[name], expected), name
        assert torch.equal(direct.state_dict()[name], expected), name
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in direct.parameters())


def check_training(processes: dist.ProcessGroup, kind: Any) -> None:
    """Five steps of Adam with clipping and loss-free balancing, two batches per step."""
    case = Case(kl.MoE(experts=4, capacity=1.0, loss_free=0.01, balance=0.1, z_loss=0.01))
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    group = expert_group(shared)
    assert group is not None
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (whole, shared)]
    for step in range(5):
        both = [batches(group.size, 2 * step), batches(group.size, 2 * step + 1)]
        tokens = sum(map(count, both))
        loads = {model: [torch.zeros(4, dtype=torch.int64) for _ in sparse_layers(model)] for model in (whole, shared)}
        for made in both:
            for model, batch in ((whole, union(made)), (shared, made[group.rank])):
                _, losses, router_loss, routing = read(model, batch)
                (losses / tokens + router_loss / len(both)).backward()
                for total, told in zip(loads[model], routing, strict=True):
                    total += told.load
        kl.reduce_gradients(shared)
        norms = [kl.clip_grad_norm_(model, 0.1, kind) for model in (whole, shared)]
        assert float(norms[0].total) > 0.1
        for name in ("total", "dense", "expert"):
            check_close(getattr(norms[1], name), getattr(norms[0], name), case.dtype, name)
        check_gradients(shared, whole, case.dtype)
        for model, optimizer in zip((whole, shared), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            kl.update_balance(model, loads[model])
    of_experts = {name for name, _ in expert_parameters(whole)}
    for name, value in whole.state_dict().items():
        expected = own_experts(value, group) if name in of_experts else value
        torch.testing.assert_close(shared.state_dict()[name], expected, rtol=1e-7, atol=1e-9)


def check_clipping_in_fp32(processes: dist.ProcessGroup, kind: Any) -> None:
    """One norm on all processes, that of one process."""
    case = Case(kl.MoE(experts=4), dtype=torch.float32)
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    group = expert_group(shared)
    assert group is not None
    made = equally_long(batches(group.size))
    for model, batch in ((whole, union(made)), (shared, made[group.rank])):
        _, losses, router_loss, _ = read(model, batch)
        (losses / count(made) + router_loss).backward()
    kl.reduce_gradients(shared)
    expected, found = kl.clip_grad_norm_(whole, 1.0, kind), kl.clip_grad_norm_(shared, 1.0, kind)
    for name in ("total", "dense", "expert"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=0)
        everyones = gather(getattr(found, name), group)
        assert torch.equal(everyones, everyones[:1].expand_as(everyones))
    check_gradients(shared, whole, torch.float32)


def save_state(processes: dist.ProcessGroup, path: Path, experts: int) -> None:
    """The first process writes the whole."""
    shared = build(Case(kl.MoE(experts=experts, loss_free=1e-3), recipe="sub_ln", dtype=torch.float32))
    kl.shard_experts(shared, processes)
    with torch.no_grad():
        for parameter in shared.parameters():  # no longer at its start
            parameter.mul_(1.5)
    state = kl.full_state_dict(shared)
    if dist.get_rank(processes) == 0:
        safetensors.torch.save_file(state, path)
    else:
        assert state == {}


def load_state(processes: dist.ProcessGroup, path: Path, experts: int) -> None:
    """Each process takes its part, whatever the number that saved."""
    case = Case(kl.MoE(experts=experts, loss_free=1e-3), recipe="sub_ln", dtype=torch.float32)
    shared, whole = build(case, "meta"), build(case)
    kl.shard_experts(shared, processes)
    shared.materialize("cpu")
    kl.load_full_state_dict(shared, safetensors.torch.load_file(path))
    group, of_experts = expert_group(shared), {name for name, _ in expert_parameters(whole)}
    assert group is not None
    for name, value in whole.named_parameters():
        expected = 1.5 * (own_experts(value, group) if name in of_experts else value)
        assert torch.equal(shared.state_dict()[name], expected), name


def load_other_state(processes: dist.ProcessGroup, path: Path) -> None:
    """What does not fit is refused by name; path: the state of 8 experts."""
    with pytest.raises(InputError, match=r"has shape \[8, .*\] in the state and \[16, "):
        kl.load_full_state_dict(_sharded(kl.MoE(experts=16, router_dim=4), processes), _without_bias(path))
    with pytest.raises(InputError, match=r"'decoder.* is in only one of them"):
        kl.load_full_state_dict(build(Case(kl.MoE(experts=8), "encoder")), safetensors.torch.load_file(path))


def _sharded(moe: kl.MoE, processes: dist.ProcessGroup) -> AnyModel:
    model = build(Case(moe, dtype=torch.float32))
    kl.shard_experts(model, processes)
    return model


def _without_bias(path: Path) -> dict[str, Tensor]:
    state = safetensors.torch.load_file(path)
    with_experts = {name: value for name, value in state.items() if "selection_bias" not in name}
    return {name: torch.cat([value, value]) if "router.embeddings" in name else value for name, value in with_experts.items()}


def check_mistakes(processes: dist.ProcessGroup) -> None:
    def refused(model: AnyModel, kind: type[KilolayerError], message: str) -> None:
        with pytest.raises(kind, match=message):
            kl.shard_experts(model, processes)

    refused(build(Case(kl.MoE(experts=3))), OptionError, "3 experts cannot be shared evenly by 2 processes\n.*: 1, 3")
    config = build(Case(kl.MoE(experts=4))).config
    dense = kl.Encoder(vocab_size=13, dim=16, heads=2, ffn_dim=24, layers=2)
    refused(dense, InputError, "has no experts")
    for device in ("cpu", "meta"):
        different = kl.build_model(config, device=device, seed=dist.get_rank(processes))
        refused(different, InputError, "the processes have different models")
    tied = build(Case(kl.MoE(experts=4, every=1)))
    tied.decoder.blocks[1].feedforward.f.experts = tied.decoder.blocks[0].feedforward.f.experts
    refused(tied, InputError, "layers of this model use the same experts")
    shared = build(Case(kl.MoE(experts=4), recipe="admin"))
    kl.shard_experts(shared, processes)
    refused(shared, InputError, "already shared")
    with pytest.raises(InputError, match="calibrate the whole model first"):
        kl.calibrate(shared, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="only its own part of the experts"):
        kl.fold(shared)
    torch.manual_seed(0)
    translator = kl.EncoderDecoder(13, 16, 2, 24, 2, 2, moe=kl.MoE(experts=4))
    kl.shard_experts(translator, processes)
    source = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="samples cannot be drawn"):
        generate(translator, source, SearchConfig(method="sample"))
    with pytest.raises(InputError, match="have different sources"):
        generate(translator, source + dist.get_rank(processes), SearchConfig())
    assert expert_group(copy.deepcopy(shared)) == expert_group(shared)


def check_search(processes: dist.ProcessGroup, shape: str) -> None:
    """All processes find what one finds with the whole model."""
    case = Case(kl.MoE(experts=4), shape, training=False)
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    assert isinstance(shared, kl.EncoderDecoder | kl.Decoder)
    assert isinstance(whole, kl.EncoderDecoder | kl.Decoder)
    source, _ = union(batches(4))
    short = {"max_length_factor": 1.0, "max_length_extra": 2}
    for config in (SearchConfig(beam=3, n_best=3, **short), SearchConfig(method="greedy", **short)):
        found, expected = generate(shared, source, config), generate(whole, source, config)
        for ours, theirs in zip(found, expected, strict=True):
            assert [each.tokens for each in ours] == [each.tokens for each in theirs]
            torch.testing.assert_close([each.score for each in ours], [each.score for each in theirs])


def check_balance_of_unequal_batches(processes: dist.ProcessGroup) -> None:
    """The balance loss of all tokens is not the mean of the balance losses of each process's."""
    case = Case(kl.MoE(experts=4, balance=1.0))
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    group = expert_group(shared)
    assert group is not None
    made = batches(group.size)
    each = [float(read(whole, batch)[2].detach()) for batch in made]
    whole_loss = float(read(whole, union(made))[2].detach())
    shares = gather(read(shared, made[group.rank])[2], group)
    assert float(shares.sum()) == pytest.approx(whole_loss, rel=1e-12)
    assert abs(sum(each) / len(each) - whole_loss) > 1e-3


def check_frozen(processes: dist.ProcessGroup) -> None:
    """Fine-tuning with frozen experts on several processes."""
    case = Case(kl.MoE(experts=4, balance=1.0))
    whole, shared = build(case), build(case)
    kl.shard_experts(shared, processes)
    group = expert_group(shared)
    assert group is not None
    made = batches(group.size)
    for model, batch in ((whole, union(made)), (shared, made[group.rank])):
        kl.freeze_experts(model)
        _, losses, router_loss, _ = read(model, batch)
        (losses / count(made) + router_loss).backward()
    kl.reduce_gradients(shared)
    for (name, found), (_, expected) in zip(shared.named_parameters(), whole.named_parameters(), strict=True):
        check_close(found.grad, expected.grad, case.dtype, name)
        assert (found.grad is None) == ("router" in name or "experts" in name)


def check_compiled(processes: dist.ProcessGroup, case: Case, graphs: int) -> None:
    """A step of compiled layers, those that share experts in three parts, on batches of several shapes."""
    whole, shared = build(replace(case, recompute=None)), build(case)
    kl.shard_experts(shared, processes)
    warnings.simplefilter("default")  # the compiler warns about itself
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_layers(shared, "aot_eager")
    group = expert_group(shared)
    assert group is not None
    for step in range(3):
        made = batches(group.size, step)
        with patch("torch.rand_like", lambda like: torch.full_like(like, 0.6)):
            for model, batch in ((whole, union(made)), (shared, made[group.rank])):
                model.zero_grad()
                _, losses, router_loss, _ = read(model, batch)
                (losses / count(made) + router_loss).backward()
        kl.reduce_gradients(shared)
        check_gradients(shared, whole, case.dtype)
    # No row or a single one may arrive in some steps, for which the compiler has functions of their own.
    assert graphs <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 4


def check_dropout_of_compiled(processes: dist.ProcessGroup, case: Case) -> None:
    """Compiled layers draw what operators draw that run one by one, also where they are recomputed."""
    warnings.simplefilter("default")  # the compiler warns about itself
    torch._dynamo.reset()
    gradients: list[list[Tensor | None]] = []
    for compiled in (False, True):
        model = build(case if compiled else replace(case, recompute="none"))
        kl.shard_experts(model, processes)
        if compiled:
            compile_layers(model, "aot_eager")
        torch.manual_seed(5 + processes.rank())
        with kernels.assumed("cpu"):
            _, losses, router_loss, _ = read(model, batches(processes.size())[processes.rank()])
            (losses + router_loss).backward()
        gradients.append([weight.grad for weight in model.parameters()])
    without = build(replace(case, recompute="none", dropout=0.0))
    kl.shard_experts(without, processes)
    _, losses, _, _ = read(without, batches(processes.size())[processes.rank()])
    losses.backward()
    for found, expected in zip(*reversed(gradients), strict=True):
        check_close(found, expected, case.dtype, "gradient")
    dropped = [float(each.norm()) for each in gradients[1] if each is not None]
    assert dropped != pytest.approx(
        [float(each.grad.norm()) for each in without.parameters() if each.grad is not None], rel=1e-3
    )


def check_compiled_on_gpu(processes: dist.ProcessGroup, case: Case, backend: str, autocast: bool) -> None:
    """The gradients of processes on one GPU are those of the whole model; in bf16 as near to them as plain layers come."""
    warnings.simplefilter("default")  # the compiler warns about itself
    torch._dynamo.reset()
    if backend == "nccl":
        nccl = dist.new_group([dist.get_rank()], backend="nccl", use_local_synchronization=True)
        assert isinstance(nccl, dist.ProcessGroup)
        processes = nccl
    exact, rounded = (build(replace(case, recompute=None), "cuda") for _ in range(2))
    shared = build(case, "cuda")
    kl.shard_experts(shared, processes)
    compile_layers(shared)
    group, of_experts = expert_group(shared), {name for name, _ in expert_parameters(exact)}
    assert group is not None
    for step in range(3):
        made = [(source.cuda(), target.cuda()) for source, target in equally_long(batches(group.size, step))]
        for model, batch in ((exact, union(made)), (rounded, union(made)), (shared, made[group.rank])):
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast and model is not exact):
                _, losses, router_loss, _ = read(model, batch)
            (losses / count(made) + router_loss).backward()
        kl.reduce_gradients(shared)
        largest = max(float(each.grad.norm()) for each in exact.parameters() if each.grad is not None)
        floor = (1e-2 if autocast else 1e-5) * largest
        triples = zip(shared.named_parameters(), exact.parameters(), rounded.parameters(), strict=True)
        for (name, found), expected, plain in triples:
            assert found.grad is not None, name
            gradients = [each.grad for each in (expected, plain) if each.grad is not None]
            wanted, near = (own_experts(each, group) if name in of_experts else each for each in gradients)
            assert (found.grad - wanted).norm() <= 3 * (near - wanted).norm() + 1e-3 * wanted.norm() + floor, name


def check_exchange(processes: dist.ProcessGroup) -> None:
    """Rows and their gradients find their way, also where a process sends or receives none."""
    group = Peers.of(processes)
    rank, size = group.rank, group.size
    # Rank r sends r * t rows to rank t, each with its sender, its receiver and its number.
    sent, received = [rank * to for to in range(size)], [start * rank for start in range(size)]
    rows = [(rank, to, number) for to in range(size) for number in range(sent[to])]
    given = torch.tensor(rows, dtype=torch.float64).view(-1, 3).requires_grad_()
    found = exchange(given, sent, received, group)
    expected = [(start, rank, number) for start in range(size) for number in range(received[start])]
    assert found.tolist() == [list(map(float, row)) for row in expected]
    (found * (1 + rank)).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [[1.0 + to] * 3 for _, to, _ in rows]


def check_summed_gradients(processes: dist.ProcessGroup) -> None:
    """In pieces, over dtypes, and where a process has no gradient."""
    group = Peers.of(processes)
    weights = [torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.float32)]
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    for index, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, 10.0**index * (1 + group.rank))
    if group.rank == 1:
        weights[2].grad = None
    with patch("kilolayer.parallel.collectives.AT_ONCE", 7):
        sum_gradients([*weights, frozen], group)
    whole = sum(range(1, group.size + 1))
    assert [float(weight.grad.mean()) for weight in weights if weight.grad is not None] == [
        whole,
        10 * whole,
        100 * (whole - 2),
    ]
    assert frozen.grad is None
