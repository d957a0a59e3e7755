"""Compare a masked language model's training step with that of Hugging Face's BertForMaskedLM, compiled, on one GPU.

    PYTHONPATH=src python benchmarks/understanding/masked_speed.py OUT.json
    PYTHONPATH=src python benchmarks/understanding/masked_speed.py OUT.json --tiny --device cpu     # tries every path

The model has 12 layers of BERT's base size; a batch has 64 rows of 512 tokens, one document per row, 15% masked; AdamW; with
and without dropout. Every system is a separate process. All prepare in parallel, and are then timed in turns, several rounds of
some steps each.

ours: the trainer's own step, bf16 with fp32 masters, with the output computed only at masked positions.
bert: BertForMaskedLM unchanged, called with labels: bf16 autocast, torch.compile, SDPA, fused AdamW. It scores all positions.
bert, masked positions: the same with its head called only at masked positions, as a skilled user would write it.
bert, pure bf16: weights and moments in bf16 without masters, masked positions only: faster, but not advisable for training.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
import torch
import torch._dynamo.utils
import torch.nn.functional as F
from torch import Tensor

Step = Callable[[], Any]
LR = 1e-4
IGNORED = -100  # Hugging Face's label for ignored positions
START, END, FIRST = 2, 3, 4


@dataclass(frozen=True)
class Setting:
    """The model and batch sizes. vocabulary: rows of the embedding table, including the mask's."""

    layers: int = 12
    dim: int = 768
    heads: int = 12
    ffn_dim: int = 3072
    vocabulary: int = 32_000
    rows: int = 64
    length: int = 512
    dropout: float = 0.0
    recipe: str = "post_ln"
    device: str = "cuda"
    warm: int = 6
    steps: int = 20

    @property
    def tokens(self) -> int:
        return self.rows * self.length


TINY = {"layers": 2, "dim": 32, "heads": 2, "ffn_dim": 64, "vocabulary": 104, "rows": 3, "length": 16, "warm": 1, "steps": 2}


