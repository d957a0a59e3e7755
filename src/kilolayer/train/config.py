"""The options of training, the `[train]` table, and the whole configuration of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kilolayer.config import check
from kilolayer.data.corpora import DataConfig
from kilolayer.data.shapes import BatchConfig
from kilolayer.data.tokenizer import TokenizerConfig
from kilolayer.errors import OptionError
from kilolayer.generate.config import SearchConfig
from kilolayer.models.config import ModelConfig

Schedule = Literal["inverse_sqrt", "cosine", "linear", "warmup_stable_decay", "constant"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch, optimizer, schedule, precision, and when to look and to save."""

    steps: int = 100_000
    """Optimizer steps."""
    accumulate: int = 1
    """Batches a step; the loss is averaged over all their target tokens."""
    seed: int = 1
    """Fixes the weights, the order of the data and the dropout."""
    optimizer: Literal["adam", "adamw", "radam"] = "adam"
    """AdamW decays weights apart from the gradient, the others as a part of it."""
    lr: float = 7e-4
    """Highest learning rate."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.98
    """Decay of the gradient's second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decay of matrices and tables; biases, norms and scales are not decayed."""
    schedule: Schedule = "inverse_sqrt"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 4000
    """Steps in which the learning rate rises linearly from 0."""
    decay_steps: int = 0
    """Length of the fall at the end of warmup_stable_decay."""
    min_lr: float = 0.0
    """Where cosine, linear and warmup_stable_decay end."""
    label_smoothing: float = 0.1
    """Share of the target's probability spread over the vocabulary."""
    clip_norm: float = 0.0
    """Largest gradient norm; 0: no clipping."""
    clip: Literal["auto", "plain", "sparse"] = "auto"
    """What the norm counts: sparse weighs the gradient of E experts by 1 / sqrt(E) (SparseClip); auto: sparse with experts."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the matrix products, and of the matrices; the optimizer keeps these in fp32 too. fp16 scales the loss."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Of the states between layers when precision is bf16: fp32 is exact at any depth, bf16 is faster."""
    recompute: Literal["none", "selective", "layer"] = "none"
    """What the backward pass computes again to save memory: nothing, what is cheap, or each layer from its input."""
    eager: bool = False
    """Run one operation at a time on a GPU too, without compiled layers and recorded steps: slow, for debugging."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: the GPU where there is one."""
    threads: int = 0
    """Processor threads of torch; 0: torch's own choice."""
    log_every: int = 50
    """Steps between lines of metrics."""
    layers_every: int = 500
    """Steps between measurements of gradient, update and residual norms by layer; 0: never."""
    valid_every: int = 1000
    """Steps between validations; one more at the end."""
    valid_bleu: bool = False
    """Translate the validation part at each validation and score it by BLEU."""
    valid_sentences: int = 2000
    """At most this many validation pairs a direction."""
    patience: int = 0
    """Stop after this many validations without a better loss (BLEU where it is measured); 0: never."""
    save_every: int = 1000
    """Steps between checkpoints; one more at the end."""
    keep: int = 3
    """Newest checkpoints that stay on disk; the best stays too."""
    average: int = 0
    """Checkpoints, the newest ones, whose mean is tested after training; 0: the best one."""
    tensorboard: bool = False
    """Also write TensorBoard files; needs the package tensorboard."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("steps", "accumulate", "lr", "eps", "log_every", "valid_every", "valid_sentences", "save_every", "keep"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} is {getattr(self, name)}", fix=f"{name} must be above 0")
        at_least_0 = ("seed", "threads", "warmup_steps", "decay_steps", "min_lr", "weight_decay", "clip_norm")
        for name in (*at_least_0, "layers_every", "patience", "average"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}", fix=f"{name} must be at least 0")
        for name in ("beta1", "beta2", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}", fix=f"{name} must be at least 0 and below 1")
        self._check_schedule()
        if self.residual == "bf16" and self.precision != "bf16":
            raise OptionError(f'residual = "bf16" has no effect on precision {self.precision!r}', fix='set precision = "bf16"')
        if self.clip != "auto" and not self.clip_norm:
            raise OptionError(f"clip = {self.clip!r} has no effect without a limit", fix="set clip_norm, such as 1.0")
        if self.average > self.keep:
            raise OptionError(f"average is {self.average}, but only {self.keep} checkpoints are kept", fix="raise keep")

    def _check_schedule(self) -> None:
        if self.schedule == "warmup_stable_decay":
            if not 0 < self.decay_steps <= self.steps - self.warmup_steps:
                raise OptionError(
                    f"decay_steps is {self.decay_steps}",
                    fix=f"warmup_stable_decay needs 1 to {self.steps - self.warmup_steps} (steps - warmup_steps)",
                )
        elif self.decay_steps:
            raise OptionError(f"decay_steps has no effect on the schedule {self.schedule!r}", fix="remove it")
        if self.schedule in ("inverse_sqrt", "constant") and self.min_lr:
            raise OptionError(f"min_lr has no effect on the schedule {self.schedule!r}", fix="remove it")
        if self.min_lr > self.lr:
            raise OptionError(f"min_lr {self.min_lr} is above lr {self.lr}", fix="lower it")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a run is made from: one table a room."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape, depth and recipe."""
    data: DataConfig = field(default_factory=DataConfig)
    """Text and directions."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The vocabulary."""
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Tokens and shapes of a batch."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Steps, optimizer, schedule."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """How translations are found."""

    def __post_init__(self) -> None:
        if self.train.patience and self.data.folder is not None and self.data.valid is None:
            raise OptionError("patience has no effect without a validation part", where="train", fix="set data.valid")
        if self.model.shape != "encoder_decoder":
            raise OptionError(
                f"a translator cannot be trained in the shape {self.model.shape!r}", where="model", fix="remove model.shape"
            )
