"""A model written out for decoding on the CPU, where calling modules costs as much as the arithmetic of a few rows.

    y = N_out( skip * x + branch * N_post( f( in_scale * N_pre(x) ) ) )

Scales and shifts around a matrix are folded into it once: in_scale and the head scales into columns, branch into rows (or into
N_post), shifts into biases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kilolayer.errors import OptionError
from kilolayer.layers.attention import Attention, CrossAttention, SelfAttention
from kilolayer.layers.block import Block, CrossBlock
from kilolayer.layers.cache import KeyCache
from kilolayer.layers.context import AttentionContext
from kilolayer.layers.embedding import Embedding, VocabularyProjection
from kilolayer.layers.feedforward import FeedForward
from kilolayer.layers.mask import Mask
from kilolayer.layers.projection import Projection
from kilolayer.layers.scale import Constant, HeadScale, LayerConstant, LearnedScale, Shift
from kilolayer.layers.stack import Stack, StackOutput
from kilolayer.layers.stream import LayerState, Pair, state_of
from kilolayer.layers.sublayer import Sublayer, add_scaled
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.speed.fast import FastEmbedding, FastVocabularyProjection
from kilolayer.speed.fast_stack import FastStack
from kilolayer.speed.inspection import global_hook, is_known_part
from kilolayer.speed.int8_product import Int8Product, why_not_int8
from kilolayer.speed.packed_product import PackedProduct
from kilolayer.speed.product import is_kernel_norm

AnyModel = TypeVar("AnyModel", bound=EncoderDecoder | Decoder)

# A layer that contains any other module is not written out.
SUBLAYER_PARTS = {"f", "pre_norm", "post_norm", "out_norm", "in_scale", "skip", "branch", "dropout", "drop_path"}
ATTENTION_PARTS = {"input_shift", "query_norm", "key_norm", "head_scale", "inner_norm", "output"}
PARTS: dict[type[nn.Module], set[str]] = {
    SelfAttention: ATTENTION_PARTS | {"query_key_value"},
    CrossAttention: ATTENTION_PARTS | {"query", "key_value"},
    FeedForward: {"input_shift", "input", "activation_shift", "activation", "dropout", "inner_norm", "output_shift", "output"},
}

REWRITTEN = {Stack, FastStack, Embedding, FastEmbedding, VocabularyProjection, FastVocabularyProjection}
"""The parts of a model that are replaced; with any other, such as a subclass, the model is not written out."""

LEAST_INT8 = 2**18  # elements; for smaller matrices, products of few rows are as fast in fp32

RowFunction = Callable[[Tensor], Tensor]
Addition = Callable[[Tensor, Tensor], Tensor]
WrittenFunction = Callable[[Tensor, int, AttentionContext, KeyCache | None], Tensor]


@torch.no_grad()
def unroll_for_cpu(model: AnyModel, *, int8: bool = False) -> AnyModel:
    """A faster form of `model` for decoding on the CPU: the same function of its current weights, without dropout.

    Returns the model itself if it is not on the CPU, contains unknown modules, or is already written out.
    int8: round large matrices and their inputs to 8-bit integers, which changes the function slightly.
    """
    if int8 and not (_is_known(model) and model.embedding.weight.dtype == torch.float32):
        raise OptionError(
            "this model cannot be computed in int8", fix="use fp32: int8 supports only dense fp32 models on the CPU"
        )
    if int8 and (reason := why_not_int8()) is not None:
        raise OptionError(f"int8 cannot be used, because {reason}", fix="use fp32")
    if isinstance(model.decoder, WrittenStack) or not _is_known(model):
        return model
    written = copy.copy(model)
    written._modules = dict(model._modules)
    for name, module in model.named_children():
        if isinstance(module, Stack):
            written._modules[name] = WrittenStack.of(module)
    written.vocabulary = WrittenVocabulary(model.embedding if model.vocabulary is None else model.vocabulary)
    if int8:
        _round_products(written)
    return written


def _round_products(written: EncoderDecoder | Decoder) -> None:
    """Replace products with large matrices by int8 products."""
    stacks = [stack for stack in written.stacks() if isinstance(stack, WrittenStack)]
    functions = [sublayer.f for stack in stacks for sublayers in stack.written for sublayer in sublayers]
    large = [
        (holder, name, part)
        for holder in (*functions, written.vocabulary)
        for name, part in vars(holder).items()
        if isinstance(part, PackedProduct) and part.weight.numel() >= LEAST_INT8
    ]
    if not large:
        raise OptionError(f"int8 has no effect: no matrix of the model has {LEAST_INT8:,} elements", fix="use fp32")
    for holder, name, product in large:
        setattr(holder, name, Int8Product(product.weight, product.bias))


def _is_known(model: EncoderDecoder | Decoder) -> bool:
    """Whether stacks and vocabulary consist of modules that can be written out, in one dtype, with no hook or method of a
    user's own."""
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.float64)}):
        return False
    if global_hook() is not None or any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return False
    parts = [*model.stacks(), model.embedding if model.vocabulary is None else model.vocabulary]
    if not all(type(part) in REWRITTEN for part in parts):
        return False
    if any("forward" in vars(module) for part in parts for module in part.modules()):
        return False
    blocks = [block for stack in model.stacks() for block in stack.blocks]
    return all(type(block) in (Block, CrossBlock) and all(map(_is_known_sublayer, _sublayers(block))) for block in blocks)