def masked_batch(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [rows, length] with masks; positions and labels int64 [rows, k]. One document fills each row."""
    from kilolayer.data.masking import Masker, MaskingConfig

    rng = np.random.default_rng(1)
    tokens = rng.integers(FIRST, setting.vocabulary - 1, (setting.rows, setting.length))
    tokens[:, 0], tokens[:, -1] = START, END
    masker = Masker(MaskingConfig(), setting.length, setting.vocabulary - 1)
    masked, positions, labels = map(torch.from_numpy, masker.mask_tokens(tokens, rng))
    assert bool((labels > 0).all())  # full rows have the maximum number of masks
    return masked, positions, labels


def ours(setting: Setting) -> Step:
    import kilolayer as kl
    from kilolayer.data.masking import MaskedBatch
    from kilolayer.data.packing import PackedBatch
    from kilolayer.optimizers.optimizer import make_optimizer
    from kilolayer.speed.runtime import FAST
    from kilolayer.tasks.masked_lm.task import masked_loss
    from kilolayer.tasks.train_config import TrainConfig
    from kilolayer.training.guard import Guard
    from kilolayer.training.step import Stepper

    model = kl.Encoder.from_config(
        kl.ModelConfig(
            shape="encoder",
            layers=setting.layers,
            dim=setting.dim,
            heads=setting.heads,
            ffn_dim=setting.ffn_dim,
            vocab_size=setting.vocabulary,
            positions="learned",
            max_length=setting.length,
            activation="gelu",
            dropout=setting.dropout,
            attention_dropout=setting.dropout,
            pad_id=None,
            recipe=kl.recipes.get(setting.recipe),
        ),
        device=setting.device,
        seed=1,
    )
    tokens, positions, labels = masked_batch(setting)
    batch = MaskedBatch(PackedBatch(tokens, None, None), positions, labels, labels.numel())
    if model.config.recipe.calibration() is not None:
        kl.calibrate(model, tokens.to(setting.device))
    config = TrainConfig(optimizer="adamw", weight_decay=0.01, precision="bf16", label_smoothing=0.0)
    optimizer = make_optimizer(model.train(), config, model.cast_weights(torch.bfloat16), runtime=FAST)
    loss = partial(masked_loss, smoothing=0.0)
    device = torch.device(setting.device)
    stepper = Stepper(model, optimizer, config, Guard(scaled=False), device, say=_refuse, loss=loss, runtime=FAST)

    def step() -> float:
        found = stepper.step([batch], LR)
        if found.fault is not None:
            _refuse(f"{found.fault} is not finite, and the update was left out")
        return found.loss

    return step


def _refuse(message: str) -> None:
    """Raise: the trainer would continue more slowly, or with less work, which must not be measured."""
    raise RuntimeError(message)


def bert(setting: Setting, *, everywhere: bool = False, pure: bool = False) -> Step:
    """everywhere: score all positions, as the model does by default. pure: bf16 weights instead of autocast."""
    from transformers import BertConfig, BertForMaskedLM

    torch.set_float32_matmul_precision("high")
    config = BertConfig(
        vocab_size=setting.vocabulary,
        hidden_size=setting.dim,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=setting.ffn_dim,
        hidden_act="gelu",
        hidden_dropout_prob=setting.dropout,
        attention_probs_dropout_prob=setting.dropout,
        max_position_embeddings=setting.length,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue], every configuration of Transformers takes it
    )
    with torch.device(setting.device):
        model = BertForMaskedLM(config).train()
    if pure:
        model = model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    tokens, positions, labels = (each.to(setting.device) for each in masked_batch(setting))
    everywhere_labels = torch.full_like(tokens, IGNORED).scatter_(1, positions, labels)

    def whole() -> Tensor:
        return model(input_ids=tokens, labels=everywhere_labels).loss

    def at_positions() -> Tensor:
        states = model.bert(input_ids=tokens).last_hidden_state
        chosen = states.gather(1, positions[:, :, None].expand(-1, -1, states.shape[-1]))
        return F.cross_entropy(model.cls(chosen).flatten(0, 1).float(), labels.flatten())

    forward = whole if everywhere else at_positions
    if setting.device == "cuda":
        forward = torch.compile(forward)
    fused = setting.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01, fused=fused)

    def step() -> Tensor:
        with torch.autocast(setting.device, torch.bfloat16, enabled=not pure):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


SYSTEMS: dict[str, Callable[[Setting], Step]] = {
    "ours": ours,
    "bert": partial(bert, everywhere=True),
    "bert, masked positions": bert,
    "bert, pure bf16": partial(bert, pure=True),
}


def serve(system: str, setting: Setting) -> None:
    """Run one system: prepare, and time a round of steps for each line on standard input."""
    start = time.perf_counter()
    step = SYSTEMS[system](setting)
    for _ in range(setting.warm):
        step()
    _wait(setting)
    graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
    if setting.device == "cuda" and not graphs:
        raise RuntimeError("torch.compile has compiled nothing")  # it silently skips what it does not support
    _send({"ready_s": round(time.perf_counter() - start, 1), "graphs": graphs})
    for _ in sys.stdin:
        marks, loss = [_mark(setting)], math.nan
        for _ in range(setting.steps):
            loss = step()
            marks.append(_mark(setting))
        _wait(setting)
        facts: dict[str, Any] = {"ms": [round(_ms(a, b), 3) for a, b in pairwise(marks)], "loss": float(loss)}
        if setting.device == "cuda":
            facts["gigabytes"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        _send(facts)


def _send(facts: dict[str, Any]) -> None:
    print(f"FACTS {json.dumps(facts)}", flush=True)


def _wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def _mark(setting: Setting) -> Any:
    """A time stamp on the device's clock."""
    if setting.device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(before: Any, after: Any) -> float:
    return (after - before) * 1e3 if isinstance(before, float) else before.elapsed_time(after)


class Child:
    """A system in a separate process."""

    def __init__(self, system: str, setting: Setting) -> None:
        words = [sys.executable, __file__, "--serve", json.dumps([system, asdict(setting)])]
        self.system, self.rounds = system, list[dict[str, Any]]()
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready: dict[str, Any] = {}

    def round(self) -> None:
        """Time one round."""
        self._in.write("\n")
        self._in.flush()
        self.rounds.append(self.receive())

    def receive(self) -> dict[str, Any]:
        """The next message from the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("FACTS "):
                return json.loads(line.removeprefix("FACTS "))
        raise RuntimeError(f"{self.system} ended with {self.process.wait()}")

    def end(self) -> dict[str, Any]:
        """End the process, and return its result."""
        self._in.close()
        self.process.wait()
        ms = [median(each["ms"]) for each in self.rounds]
        return {**self.ready, "ms": median(ms), "rounds": self.rounds}

    @property
    def _in(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin


def measure(setting: Setting, systems: list[str], rounds: int) -> dict[str, Any]:
    """Time all systems in turns."""
    children = [Child(system, setting) for system in systems]
    try:
        for child in children:
            child.ready = child.receive()
            print(child.system, child.ready, flush=True)
        for number in range(rounds):
            for child in children[:: -1 if number % 2 else 1]:
                child.round()
        found = {child.system: child.end() for child in children}
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
    for each in found.values():
        each["tokens_per_s"] = round(setting.tokens / each["ms"] * 1e3)
    if "ours" in found:
        ours_ms = found["ours"]["ms"]
        ratios = {name: round(each["ms"] / ours_ms, 3) for name, each in found.items() if name != "ours"}
        return {"setting": asdict(setting), "systems": found, "times_faster_than": ratios}
    return {"setting": asdict(setting), "systems": found}


def hardware(device: str) -> dict[str, str]:
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        system, options = json.loads(sys.argv[2])
        serve(system, Setting(**options))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and batch")
    parser.add_argument("--dropout", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--recipe", default="post_ln", help="recipe of our model; BERT's is post_ln")
    parser.add_argument("--vocabulary", type=int, help="rows of the embedding table, including the mask's [32000]")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    typed = parser.parse_args()
    options: dict[str, Any] = {**(TINY if typed.tiny else {}), "device": typed.device, "recipe": typed.recipe}
    if typed.vocabulary is not None:
        options["vocabulary"] = typed.vocabulary
    setting = Setting(**options)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **hardware(typed.device),
        "results": [],
    }
    for dropout in typed.dropout:
        found = measure(replace(setting, dropout=dropout), typed.systems, typed.rounds)
        document["results"].append(found)
        typed.out.write_text(json.dumps(document, indent=1) + "\n")  # after each setting, so that measurements are not lost
        shown = ", ".join(f"{name} {each['ms']:.2f} ms" for name, each in found["systems"].items())
        print(f"dropout {dropout:g}: {shown}; {found.get('times_faster_than', {})}", flush=True)


if __name__ == "__main__":
    main()
