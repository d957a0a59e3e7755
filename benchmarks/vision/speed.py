"""The training step of an image classifier beside Hugging Face's and timm's ViT: the same shapes, in turns, in one process.

PYTHONPATH=src python benchmarks/vision/speed.py OUT [--shapes 0 1 2 3] [--systems NAME ...] [--rounds 5] [--steps 20]
    [--seconds 480] [--tiny]

bf16 products and fp32 weights updated by AdamW, no dropout, Pre-LN with GELU and learned positions, batches on the device.
The peers hold fp32 weights under autocast and use torch's fused AdamW; "compiled" is torch.compile in its default mode, each
block by itself in models of more than 24 layers, which otherwise takes minutes; "in graphs" is its mode reduce-overhead on the
whole model. Ours is the trainer's own step. "kilolayer from pixels" begins with uint8 images and augments them, by RandAugment,
erasing, mixup and cutmix, as the trainer does. OUT/speed.json has the median over rounds of steps of each system, and the
ratios; it is written after each shape, and other shapes that it holds stay. No shape is begun after --seconds, and no system
of a shape is prepared, so that those that are ready are still measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import kilolayer as kl
from kilolayer.data.augment import Augment, AugmentConfig
from kilolayer.files.writing import write
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.speed.runtime import FAST
from kilolayer.tasks.task import DeviceWork, Loss
from kilolayer.tasks.train_config import TrainConfig
from kilolayer.training.guard import Guard
from kilolayer.training.step import Stepper

LR, CLASSES = 1e-4, 10
MOST_AT_ONCE = 24
"""Layers of a model that is compiled as a whole."""
Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    layers: int
    size: int = 32
    patch: int = 4
    rows: int = 256
    dim: int = 384
    heads: int = 6

    @property
    def name(self) -> str:
        """As in the table of results."""
        return f"{self.layers}L d{self.dim}, {self.rows} images of {self.size} pixels"


@dataclass(frozen=True)
class Parts:
    """A batch that is on the device."""

    parts: tuple[torch.Tensor, ...]
    tokens: int


SHAPES = (Shape(12), Shape(100), Shape(12, 224, 16, 128), Shape(100, 224, 16, 32))
TINY = (Shape(2, 16, 4, 8, 16, 2),)


def kilolayer(shape: Shape, device: torch.device) -> Step:
    images, labels = batch(shape, device)
    return trainer_step(shape, device, (images, labels), None)


def from_pixels(shape: Shape, device: torch.device) -> Step:
    """The same step from images as they are in a file: they are augmented first."""
    augment = Augment(AugmentConfig(crop="pad", randaugment=2, erasing=0.25, mixup=0.8, cutmix=1.0), 1, CLASSES)
    pixels = torch.randint(0, 256, (shape.rows, 3, shape.size, shape.size), dtype=torch.uint8, device=device)
    labels = torch.randint(0, CLASSES, (shape.rows,), device=device)
    keys = torch.stack([torch.arange(shape.rows), torch.zeros(shape.rows, dtype=torch.int64)], dim=1).to(device)
    return trainer_step(shape, device, (pixels, labels, keys), DeviceWork(lambda parts: augment(*parts), recorded=True))


def trainer_step(shape: Shape, device: torch.device, parts: tuple[torch.Tensor, ...], work: DeviceWork | None) -> Step:
    config = kl.ModelConfig(
        shape="encoder",
        recipe=kl.recipes.get("pre_ln"),
        layers=shape.layers,
        dim=shape.dim,
        heads=shape.heads,
        ffn_dim=4 * shape.dim,
        vocab_size=None,
        positions="learned",
        activation="gelu",
        image=kl.ImageInput(size=shape.size, patch=shape.patch),
        head=kl.Head(outputs=CLASSES, pooler="none", dropout=0.0),
    )
    model = kl.build_model(config, device=device, seed=1).train()
    train = TrainConfig(optimizer="adamw", weight_decay=0.01, precision="bf16", label_smoothing=0.0)
    optimizer = make_optimizer(model, train, model.cast_weights(torch.bfloat16), runtime=FAST)
    guard = Guard(scaled=False)
    stepper = Stepper(model, optimizer, train, guard, device, say=_refuse, loss=_loss, runtime=FAST, device_work=work)
    read = Parts(parts, shape.rows)

    def step() -> float:
        result = stepper.step([read], LR)
        assert result.fault is None
        return result.loss

    return step


def _loss(model: Any, parts: Any, *, hidden_states: bool) -> Loss:
    images, labels = parts
    output = model(images, hidden_states=hidden_states)
    nll = F.cross_entropy(output.logits.float(), labels, reduction="sum")
    return Loss(nll, nll, labels.new_ones(len(labels)).sum(), output)


def _refuse(message: str) -> None:
    raise RuntimeError(message)  # a slower form must not be measured as if it were the usual one


def vit_model(shape: Shape) -> Any:
    """Hugging Face's classifier, with its own start and no dropout."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.dim,
        image_size=shape.size,
        patch_size=shape.patch,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,  # pyright: ignore[reportCallIssue], every configuration of Transformers takes it
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue], every configuration of Transformers takes it
    )
    return ViTForImageClassification(config)