def _sublayers(block: nn.Module) -> list[Sublayer]:
    assert isinstance(block, Block)
    return block.sublayers()


def _is_known_sublayer(sublayer: Sublayer) -> bool:
    parts, function = ({name for name, _ in module.named_children()} for module in (sublayer, sublayer.f))
    scaled_before_norm = isinstance(sublayer.f, Attention) and not (
        _is_absent(sublayer.f.head_scale) or _is_absent(sublayer.f.inner_norm)
    )
    ours = all(is_known_part(type(module)) for module in sublayer.modules() if module is not sublayer)
    return ours and parts | {"branch"} == SUBLAYER_PARTS and function == PARTS.get(type(sublayer.f)) and not scaled_before_norm


class WrittenVocabulary(VocabularyProjection):
    """The output projection: [batch, length, dim] to logits [batch, length, vocabulary]."""

    def __init__(self, table: Embedding | VocabularyProjection) -> None:
        nn.Module.__init__(self)
        self.weight = table.weight
        # The largest matrix; packing pays off from two rows on.
        self.product = PackedProduct(table.weight.detach(), None, fewest_rows=2)

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states.flatten(0, 1)).unflatten(0, states.shape[:2])


class WrittenStack(Stack):
    """A stack with written-out layers. Positions, masks, stream and final norm are those of the plain stack."""

    written: list[list[WrittenSublayer]]

    @classmethod
    def of(cls, stack: Stack) -> WrittenStack:
        """Build it from `stack`, whose modules it shares, except for folded or packed copies of matrices."""
        written = cls.__new__(cls)
        written.__dict__.update(stack.__dict__)
        written.written = [[WrittenSublayer(sublayer) for sublayer in _sublayers(block)] for block in stack.blocks]
        return written

    def run(
        self, x: Tensor, context: AttentionContext, caches: Sequence[KeyCache] | None = None, *, hidden_states: bool = False
    ) -> StackOutput:
        if hidden_states or self.training:
            return super().run(x, context, caches, hidden_states=hidden_states)
        batch, rows = len(x), x.flatten(0, 1)
        history = self.stream.begin(rows)
        for index, sublayers in enumerate(self.written):
            state = self.stream.read(history, index)
            for sublayer in sublayers:
                state = sublayer(state, batch, context, caches[index] if caches else None)
            history = self.stream.write(history, state)
        return StackOutput(self.top(self.stream.end(history)).view(x.shape))


