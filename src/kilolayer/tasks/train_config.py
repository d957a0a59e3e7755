"""The options of training: the `[train]` table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from kilolayer.config import bounded, check
from kilolayer.errors import IdleOptionError, OptionError, shown
from kilolayer.importing import CLASS_PATH

EVERY = 1000
"""Steps between validations, and between checkpoints, where nothing else is said."""
Schedule = Literal["inverse_sqrt", "cosine", "linear", "warmup_stable_decay", "constant"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch, optimizer, schedule, precision, and when to look and to save."""

    replaces: ClassVar = {
        "steps": ("epochs",),
        "epochs": ("steps",),
        "warmup_steps": ("warmup_share",),
        "warmup_share": ("warmup_steps",),
    }

    steps: int = bounded(100_000, least=1, most=10**12)
    """Optimizer steps."""
    epochs: float | None = bounded(None, above=0, most=10**6)
    """Passes over the training data, in the place of steps: the run keeps the steps that they are."""
    start_from: str | None = None
    """A run, or a folder of Hugging Face with BERT, GPT-2, Marian or OPT, whose weights and vocabulary are the start, as in
    fine-tuning; same model and [tokenizer]. Or a folder by kl.save, of weights alone. Absent: as the recipe says."""
    freeze: Literal["none", "experts"] = "none"
    """What stays as it starts: nothing, or experts and their routers; the balance loss still counts."""
    accumulate: int = bounded(1, least=1, most=10**6)
    """Batches a step; the loss is averaged over all their target tokens."""
    seed: int = bounded(1, least=0, most=2**63 - 1)
    """Fixes the weights, the order of the data and the dropout."""
    optimizer: Literal["adam", "adamw", "radam"] = "adam"
    """AdamW and RAdam decay weights apart from the gradient, Adam as a part of it."""
    lr: float = bounded(7e-4, above=0, most=1000)
    """Highest learning rate."""
    layer_decay: float = bounded(1.0, above=0, most=1)
    """What the learning rate is multiplied by from each layer to the one below it; the top layer and a head have all of it."""
    beta1: float = bounded(0.9, least=0, below=1)
    """Decay of the gradient's mean."""
    beta2: float = bounded(0.98, least=0, below=1)
    """Decay of the gradient's second moment."""
    eps: float = bounded(1e-8, above=0, most=1000)
    """Added to the root of the second moment."""
    weight_decay: float = bounded(0.0, least=0, most=1000)
    """Decay of matrices and tables; biases, norms and scales are not decayed."""
    schedule: Schedule = "inverse_sqrt"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = bounded(4000, least=0, most=10**12)
    """Steps in which the learning rate rises linearly from 0."""
    warmup_share: float | None = bounded(None, least=0, most=1)
    """Share of all steps in which it rises, in the place of warmup_steps: the run keeps the steps that it is."""
    decay_steps: int = bounded(0, least=0, most=10**12)
    """Length of the fall at the end of warmup_stable_decay."""
    min_lr: float = bounded(0.0, least=0, most=1000)
    """Where cosine, linear and warmup_stable_decay end."""
    label_smoothing: float = bounded(0.1, least=0, below=1)
    """Share of the target's probability spread over all others. In a language model, absent: 0."""
    clip_norm: float = bounded(0.0, least=0, most=1e30)
    """Largest gradient norm; 0: no clipping."""
    clip: Literal["auto", "plain", "sparse"] = "auto"
    """What the norm counts: sparse weighs the gradient of E experts by 1 / sqrt(E) (SparseClip); auto: sparse with experts."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the matrix products, and of the matrices; the optimizer keeps these in fp32 too. fp16 scales the loss; auto: bf16 on a
    GPU that computes in it, else fp32."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Of the states between layers when precision is bf16: fp32 is exact at any depth, bf16 is faster."""
    recompute: Literal["none", "selective", "layer"] = "none"
    """What the backward pass computes again to save memory: nothing, what is cheap, or each layer from its input."""
    eager: bool = False
    """Run one operation at a time on a GPU too, without compiled layers and recorded steps: slow, for debugging."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: the GPU where there is one."""
    threads: int = bounded(0, least=0, most=4096)
    """Processor threads of torch; 0: torch's own choice."""
    log_every: int = bounded(50, least=1, most=10**12)
    """Steps between lines of metrics."""
    layers_every: int | Literal["auto"] = bounded("auto", least=0, most=10**12)
    """Steps between measurements of gradient, update and residual norms by layer; 0: never; auto: a hundredth of all steps, and
    at least 10."""
    valid_every: int | Literal["auto"] = bounded("auto", least=1, most=10**12)
    """Steps between validations; one more at the end. auto: 1,000, or an epoch where epochs are given."""
    valid_sentences: int = bounded(2000, least=1, most=10**9)
    """At most this many validation pairs a direction, windows of a text, or examples."""
    patience: int = bounded(0, least=0, most=10**9)
    """Stop after this many validations without a better loss, or score where one is measured; 0: never."""
    stop_when_dead: bool = False
    """End the run where a stack is found dead, without a test; else it is told, and the run goes on."""
    save_every: int | Literal["auto"] = bounded("auto", least=1, most=10**12)
    """Steps between checkpoints; one more at the end. auto: 1,000, or an epoch where epochs are given."""
    save_best: bool = True
    """Also write a checkpoint after each validation that is the best so far; without, the newest one is tested and used."""
    keep: int = bounded(3, least=1, most=10**6)
    """Newest checkpoints that stay on disk; the best stays too."""
    average: int = bounded(0, least=0, most=10**6)
    """Checkpoints, the newest ones, whose mean is tested after training; 0: the best one."""
    timeout: float = bounded(600.0, above=0, most=10**7)
    """Of several processes: seconds after which one that stands still ends the run. Its longest step must be shorter."""
    tensorboard: bool = False
    """Also write TensorBoard files; needs the package tensorboard."""
    trackers: list[str] = field(default_factory=list)
    """Classes of yours that are given all metrics, each by its place: ["my_module:MyTracker"]."""

    def __post_init__(self) -> None:
        check(self)
        self._check_length()
        self._check_schedule()
        if self.residual == "bf16" and self.precision != "bf16":
            raise IdleOptionError(
                f'residual = "bf16" has no effect on precision {self.precision!r}',
                fix='set precision = "bf16"',
                idle="residual",
                beside=("precision",),
            )
        if self.clip != "auto" and not self.clip_norm:
            raise IdleOptionError(
                f"clip = {self.clip!r} has no effect without a limit",
                fix="set clip_norm, such as 1.0",
                idle="clip",
                beside=("clip_norm",),
            )
        if self.patience and not self.save_best:
            raise IdleOptionError(
                "patience waits for a better validation than one that is not saved",
                fix="leave save_best on",
                idle="patience",
                beside=("save_best",),
                either=True,
            )
        if self.average > self.keep:
            raise OptionError(f"average is {self.average}, and of checkpoints the newest {self.keep} stay", fix="raise keep")
        for place in self.trackers:
            if not CLASS_PATH.fullmatch(place):
                raise OptionError(f"a tracker is {shown(place)}", fix="name its module and class: my_module:MyTracker")

    def in_steps(self, epoch: float) -> Self:
        """With nothing told in epochs or shares any more; epoch: the steps of one."""
        steps = self.steps if self.epochs is None else max(1, round(self.epochs * epoch))
        usual = EVERY if self.epochs is None else max(1, round(epoch))
        return dataclasses.replace(
            self,
            steps=steps,
            epochs=None,
            warmup_steps=self._warmup(steps),
            warmup_share=None,
            valid_every=usual if self.valid_every == "auto" else self.valid_every,
            save_every=usual if self.save_every == "auto" else self.save_every,
        )

    def validates(self, step: int) -> bool:
        """Whether there is a validation after this step, counted from 1."""
        return step % (EVERY if self.valid_every == "auto" else self.valid_every) == 0 or step == self.steps

    def saves(self, step: int) -> bool:
        """Whether there is a checkpoint on the schedule after this step, the last one aside."""
        return step % (EVERY if self.save_every == "auto" else self.save_every) == 0

    def measures_layers(self, step: int) -> bool:
        """Whether the norms of each layer are measured in this step, counted from 1."""
        every = self.layers_distance
        return every > 0 and (step == 1 or step % every == 0)

    @property
    def layers_distance(self) -> int:
        """Steps from one measurement of the layers to the next; 0 where there is none."""
        return max(10, -(-self.steps // 100)) if self.layers_every == "auto" else self.layers_every

    @property
    def decoupled(self) -> bool:
        """Whether the decay is of the weights, w <- (1 - lr decay) w, and not a part of the gradient."""
        return self.optimizer != "adam"

    def _warmup(self, steps: int) -> int:
        """The steps of the warm-up in a run of so many."""
        return self.warmup_steps if self.warmup_share is None else round(self.warmup_share * steps)

    def _check_length(self) -> None:
        for name, other in (("epochs", "steps"), ("warmup_share", "warmup_steps")):
            if getattr(self, name) is not None and getattr(self, other) != type(self).__dataclass_fields__[other].default:
                raise IdleOptionError(
                    f"{name} and {other} are both given", fix="remove one of them", idle=other, beside=(name,), either=True
                )

    def _check_schedule(self) -> None:
        if self.schedule == "warmup_stable_decay":
            # The steps of epochs are known when the run is created, and checked again then.
            most = self.steps - self._warmup(self.steps) if self.epochs is None else 10**12
            if not 0 < self.decay_steps <= most:
                raise OptionError(
                    f"decay_steps is {self.decay_steps}",
                    fix=f"warmup_stable_decay needs 1 to {most} (steps - warmup_steps)",
                )
        elif self.decay_steps:
            raise self._idle_in_schedule("decay_steps")
        if self.schedule in ("inverse_sqrt", "constant") and self.min_lr:
            raise self._idle_in_schedule("min_lr")
        if self.min_lr > self.lr:
            raise OptionError(f"min_lr {self.min_lr} is above lr {self.lr}", fix="lower it")

    def _idle_in_schedule(self, name: str) -> IdleOptionError:
        what = f"{name} has no effect on the schedule {self.schedule!r}"
        return IdleOptionError(what, fix="remove it", idle=name, beside=("schedule",))
