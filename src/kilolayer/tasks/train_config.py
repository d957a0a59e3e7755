"""The options of training: the `[train]` table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from kilolayer.config import bounded, build, check
from kilolayer.errors import OptionError, UnknownOptionError, UnusedOptionError, shown
from kilolayer.importing import CLASS_PATH
from kilolayer.optimizers import registry as optimizers

if TYPE_CHECKING:
    from kilolayer.optimizers.base import UpdateRule

EVERY = 1000
"""Default number of steps between validations, and between checkpoints."""
Schedule = Literal["inverse_sqrt", "cosine", "linear", "warmup_stable_decay", "constant"]
Shard = Literal["none", "full", "hybrid"]


OF_RULES = ("beta1", "beta2", "eps", "weight_decay")
"""Options that an optimizer reads if it has a field of that name."""
LONGEST_WARMUP = 4000  # the papers'
WARMUP_SHARE = 0.4
"""Default share of the warm-up in a short run: that of the runs in which methods were compared at 6 to 100 layers per side
(benchmarks/reproduce/deepnet-table1.json); DeepNorm lives there at rates where a steeper warm-up kills it."""


def usual_warmup(steps: int) -> int:
    """The default number of warm-up steps in a run of this many steps."""
    return min(LONGEST_WARMUP, round(WARMUP_SHARE * steps))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch, optimizer, schedule, precision, and when to measure and to save."""

    replaces: ClassVar = {
        "steps": ("epochs",),
        "epochs": ("steps",),
        "warmup_steps": ("warmup_share",),
        "warmup_share": ("warmup_steps",),
    }

    steps: int = bounded(100_000, least=1, most=10**12)
    """Number of optimizer steps."""
    epochs: float | None = bounded(None, above=0, most=10**6)
    """Passes over the training data, instead of steps; converted to steps when the run is created."""
    start_from: str | None = None
    """Start from these weights and this vocabulary, as in fine-tuning: a run, or a Hugging Face folder with BERT, GPT-2, OPT,
    Qwen3, Marian, ViT or BEiT; [model] and [tokenizer] must be the same. Or a folder written by kl.save, which has only
    weights. Default: initialized as the recipe specifies."""
    freeze: Literal["none", "experts"] = "none"
    """Weights that are not trained: none, or the experts and their routers; the balance loss still applies."""
    accumulate: int = bounded(1, least=1, most=10**6)
    """Batches per optimizer step; the loss is averaged over all their target tokens."""
    seed: int = bounded(1, least=0, most=2**63 - 1)
    """Seed of the initial weights, the order of the data and the dropout."""
    optimizer: str | dict[str, Any] = field(default=optimizers.DEFAULT, metadata={"names": optimizers.names})
    """AdamW and RAdam use decoupled weight decay; Adam adds the decay to the gradient. Also one of your own or of torch, as
    module:class, such as torch.optim:SGD; options of its own are given in a table: { name = "...", ... }."""
    lr: float = bounded(7e-4, above=0, most=1000)
    """Peak learning rate."""
    layer_decay: float = bounded(1.0, above=0, most=1)
    """Factor applied to the learning rate from each layer to the one below it; the top layer and the head train at the full
    rate."""
    beta1: float = bounded(0.9, least=0, below=1)
    """Decay rate of Adam's running mean of the gradient."""
    beta2: float = bounded(0.98, least=0, below=1)
    """Decay rate of Adam's running mean of the squared gradient."""
    eps: float = bounded(1e-8, above=0, most=1000)
    """Added to the square root of the second moment."""
    weight_decay: float = bounded(0.0, least=0, most=1000)
    """Weight decay of matrices and embeddings; biases, norms and scales are not decayed."""
    schedule: Schedule = "inverse_sqrt"
    """How the learning rate decays after the warm-up."""
    warmup_steps: int = bounded(None, least=0, most=10**12)
    """Steps over which the learning rate rises linearly from 0. Default: 0.4 of all steps, at most 4,000."""
    warmup_share: float | Literal["auto"] | None = bounded(None, least=0, most=1)
    """Length of the warm-up as a fraction of all steps, instead of warmup_steps; converted to steps when the run is created.
    auto: the default of warmup_steps, for a run whose length is given in epochs."""
    decay_steps: int = bounded(0, least=0, most=10**12)
    """Number of final steps over which warmup_stable_decay lowers the learning rate."""
    min_lr: float = bounded(0.0, least=0, most=1000)
    """Learning rate at the end of cosine, linear and warmup_stable_decay."""
    label_smoothing: float = bounded(0.1, least=0, below=1)
    """Probability that is taken from the target and spread evenly over the whole vocabulary, or over all classes. Default: 0 in
    language models and classifiers."""
    clip_norm: float = bounded(0.0, least=0, most=1e30)
    """Maximum gradient norm; 0: no clipping."""
    clip: Literal["auto", "plain", "sparse"] = "auto"
    """How the norm is computed: sparse multiplies the gradient of E experts by 1 / sqrt(E) (SparseClip); auto: sparse if the
    model has experts."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of the matrices and their products; the optimizer also keeps an fp32 copy. fp16 uses loss scaling. auto: bf16
    on a GPU that supports it, else fp32."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision of the residual stream between layers when precision is bf16: fp32 is exact at any depth, bf16 is faster."""
    recompute: Literal["none", "selective", "layer"] = "none"
    """What the backward pass recomputes to save memory (activation checkpointing): nothing, cheap operations, or each layer
    from its input."""
    shard: Shard = "none"
    """What several processes share: nothing, so that each holds the whole model and its optimizer; full: each holds some rows
    of every matrix, of its gradient and of its moments (FSDP2); hybrid: full within each machine, and machines have copies."""
    shard_unit: int = bounded(1, least=1, most=10**6)
    """Layers whose matrices are gathered together when they are computed: several take more memory, and less time in a deep
    model."""
    reshard_after_forward: bool = True
    """Release the gathered matrices of a sharded layer after its forward pass, and gather them again for its backward pass.
    false: keep them until then, which sends up to a quarter less in bf16 (a third in fp32) and takes the memory of all matrices
    in the precision of products."""
    eager: bool = False
    """On a GPU, run without compiled layers and CUDA graphs: slow, for debugging."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: the GPU if there is one."""
    threads: int = bounded(0, least=0, most=4096)
    """CPU threads that torch uses; 0: torch's default."""
    log_every: int = bounded(50, least=1, most=10**12)
    """Steps between log lines."""
    layers_every: int | Literal["auto"] = bounded("auto", least=0, most=10**12)
    """Steps between measurements of each layer: its gradient, update and residual norms, and, where layers are not compiled,
    its largest attention logits; 0: never; auto: a hundredth of all steps, at least 10."""
    valid_every: int | Literal["auto"] = bounded("auto", least=1, most=10**12)
    """Steps between validations; there is always one at the end. auto: 1,000, or one epoch if epochs is set."""
    valid_sentences: int = bounded(2000, least=1, most=10**9)
    """Maximum number of validation pairs per corpus and direction, of examples, or of images, from all over the set; or of
    windows of text, the first of it."""
    patience: int = bounded(0, least=0, most=10**9)
    """Stop after this many validations without an improvement of the loss, or of the score if one is measured; 0: never."""
    stop_when_dead: bool = False
    """End the run, without a test, once the first layers of a stack have had less than 1/20,000 of the largest layer's
    gradient for 3% of the steps, or 1/10,000 for 10%: no run that learned was ever seen so (benchmarks/dead)."""
    save_every: int | Literal["auto"] = bounded("auto", least=1, most=10**12)
    """Steps between checkpoints; there is always one at the end. auto: 1,000, or one epoch if epochs is set."""
    save_best: bool = True
    """Also save a checkpoint after each validation that is the best so far. If false, the newest checkpoint is tested and
    used."""
    keep: int = bounded(3, least=1, most=10**6)
    """Number of newest checkpoints to keep on disk; the best one is kept as well."""
    average: int = bounded(0, least=0, most=10**6)
    """Test the average of this many of the newest checkpoints after training; 0: the best checkpoint."""
    timeout: float = bounded(600.0, above=0, most=10**7)
    """With several processes: the run ends if one of them makes no progress for this many seconds. Must be longer than the
    longest step."""
    tensorboard: bool = False
    """Also write TensorBoard files; needs the package tensorboard."""
    trackers: list[str] = field(default_factory=list)
    """Your own classes that receive all metrics, each as module:class: ["my_module:MyTracker"]."""

    @classmethod
    def complete(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table; refused if it gives a length twice, even with the default value."""
        _check_lengths([name for name, value in table.items() if value not in (None, "none")])
        return table

    def __post_init__(self) -> None:
        self._complete_warmup()
        check(self)
        self._check_optimizer()
        self._check_length()
        self._check_schedule()
        if self.residual == "bf16" and self.precision != "bf16":
            raise UnusedOptionError(
                f'residual = "bf16" has no effect on precision {self.precision!r}',
                fix='set precision = "bf16"',
                unused="residual",
                beside=("precision",),
            )
        if self.clip != "auto" and not self.clip_norm:
            raise UnusedOptionError(
                f"clip = {self.clip!r} has no effect without clip_norm",
                fix="set clip_norm, such as 1.0",
                unused="clip",
                beside=("clip_norm",),
            )
        if self.shard_unit != 1 and self.shard == "none":
            raise UnusedOptionError(
                "shard_unit has no effect on a model that is not sharded",
                fix='set shard = "full"',
                unused="shard_unit",
                beside=("shard",),
            )
        if not self.reshard_after_forward and self.shard == "none":
            raise UnusedOptionError(
                "reshard_after_forward has no effect on a model that is not sharded",
                fix='set shard = "full"',
                unused="reshard_after_forward",
                beside=("shard",),
            )
        if self.shard != "none" and not (self.rule.elementwise and self.rule.applied_by is None):
            raise OptionError(
                f"{self.rule.title} needs whole matrices, and each process would hold only some rows of them",
                fix='use another optimizer, such as adamw, or leave shard at "none"',
            )
        if self.patience and not self.save_best:
            raise UnusedOptionError(
                "patience needs the best checkpoint, which is not saved",
                fix="leave save_best on",
                unused="patience",
                beside=("save_best",),
                either=True,
            )
        if self.average > self.keep:
            raise OptionError(
                f"average is {self.average}, but only the newest {self.keep} checkpoints are kept", fix="raise keep"
            )
        for path in self.trackers:
            if not CLASS_PATH.fullmatch(path):
                raise OptionError(f"a tracker is {shown(path)}", fix="name its module and class: my_module:MyTracker")

    @property
    def without_effect(self) -> set[str]:
        """The options whose values say nothing, because another one stands for them."""
        replaced = {"steps": self.epochs, "warmup_steps": self.warmup_share}
        return {name for name, other in replaced.items() if other is not None}

    def unsharded(self) -> Self:
        """The configuration of one process that holds the whole model."""
        return dataclasses.replace(self, shard="none", shard_unit=1, reshard_after_forward=True)

    def in_steps(self, epoch: float) -> Self:
        """The configuration with epochs and fractions converted to steps; epoch: the number of steps in one."""
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
        """Whether there is a scheduled checkpoint after this step, not counting the one at the end."""
        return step % (EVERY if self.save_every == "auto" else self.save_every) == 0

    def measures_layers(self, step: int) -> bool:
        """Whether the norms of each layer are measured in this step, counted from 1."""
        every = self.layers_distance
        return every > 0 and (step == 1 or step % every == 0)

    @property
    def layers_distance(self) -> int:
        """Steps between measurements of the layers; 0: none."""
        return max(10, -(-self.steps // 100)) if self.layers_every == "auto" else self.layers_every

    @property
    def rule(self) -> UpdateRule:
        """The optimizer's update rule, with its options."""
        name, own = optimizers.chosen(self.optimizer)
        cls = optimizers.find(name)
        known = {each.name for each in dataclasses.fields(cls)}
        shared = {each: getattr(self, each) for each in OF_RULES if each in known}
        if doubled := sorted(own.keys() & set(OF_RULES)):
            raise OptionError(f"optimizer.{doubled[0]} is an option of [train]", fix=f"set train.{doubled[0]}")
        try:
            return build(cls, shared | own)
        except UnknownOptionError as error:
            raise UnknownOptionError(error.what, where=f"optimizer {name!r}", fix=error.fix) from None

    def _complete_warmup(self) -> None:
        """Set the length of a warm-up that is not given; while a share gives it, `warmup_steps` is 0."""
        if self.warmup_steps is not None:
            return
        steps = 0
        if self.warmup_share is None and self.epochs is not None:
            object.__setattr__(self, "warmup_share", "auto")
        elif self.warmup_share is None and isinstance(self.steps, int):
            steps = usual_warmup(self.steps)
        object.__setattr__(self, "warmup_steps", steps)

    def _warmup(self, steps: int) -> int:
        """The number of warm-up steps in a run of this many steps."""
        if self.warmup_share == "auto":
            return usual_warmup(steps)
        return self.warmup_steps if self.warmup_share is None else round(self.warmup_share * steps)

    def _check_optimizer(self) -> None:
        """Complete the table of an optimizer with options of its own, and reject options that it does not read."""
        rule = self.rule
        values = optimizers.own_options(rule)
        for name in OF_RULES:
            if name not in values and getattr(self, name) != getattr(type(self), name):
                what = f"{name} has no effect on the optimizer {rule.name!r}"
                raise UnusedOptionError(what, fix="remove it", unused=name, beside=("optimizer",))
        if self.stop_when_dead and rule.lacks_health:
            raise UnusedOptionError(
                f"stop_when_dead has no effect on the optimizer {rule.name!r}, which keeps no running mean of the gradient",
                fix="remove it",
                unused="stop_when_dead",
                beside=("optimizer",),
            )
        own = {name: value for name, value in values.items() if name not in OF_RULES and value is not None}
        name, _ = optimizers.chosen(self.optimizer)
        object.__setattr__(self, "optimizer", {"name": name, **own} if own else name)

    def _check_length(self) -> None:
        usual = {"epochs": None, "steps": type(self).steps, "warmup_share": None, "warmup_steps": 0}
        _check_lengths([name for name, value in usual.items() if getattr(self, name) != value])

    def _check_schedule(self) -> None:
        if self.schedule == "warmup_stable_decay":
            # With epochs, the number of steps is known only when the run is created; it is checked again then.
            most = self.steps - self._warmup(self.steps) if self.epochs is None else 10**12
            if not 0 < self.decay_steps <= most:
                fix = f"warmup_stable_decay needs 1 to {most} (steps - warmup_steps)"
                if most < 1:
                    fix = f"the warm-up of {self._warmup(self.steps)} steps leaves none of {self.steps}: shorten it"
                raise OptionError(f"decay_steps is {self.decay_steps}", fix=fix)
        elif self.decay_steps:
            raise self._unused_in_schedule("decay_steps")
        if self.schedule in ("inverse_sqrt", "constant") and self.min_lr:
            raise self._unused_in_schedule("min_lr")
        if self.min_lr > self.lr:
            raise OptionError(f"min_lr {self.min_lr} is above lr {self.lr}", fix="lower it")

    def _unused_in_schedule(self, name: str) -> UnusedOptionError:
        what = f"{name} has no effect on the schedule {self.schedule!r}"
        return UnusedOptionError(what, fix="remove it", unused=name, beside=("schedule",))


def _check_lengths(given: Collection[str]) -> None:
    """Raise if the length of the run or of the warm-up is given in two ways."""
    for name, other in (("epochs", "steps"), ("warmup_share", "warmup_steps")):
        if name in given and other in given:
            raise UnusedOptionError(
                f"{name} and {other} are both given", fix="remove one of them", unused=other, beside=(name,), either=True
            )
