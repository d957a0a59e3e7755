"""The state of a run during training: model, optimizer and data, and everything that a checkpoint must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError
from kilolayer.files.saved_tensors import SelectedTensors, outline_of
from kilolayer.files.tensors import check_alike
from kilolayer.models.calibrate import TOKENS, joined
from kilolayer.models.model import Model
from kilolayer.models.regrid import REGRIDDED, regridded
from kilolayer.moe.layer import freeze_experts
from kilolayer.optimizers.optimizer import make_optimizer
from kilolayer.parallel.processes import Processes
from kilolayer.runs import checkpoint
from kilolayer.runs.checkpoint import Checkpoint
from kilolayer.runs.origins import open_origin
from kilolayer.runs.run import Run, check_vocabulary, choose_device
from kilolayer.runs.saved_state import fitted, form_of, regular_before
from kilolayer.tasks.task import Batch, Task, digest_of
from kilolayer.training.guard import Guard
from kilolayer.training.placement import Placement
from kilolayer.training.routing_meter import RoutingMeter
from kilolayer.training.stack_health import StackWatch
from kilolayer.training.step import StepResult

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESIDUALS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Best:
    """The best validation so far; value: its quality. waited: the number of validations since."""

    value: float | None = None
    step: int | None = None
    waited: int = 0

    def update(self, quality: float, step: int) -> bool:
        """Record a validation; return whether it is the best so far."""
        value = -math.inf if math.isnan(quality) else quality
        if self.value is None or value > self.value:
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False


@dataclass
class Window:
    """Sums since the last row of metrics; a skipped step adds only to `skipped` and `seconds`."""

    loss: float = 0.0
    nll: float = 0.0
    grad_norm: float = 0.0
    dense_norm: float = 0.0
    expert_norm: float = 0.0
    tokens: int = 0
    steps: int = 0
    clipped: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        self.seconds += seconds
        if result.fault is not None:
            self.skipped += 1
            return
        self.loss += result.loss * result.tokens
        self.nll += result.nll * result.tokens
        self.grad_norm += result.gradient_norm
        self.dense_norm += result.dense_norm
        self.expert_norm += result.expert_norm
        self.tokens += result.tokens
        self.steps += 1
        self.clipped += result.clipped

    def summary(self) -> dict[str, float]:
        tokens, steps = self.tokens or math.nan, self.steps or math.nan
        return {
            "loss": self.loss / tokens,
            "nll": self.nll / tokens,
            "grad_norm": self.grad_norm / steps,
            "tokens_per_second": self.tokens / self.seconds,
            "clipped": self.clipped,
            "skipped": self.skipped,
        }

    def parts(self) -> dict[str, float]:
        """Mean gradient norms of the experts and of all other weights, without SparseClip, and clipped steps."""
        steps = self.steps or math.nan
        return {"dense_norm": self.dense_norm / steps, "expert_norm": self.expert_norm / steps, "clipped": self.clipped}


class Trainer:
    """A run during training. Everything that a checkpoint must hold is listed in `state` and `restore`, side by side.

    Each of several processes has its own trainer; all have the same state except for their random generators.
    """

    def __init__(self, run: Run, task: Task, processes: Processes | None = None) -> None:
        config = run.config.train
        self.run, self.task, self.config = run, task, config
        self.processes = processes or Processes()
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = self.processes.own_device(choose_device(config.device))
        torch.manual_seed(config.seed)
        self.placement = Placement(
            run.config.model,
            self.processes,
            self.device,
            config.seed,
            shard=config.shard,
            unit=config.shard_unit,
            reshards=config.reshard_after_forward,
            dtype=DTYPES.get(config.precision),
        )
        self.model = self.placement.model.train()
        if config.freeze == "experts":
            freeze_experts(self.model)
        self.routing = None if self.model.config.moe is None else RoutingMeter(self.model, self.device)
        self.guard = Guard(scaled=config.precision == "fp16")
        with self.processes.first_process_first():
            self.batches = task.training_batches(config.seed)
        self.best = Best()
        self.window = Window()
        self.step = 0
        self.validated = 0
        self.saved: tuple[int, bool] | None = None
        """The step of the last checkpoint, and whether it was on the schedule."""
        self.regular: int | None = None
        """The step of the last scheduled checkpoint."""
        self.seconds = 0.0

    def begin(self, saved: Checkpoint | None) -> None:
        """Start with new weights or resume from a checkpoint; then lower the precision of the model's matrix products."""
        if saved is None:
            self.start_weights()
        else:
            path = checkpoint.path_of(self.run.checkpoints, saved.step) / "state.json"
            check_vocabulary(
                fitted(saved.state, {"vocabulary": str}, path)["vocabulary"], self.task.vocabulary, self.run.folder
            )
            self.placement.load(saved.model, self.run.folder)
        self.placement.make_equal()
        dtype = DTYPES.get(self.config.precision)
        precise: dict[nn.Parameter, Tensor] = {}
        if dtype is not None and isinstance(self.model, Model):
            precise = self.model.cast_weights(dtype, RESIDUALS[self.config.residual])
        self.frozen = {
            name: precise[weight].cpu()
            for name, weight in self.model.named_parameters()
            if weight in precise and not weight.requires_grad
        }
        sums = self.config.accumulate * self.processes.size > 1 or self.device.type == "cpu"
        self.optimizer = make_optimizer(self.model, self.config, precise or None, sums=sums, runtime=self.run.runtime)
        self.watch = StackWatch(self.model, self.optimizer, self.config)
        if saved is not None:
            self.restore(saved)

    def start_weights(self) -> None:
        """Initialize a new model: with the weights of `train.start_from`, or with scales calibrated on data."""
        if self.config.start_from is None:
            self.calibrate()
            return
        start, own = open_origin(Path(self.config.start_from)), self.model.state_dict()

        def adopt(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return self.task.adopt(regridded(weights, start.model, self.model.config), own)

        saved = None if self.placement.mesh is None else start.saved(self.task.vocabulary)
        weights = None if saved is None else SelectedTensors.converted(saved, adopt, REGRIDDED)
        self.placement.load(adopt(start.weights(self.task.vocabulary, own)) if weights is None else weights, start.folder)

    def state(self) -> Checkpoint:
        """What this process saves of everything that a resumed run needs to continue as if it had not stopped."""
        moments = self.placement.saved_state(self.optimizer.tensors() | self.random_state())
        weights = self.placement.saved_state(self.model.state_dict() | self.frozen | self.optimizer.precise())
        return Checkpoint(self.step, weights, moments, self.values(), self.placement.part())

    def values(self) -> dict[str, Any]:
        """The part of the state that is not tensors."""
        return {
            "guard": self.guard.state(),
            "batches": self.batches.state(),
            "best": asdict(self.best),
            "validated": self.validated,
            "stacks": self.watch.state(),
            "window": asdict(self.window),
            "routing": None if self.routing is None else self.routing.state(),
            "seconds": self.seconds,
            "vocabulary": digest_of(self.task.vocabulary),
        }

    def random_state(self) -> dict[str, Tensor]:
        """The states of the random generators that training uses."""
        states = {"random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def set_random_state(self, states: Mapping[str, Tensor]) -> None:
        """Restore the generators to an earlier `random_state`."""
        torch.set_rng_state(states["random.cpu"])
        if (cuda := states.get("random.cuda")) is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, self.device)

    def restore(self, saved: Checkpoint) -> None:
        """Restore what `state` returned, except for the weights, which `begin` loads."""
        path = checkpoint.path_of(self.run.checkpoints, saved.step)
        form = form_of(self.values()) | {"best": get_type_hints(Best), "window": get_type_hints(Window)}
        form |= {"stacks": self.watch.form()}
        values = fitted({"validated": saved.step, "stacks": self.watch.state()} | saved.state, form, path / "state.json")
        of_optimizer = checkpoint.where_of(path, checkpoint.OPTIMIZER)
        whole = outline_of(saved.optimizer)
        moments = {name: tensor for name, tensor in whole.items() if not name.startswith("random.")}
        ours = self.placement.outline(self.optimizer.tensors())
        check_alike({name: tensor for name, tensor in moments.items() if name in ours}, ours, of_optimizer)
        self.optimizer.load(self.placement.own_state(saved.optimizer, moments), of_optimizer)
        self._restore_random(saved.optimizer, of_optimizer)
        self.guard.load_state(values["guard"])
        self.batches.load_state(values["batches"])
        self.best = Best(**values["best"])
        self.validated = int(values["validated"])
        self.watch.load_state(values["stacks"])
        self.window = Window(**values["window"])
        if self.routing is not None:
            self.routing.load_state(values["routing"])
        self.step, self.seconds = saved.step, float(values["seconds"])
        scheduled = saved.state.get("scheduled") is not False
        self.saved = saved.step, scheduled
        self.regular = saved.step if scheduled else regular_before(saved.state, path / "state.json")

    def _restore_random(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        # A run may be resumed on a machine with a GPU after training without one, or the reverse.
        ours = {name: tensor for name, tensor in self.random_state().items() if name in tensors or name == "random.cpu"}
        check_alike({name: tensors[name] for name in ours if name in tensors}, ours, path)
        try:
            self.set_random_state(tensors)
        except RuntimeError as error:
            raise InputError(f"its random state is not valid: {error}", where=str(path), fix="use another checkpoint") from None

    @property
    def finished(self) -> bool:
        """Whether training is over: all steps are taken, or patience has run out."""
        patience = self.config.patience
        return self.step >= self.config.steps or bool(patience and self.best.waited >= patience)

    @property
    def validation_due(self) -> bool:
        """Whether this step has a validation that has not been made, or was interrupted by a signal."""
        scheduled = self.step > 0 and self.config.validates(self.step)
        return scheduled and self.validated != self.step

    def take_batches(self) -> list[Batch]:
        """This process's share of the batches of a step: of n processes, the r-th takes those at r, r + n, ..."""
        rank, size = self.processes.rank, self.processes.size
        taken: list[Batch] = []
        for index in range(self.config.accumulate * size):
            if index % size == rank:
                taken.append(next(self.batches))
            else:
                self.batches.skip()
        return taken

    def calibrate(self) -> None:
        """Set the residual scales of a recipe that derives them from data; only before the first step."""
        if not isinstance(self.model, Model) or self.model.config.recipe.calibration() is None:
            return
        position, taken, tokens = self.batches.state(), [], 0
        for _ in range(len(self.batches)):
            inputs = self.task.model_inputs(self.task.on_device(next(self.batches).parts))
            # A batch without padding may have no mask: only batches with the same parts are joined.
            if not taken or _part_names(inputs) == _part_names(taken[0]):
                taken.append(inputs)
                tokens += self._count_tokens(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs[0])
            if tokens >= TOKENS:
                break
        self.batches.load_state(position)
        whole = joined(taken)
        if isinstance(whole, Mapping):
            self.placement.calibrate({name: each.to(self.device) for name, each in whole.items()})
        else:
            self.placement.calibrate(tuple(each.to(self.device) for each in whole))

    def _count_tokens(self, ids: Tensor) -> int:
        """The number of tokens in a batch [rows, length, ...] that are not padding, as far as the ids show it; or patches."""
        pad, image = self.model.config.pad_id, self.model.config.image
        if image is not None:
            return ids.shape[0] * image.length
        return ids.shape[0] * ids.shape[1] if pad is None or ids.is_floating_point() else int((ids != pad).sum())


def _part_names(inputs: tuple[Tensor, ...] | Mapping[str, Tensor]) -> list[str | int]:
    return list(inputs) if isinstance(inputs, Mapping) else list(range(len(inputs)))