class WrittenSublayer:
    """One residual sublayer: rows [batch * length, dim] to the same shape, or a pair of such tensors with a second state."""

    def __init__(self, sublayer: Sublayer) -> None:
        branch = _scale(sublayer.branch)
        self.f = _function(sublayer.f, _scale(sublayer.in_scale), branch if _is_absent(sublayer.post_norm) else 1.0)
        self.pre_norm = _norm(sublayer.pre_norm)
        self.post_norm = _norm(sublayer.post_norm, branch)
        self.out_norm = _norm(sublayer.out_norm)
        self.add = _addition(_scale(sublayer.skip))
        self.plan = sublayer.plan

    def __call__(self, x: LayerState, batch: int, context: AttentionContext, cache: KeyCache | None) -> LayerState:
        branch = self.post_norm(self.f(self.pre_norm(state_of(x)), batch, context, cache))
        if not isinstance(x, Pair):
            return self.out_norm(self.add(branch, x))
        second = add_scaled(x.second, self.plan.second_out, branch)
        total = add_scaled(self.add(branch, x.x), self.plan.second_in, x.second)
        return Pair(self.out_norm(total), second)


class WrittenAttention:
    """The part common to self- and cross-attention: softmax(q k^T / sqrt(head_dim)) v and the output projection."""

    def __init__(self, attention: Attention, branch: Tensor | float) -> None:
        self.heads, self.key_heads, self.head_dim = attention.heads, attention.key_heads, attention.head_dim
        self.query_norm, self.key_norm = _norm(attention.query_norm), _norm(attention.key_norm)
        self.inner_norm = _norm(attention.inner_norm)
        columns: Tensor | float = 1.0
        if isinstance(attention.head_scale, HeadScale):
            columns = attention.head_scale.weight.flatten().repeat_interleave(self.head_dim)
        self.output = _product(attention.output, columns=columns, rows=branch)

    def split_heads(self, x: Tensor, batch: int) -> Tensor:
        """[batch * length, heads * head_dim] to [batch, heads, length, head_dim]."""
        return x.view(batch, -1, x.shape[1] // self.head_dim, self.head_dim).transpose(1, 2)

    def attend(self, query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, mask: Mask) -> Tensor:
        """Attention and output projection: to rows [batch * queries, dim]."""
        heads_BHLD = F.scaled_dot_product_attention(
            query_BHLD,
            key_BHLD,
            value_BHLD,
            attn_mask=mask.values,
            is_causal=mask.causal,
            enable_gqa=self.key_heads != self.heads,
        )
        return self.output(self.inner_norm(heads_BHLD.transpose(1, 2).reshape(-1, self.heads * self.head_dim)))


class WrittenSelfAttention(WrittenAttention):
    """Each position attends to the positions that the mask allows."""

    def __init__(self, attention: SelfAttention, in_scale: Tensor | float, branch: Tensor | float) -> None:
        super().__init__(attention, branch)
        self.query_key_value = _product(attention.query_key_value, columns=in_scale, before=attention.input_shift)

    def __call__(self, x: Tensor, batch: int, context: AttentionContext, cache: KeyCache | None) -> Tensor:
        parts = self.split_heads(self.query_key_value(x), batch)
        query, key, value = parts.split((self.heads, self.key_heads, self.key_heads), dim=1)
        query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = context.rotation.rotate_query(query), context.rotation.rotate_key(key)
        if cache is not None:
            key, value = cache.append(key, value, context.past)
        return self.attend(query, key, value, context.mask)


class WrittenCrossAttention(WrittenAttention):
    """Each target position attends to the encoder's output."""

    def __init__(self, attention: CrossAttention, in_scale: Tensor | float, branch: Tensor | float) -> None:
        super().__init__(attention, branch)
        self.query = _product(attention.query, columns=in_scale, before=attention.input_shift)
        self.key_value = _product(attention.key_value)

    def __call__(self, x: Tensor, batch: int, context: AttentionContext, cache: KeyCache | None) -> Tensor:
        assert context.memory is not None
        assert context.memory_mask is not None
        query = self.query_norm(self.split_heads(self.query(x), batch))
        key, value = self.project_memory(context.memory, cache)
        return self.attend(query, key, value, context.memory_mask)

    def project_memory(self, memory: Tensor, cache: KeyCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the source, contiguous for each head; cached at the first step."""
        if cache is not None and cache.memory is not None:
            return cache.memory
        parts = self.split_heads(self.key_value(memory.flatten(0, 1)), len(memory)).contiguous()
        key, value = parts.chunk(2, dim=1)
        key = self.key_norm(key)
        if cache is not None:
            cache.memory = (key, value)
        return key, value


class WrittenFeedForward:
    """W_2 N_inner(phi(W_1 x))."""

    def __init__(self, feedforward: FeedForward, in_scale: Tensor | float, branch: Tensor | float) -> None:
        self.input = _product(
            feedforward.input, columns=in_scale, before=feedforward.input_shift, after=feedforward.activation_shift
        )
        relu = isinstance(feedforward.activation, nn.ReLU)
        self.activation: RowFunction = torch.relu_ if relu else feedforward.activation.forward
        self.inner_norm = _norm(feedforward.inner_norm)
        self.output = _product(feedforward.output, rows=branch, before=feedforward.output_shift)

    def __call__(self, x: Tensor, batch: int, context: AttentionContext, cache: KeyCache | None) -> Tensor:
        return self.output(self.inner_norm(self.activation(self.input(x))))


def _function(f: nn.Module, in_scale: Tensor | float, branch: Tensor | float) -> WrittenFunction:
    match f:
        case SelfAttention():
            return WrittenSelfAttention(f, in_scale, branch)
        case CrossAttention():
            return WrittenCrossAttention(f, in_scale, branch)
        case FeedForward():
            return WrittenFeedForward(f, in_scale, branch)
        case _:
            raise TypeError(f"{type(f).__name__} is not written out")


def _product(
    projection: Projection,
    *,
    columns: Tensor | float = 1.0,
    rows: Tensor | float = 1.0,
    before: nn.Module | None = None,
    after: nn.Module | None = None,
) -> PackedProduct:
    """The product rows * (W (columns * x + before) + b + after), folded into one matrix and one bias.

    rows, columns: vectors or numbers; before, after: shift modules or identities.
    """
    weight, bias = projection.weight.detach(), None if projection.bias is None else projection.bias.detach()
    shift = sum((each.bias * part for each, part in ((before, weight.sum(dim=1)), (after, 1.0)) if isinstance(each, Shift)))
    if isinstance(shift, Tensor):
        bias = shift.expand(len(weight)) if bias is None else bias + shift
    if not _is_one(columns):
        weight = weight * columns
    if not _is_one(rows):
        weight = weight * torch.as_tensor(rows, dtype=weight.dtype).reshape(-1, 1)
        bias = None if bias is None else bias * rows
    return PackedProduct(weight, bias)


def _norm(norm: nn.Module, gain: Tensor | float = 1.0) -> RowFunction:
    """The norm of rows, times `gain`."""
    if _is_absent(norm):
        return _unchanged
    if not is_kernel_norm(norm):
        return norm.forward if _is_one(gain) else lambda x: norm(x) * gain
    weight = norm.weight.detach() * gain
    if isinstance(norm, nn.RMSNorm):
        return partial(F.rms_norm, normalized_shape=norm.normalized_shape, weight=weight, eps=norm.eps)
    shape, bias, eps = norm.normalized_shape, norm.bias.detach() * gain, norm.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _is_absent(part: nn.Module) -> bool:
    return isinstance(part, nn.Identity)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _addition(skip: Tensor | float) -> Addition:
    """A function that computes y + skip * x in place of y."""
    if isinstance(skip, Tensor):
        return lambda y, x: y.addcmul_(x, skip)
    return lambda y, x: y.add_(x, alpha=skip)


def _scale(scale: nn.Module) -> Tensor | float:
    """The factor of a scale module: a vector [dim] or a number."""
    match scale:
        case Constant():
            return scale.value
        case LayerConstant():
            return float(scale.value)
        case LearnedScale():
            return scale.weight.detach() if scale.weight.dim() else float(scale.weight)
        case _:
            return 1.0


def _is_one(scale: Tensor | float) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0
