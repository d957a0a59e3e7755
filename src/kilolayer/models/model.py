"""The base class of the three model shapes: building, initialization, precision, and reading a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from kilolayer.errors import InputError, OptionError, shown
from kilolayer.layers.context import Sequences
from kilolayer.layers.convolution import Convolution, Doubling, PreciseConvolution
from kilolayer.layers.embedding import Embedding, VocabularyProjection
from kilolayer.layers.initialize import draw_seed, initialize, new_tensors
from kilolayer.layers.patches import PatchProjection
from kilolayer.layers.position import Positions
from kilolayer.layers.projection import PreciseProjection, Projection
from kilolayer.layers.scale import LearnedScale
from kilolayer.layers.stack import Stack
from kilolayer.models.config import ModelConfig
from kilolayer.models.device import check_device, check_dtype
from kilolayer.models.output import NEVER, ScoreBias
from kilolayer.models.sharded import is_shard
from kilolayer.models.trainable import Trainable
from kilolayer.moe.experts import ExpertProjection
from kilolayer.moe.layer import make_sparsity
from kilolayer.moe.router import Router
from kilolayer.recipes.base import Side
from kilolayer.renamed import renamed_method

if TYPE_CHECKING:
    from kilolayer.parallel.peers import Peers

logger = logging.getLogger(__name__)

IN_PRODUCTS = (Embedding, PatchProjection, VocabularyProjection, Projection, ExpertProjection, Convolution, Doubling)
"""The modules whose weights `cast_weights` converts to the dtype of matrix products."""
ALWAYS_PRECISE = (Router, PreciseProjection, PreciseConvolution)
"""The modules whose weights are never converted, even if they are of one of these kinds."""


class Model(Trainable):
    """A model with its configuration and its seed, which together determine every initial weight."""

    config: ModelConfig
    seed: int
    may_lack_calibration: bool
    output_bias: ScoreBias | None
    sharers: Peers | None = None
    """The processes that share the model's matrices."""

    def __new__(cls, *values: Any, **options: Any) -> Self:
        if values and isinstance(values[0], ModelConfig | Mapping):
            fix = f"build it with kl.build_model(config): {cls.__name__} takes the options themselves"
            raise OptionError(f"vocab_size is {type(values[0]).__name__}", where=f"in {cls.__name__}(...)", fix=fix)
        return super().__new__(cls)

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
    ) -> Self:
        """Build the model that `config` describes. Without a seed, one is drawn from torch's default generator."""
        model = cls.__new__(cls)
        model._build(config, device, dtype, seed)
        return model

    def _build(
        self,
        config: ModelConfig,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        seed: int | None = None,
    ) -> None:
        """Allocate all modules, and initialize them unless they are on the meta device."""
        if device is not None:
            check_device(device)
        if dtype is not None:
            check_dtype(dtype)
        super().__init__()
        self.config = config
        self.seed = draw_seed() if seed is None else seed
        self.may_lack_calibration = config.recipe.calibration() is not None
        with new_tensors(device, dtype):
            self._allocate()
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.initialize()

    def _allocate(self) -> None:
        raise NotImplementedError

    def initialize(self) -> Self:
        """Reset every weight to its initial value, which depends only on the configuration and the seed."""
        initialize(self, self.seed)
        return self

    def materialize(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Allocate and initialize the weights of a model that was built on the meta device."""
        if not all(parameter.is_meta for parameter in self.parameters()):
            raise InputError("this model already has its weights", fix="use .to(device), or initialize() to start again")
        check_device(device)
        if dtype is not None:
            check_dtype(dtype)
        # Not to_empty: empty_like on the meta device imports sympy, which would add half a second to each command.
        self._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype, device=device))
        if dtype is not None:
            self.to(dtype)
        return self.initialize()

    def cast_weights(self, dtype: torch.dtype, residual: torch.dtype = torch.float32) -> dict[nn.Parameter, Tensor]:
        """Convert matrices and embedding tables to `dtype`, in which products are then computed.

        residual: the dtype of the states between layers, and so of norms and scales. Routers and heads are not changed.
        Returns the original values of all parameters that were converted.
        """
        check_dtype(dtype)
        check_dtype(residual)
        return cast_weights(self, dtype, residual)

    initialise = renamed_method("initialise", "initialize")
    materialise = renamed_method("materialise", "materialize")
    lower = renamed_method("lower", "cast_weights")

    def stacks(self) -> list[Stack]:
        """The stacks, in the order in which they run."""
        return [module for module in self.children() if isinstance(module, Stack)]

    def _warn_uncalibrated(self) -> None:
        """Warn once if training begins with residual scales that were never calibrated."""
        self.may_lack_calibration = False
        scales = [stack.sublayers()[-1].skip for stack in self.stacks()]
        if all(isinstance(scale, LearnedScale) and bool((scale.weight == scale.init).all()) for scale in scales):
            logger.warning(
                "the recipe %s trains without its calibration: call kilolayer.calibrate(model, batch) before the first step",
                self.config.recipe.name,
            )

    def _stack(self, side: Side) -> Stack:
        config = self.config
        scored = side == config.depths.sides[-1] and config.predicts
        return Stack(
            config,
            config.recipe,
            side,
            config.depths,
            final_norm=config.final_norm,
            first_eps=config.first_eps(side),
            input_norm=config.embedding_norm,
            sparsity=make_sparsity(config.moe),
            output_factor=config.recipe.output_factor(config.dim) if scored else 1.0,
            positions=self._stack_positions(side),
        )

    def _stack_positions(self, side: Side) -> Positions:
        return Positions(self.config, side)

    def _embedding(self, vocab_size: int, side: Side) -> Embedding:
        config = self.config
        return Embedding(
            vocab_size,
            config.dim,
            config.pad_id,
            scaled=config.scale_embeddings,
            gain=config.recipe.embedding_gain(side, config.depths) * self._table_gain,
        )

    def _vocabulary(self, vocab_size: int) -> VocabularyProjection:
        gain = self.config.recipe.vocabulary_gain() * self._table_gain
        return VocabularyProjection(vocab_size, self.config.dim, gain=gain)

    @property
    def _table_gain(self) -> float:
        """The factor on the deviation of the vocabulary's tables, dim^-1/2, from the recipe's initial weights."""
        deviation = self.config.recipe.init_of(self.config.depths).table
        return 1.0 if deviation is None else deviation * self.config.dim**0.5

    @property
    def _token_std(self) -> float:
        """The initial deviation of learned vectors at the input of an image model: its tokens and positions."""
        deviation = self.config.recipe.init_of(self.config.depths).table
        return self.config.dim**-0.5 if deviation is None else deviation

    def _output_bias(self) -> ScoreBias | None:
        size = self.config.vocab_size
        return ScoreBias(size) if size is not None and self.config.output_bias else None

    def _finish_scores(self, scores: Tensor) -> Tensor:
        """Add the output bias to the logits [..., vocabulary], and rule out tokens that are never predicted."""
        if self.output_bias is not None:
            scores = self.output_bias(scores)
        if self.config.first_predicted:
            scores[..., : self.config.first_predicted] = NEVER
        return scores

    def _read(
        self,
        embedding: Embedding | None,
        ids: Tensor | None,
        embeddings: Tensor | None,
        mask: Tensor | None,
        segments: Tensor | None,
    ) -> Sequences:
        """Check and embed a batch; exactly one of `ids` and `embeddings` must be given."""
        if self.may_lack_calibration and self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._warn_uncalibrated()
        if (ids is None) == (embeddings is None):
            raise InputError("give either token ids or embeddings")
        for name, given in (("token ids", ids), ("embeddings", embeddings), ("mask", mask), ("segments", segments)):
            if given is not None and not isinstance(given, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InputError(f"{name}: {shown(given)} is not a tensor", fix="convert it: torch.tensor(...)")
        if embeddings is not None:
            if not embeddings.is_floating_point():
                raise InputError(f"embeddings are {embeddings.dtype}", fix="give floating-point vectors, or ids as tokens")
            if embeddings.dim() != 3 or embeddings.shape[-1] != self.config.dim:
                raise InputError(
                    f"embeddings have shape {list(embeddings.shape)}", fix=f"allowed: [batch, length, {self.config.dim}]"
                )
            if 0 in embeddings.shape:
                raise InputError(f"the batch is empty: shape {list(embeddings.shape)}", fix="give at least one position")
            states = embeddings
        elif embedding is None:
            raise InputError("this model has no vocabulary", fix="give embeddings=, or build it with vocab_size")
        else:
            assert ids is not None
            states = embedding(ids)
            if mask is None and self.config.pad_id is not None:
                mask = ids != self.config.pad_id
        for name, given in (("mask", mask), ("segments", segments)):
            if given is not None and given.shape != states.shape[:2]:
                raise InputError(
                    f"{name} has shape {list(given.shape)}", fix=f"allowed: [batch, length], here {list(states.shape[:2])}"
                )
        if mask is not None and mask.dtype != torch.bool:
            raise InputError(f"mask is {mask.dtype}", fix="give bool: True at real positions, False at padding")
        return Sequences(states, mask, segments)


def cast_weights(layers: nn.Module, dtype: torch.dtype, residual: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """As `Model.cast_weights`, for any part of a model; shards stay as they are, and are cast when they are gathered."""
    precise = {}
    for module in layers.modules():
        if isinstance(module, ALWAYS_PRECISE):
            continue
        if isinstance(module, Embedding | PatchProjection):
            module.states_dtype = residual
        own = dtype if isinstance(module, IN_PRODUCTS) else residual
        for parameter in module.parameters(recurse=False):
            if parameter.dtype != own and not is_shard(parameter):
                precise[parameter] = parameter.data
                parameter.data = parameter.data.to(own)
    return precise
