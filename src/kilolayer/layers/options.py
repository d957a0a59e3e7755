"""The options that all layers of a model share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kilolayer.config import bounded, check
from kilolayer.errors import OptionError, UnusedOptionError
from kilolayer.layers.norms.registry import check_norm_name

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swiglu"]
Positions = Literal["sinusoidal", "learned", "rotary", "xpos", "t5", "none"]


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Sizes, activation, norm, positions and dropout of the layers."""

    dim: int = bounded(512, least=1, most=2**20)
    """Width of the residual stream."""
    heads: int = bounded(8, least=1, most=2**20)
    """Number of attention heads; must divide dim."""
    kv_heads: int | None = bounded(None, least=1, most=2**20)
    """Number of key and value heads (grouped-query attention); must divide heads. Default: the same as heads."""
    ffn_dim: int = bounded(2048, least=1, most=2**24)
    """Hidden width of the feed-forward network."""
    activation: Activation = "relu"
    """Activation of the feed-forward network; gelu_tanh is GPT-2's approximation of GELU, silu is also known as swish."""
    norm: str = "layer"
    """The norm wherever the recipe puts one: layer (LayerNorm), rms (RMSNorm), or a class of your own as my_module:MyNorm."""
    norm_eps: float = bounded(1e-5, above=0, most=1)
    """Added to the variance inside a norm."""
    qk_norm: bool = False
    """Normalize queries and keys head by head, before rotation, by the model's norm over the head width. The heads of a layer
    share its weights. With LayerNorm or RMSNorm, attention logits are at first at most sqrt(head width)."""
    positions: Positions = "sinusoidal"
    """How positions are encoded: at the input (sinusoidal, learned), in attention (rotary, xpos, t5), or not at all."""
    max_length: int | None = bounded(None, least=1, most=2**24)
    """Maximum sequence length; required with learned positions, and only allowed with them."""
    dropout: float = bounded(0.0, least=0, below=1)
    """Dropout on the embedded input and on each branch before it is added to the residual stream."""
    attention_dropout: float = bounded(0.0, least=0, below=1)
    """Dropout on attention weights."""
    activation_dropout: float = bounded(0.0, least=0, below=1)
    """Dropout after the activation of the feed-forward network."""
    drop_path: float = bounded(0.0, least=0, below=1)
    """Probability that a sample skips a branch (stochastic depth); rises linearly with depth to this value in the last
    layer."""
    multiway: int | None = bounded(None, least=2, most=2)
    """Number of modalities with norms and projections of their own, for encoders: 2, or absent; see docs/multiway.md. The first
    `split` positions of a batch are of the first modality. Attention is over the whole sequence. Default: none."""

    def __post_init__(self) -> None:
        check(self)
        check_norm_name(self.norm)
        self._check_heads()
        self._check_positions()

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    def _check_heads(self) -> None:
        if self.dim % self.heads:
            divisors = [n for n in range(1, self.dim + 1) if self.dim % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - self.heads))[:3])
            raise OptionError(
                f"heads={self.heads} does not divide dim={self.dim}",
                fix=f"numbers of heads nearby that do: {', '.join(map(str, near))}",
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise OptionError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}",
                fix=f"allowed: {', '.join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)}",
            )

    def _check_positions(self) -> None:
        if self.positions == "learned":
            if self.max_length is None:
                raise OptionError(
                    "learned positions need max_length",
                    fix="set max_length to the longest sequence that the model will read",
                )
        elif self.max_length is not None:
            raise UnusedOptionError(
                f"max_length={self.max_length} has no effect with {self.positions!r} positions",
                fix='remove it, or choose positions="learned"',
                unused="max_length",
                beside=("positions",),
            )
        if self.positions == "sinusoidal" and self.dim % 2:
            raise OptionError(f"sinusoidal positions need an even dim, not {self.dim}", fix="change dim or positions")
        if self.positions in ("rotary", "xpos") and self.head_dim % 2:
            raise OptionError(
                f"{self.positions} positions need an even head width, not {self.head_dim} (dim / heads)",
                fix="change dim, heads or positions",
            )