def vit(shape: Shape, device: torch.device, **compiling: Any) -> Step:
    with device:
        model = vit_model(shape)
    return autocast_step(model, lambda images: model(images).logits, model.vit.layers, shape, device, **compiling)


def timm_vit(shape: Shape, device: torch.device, **compiling: Any) -> Step:
    from timm.models.vision_transformer import VisionTransformer  # pyright: ignore[reportMissingImports]

    with device:
        model = VisionTransformer(
            img_size=shape.size,
            patch_size=shape.patch,
            num_classes=CLASSES,
            embed_dim=shape.dim,
            depth=shape.layers,
            num_heads=shape.heads,
        )
    return autocast_step(model, model, model.blocks, shape, device, **compiling)


def autocast_step(
    model: torch.nn.Module,
    logits: Callable[[Any], Any],
    blocks: Iterable[torch.nn.Module],
    shape: Shape,
    device: torch.device,
    **compiling: Any,
) -> Step:
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=LR, weight_decay=0.01, fused=True)
    images, labels = batch(shape, device)

    def mean_loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(logits(images).float(), labels)

    loss = mean_loss
    if compiling == {"mode": "default"} and shape.layers > MOST_AT_ONCE:
        for block in blocks:
            block.compile()
    elif compiling:
        loss = torch.compile(mean_loss, **compiling)

    def step() -> torch.Tensor:
        found = loss()
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return step


SYSTEMS: dict[str, Callable[[Shape, torch.device], Step]] = {
    "kilolayer": kilolayer,
    "vit": vit,
    "vit compiled": lambda shape, device: vit(shape, device, mode="default"),
    "timm compiled": lambda shape, device: timm_vit(shape, device, mode="default"),
    "kilolayer from pixels": from_pixels,
    "vit in graphs": lambda shape, device: vit(shape, device, mode="reduce-overhead"),
}
SLOW = ("vit in graphs",)
"""Those whose compilation takes so long that the others are measured before it too."""
OURS = ("kilolayer", "kilolayer from pixels")


def batch(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, fp32 [rows, 3, size, size], and labels, int64 [rows]."""
    draw = np.random.default_rng(1)
    images = torch.from_numpy(draw.standard_normal((shape.rows, 3, shape.size, shape.size), dtype=np.float32))
    return images.to(device), torch.from_numpy(draw.integers(0, CLASSES, shape.rows)).to(device)


def timed(step: Step, steps: int, device: torch.device) -> float:
    """Milliseconds of a step: the mean of several in a row, between which nobody waits for the device."""
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return 1e3 * (time.perf_counter() - began) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    shape: Shape, systems: Sequence[str], rounds: int, steps: int, device: torch.device, deadline: float
) -> Iterator[dict[str, Any]]:
    """The median step of each system; one that cannot be run has the reason instead. Yields it again with those of SLOW."""
    ready: dict[str, Step] = {}
    row: dict[str, Any] = {"shape": asdict(shape), "name": shape.name, "ms": {}, "missing": {}}
    usual = [name for name in systems if name not in SLOW]
    for some in filter(None, (usual, [name for name in systems if name in SLOW])):
        for name in some:
            if time.monotonic() > deadline:
                row["missing"][name] = "the time was up"
                continue
            try:
                ready[name] = SYSTEMS[name](shape, device)
                timed(ready[name], 5, device)
            except Exception as error:  # the others are measured
                ready.pop(name, None)
                row["missing"][name] = f"{type(error).__name__}: {error}"[:300]
        if not any(name in ready for name in some):
            yield row
            continue
        found: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(rounds):
            for name, step in ready.items():
                found[name].append(timed(step, steps, device))
        row["ms"] = {name: round(median(times), 3) for name, times in found.items()}
        row["times_faster"] = {
            name: round(value / row["ms"]["kilolayer"], 3)
            for name, value in row["ms"].items()
            if name not in OURS and "kilolayer" in row["ms"]
        }
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", type=int, nargs="+", choices=range(len(SHAPES)), default=list(range(len(SHAPES))))
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "speed.json"
    made_with = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    command = f"python benchmarks/vision/speed.py OUT --rounds {options.rounds} --steps {options.steps}"
    rows: dict[str, Any] = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for shape in TINY if options.tiny else [SHAPES[index] for index in options.shapes]:
        if time.monotonic() > deadline:
            break
        torch._dynamo.reset()
        for row in measure(shape, options.systems, options.rounds, options.steps, device, deadline):
            rows[shape.name] = row
            print(json.dumps(row), flush=True)
            write(path, json.dumps({"command": command, "made_with": made_with, "rows": list(rows.values())}, indent=1))


if __name__ == "__main__":
    main()
