"""Decoding in buffers of fixed shape and address, so that the encoder's pass and each step can be recorded as CUDA graphs.

All hypotheses of a sentence share one row, as in layers/cache.py: at step t the k-th one writes its keys and values into entry
t * width + k, and `seen` marks the entries of its own past, so keys never move. If a language model continues a text, the
entries of the text come first. Batch sizes, lengths and source lengths are rounded up to a few sizes, and the buffers of each
size are reused from batch to batch.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kilolayer.layers.attention import CrossAttention
from kilolayer.layers.block import CrossBlock
from kilolayer.layers.context import TokenPositions, make_context, make_rotation
from kilolayer.layers.mask import Mask
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runtime.reader import PAD
from kilolayer.runtime.recorder import WorkItem
from kilolayer.speed.fast import fast_form
from kilolayer.speed.fast_context import FastContext
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.graph_recorder import GraphRecorder, memory_key
from kilolayer.speed.operators.step_attention import can_run_step_attention
from kilolayer.speed.static_keys import StaticKeys

SIZES = 4
"""Number of batch sizes whose buffers are kept for each model."""


@dataclass(frozen=True)
class Size:
    """rows: sentences; width: hypotheses per sentence; steps: longest output; source: longest source, or text to continue."""

    rows: int
    width: int
    steps: int
    source: int

    @classmethod
    def smallest_for(cls, rows: int, width: int, steps: int, source: int, positions: int | None = None) -> Size:
        """The smallest of a few sizes that fits; a source is not padded beyond the model's maximum number of positions."""
        longest = -(-source // 32) * 32
        longest = longest if positions is None else max(source, min(longest, positions))
        return cls(1 << (rows - 1).bit_length(), width, -(-steps // 32) * 32, longest)


class StaticDecoder:
    """The buffers for batches of one size, and the encoder's pass and the decoding step of a model in these buffers."""

    def __init__(self, model: EncoderDecoder | Decoder, size: Size) -> None:
        self.model, self.size = model, size
        self.vocabulary, self.device = model.embedding.weight.shape[0], model.embedding.weight.device
        self.dtype = model.decoder.product_dtype
        reads_source = isinstance(model, EncoderDecoder)
        self.before = 0 if reads_source else size.source
        layers, entries = len(model.decoder.blocks), self.before + size.steps * size.width
        config = model.config
        shape = (layers, 2, size.rows, config.key_heads)
        kept = torch.zeros(*shape, entries, config.head_dim, dtype=self.dtype, device=self.device)
        read = torch.zeros(*shape, size.source, config.head_dim, dtype=self.dtype, device=self.device) if reads_source else None
        self.layers = [StaticKeys(kept[layer], None if read is None else read[layer]) for layer in range(layers)]
        # Whether step_attention.py supports this size; otherwise SDPA, which takes a float bias instead of a bool mask.
        self.by_kernel = model.decoder.positions.bias is None and can_run_step_attention(
            self.device, self.dtype, size.width * config.heads // config.key_heads, config.head_dim
        )
        self.source = torch.full((size.rows, size.source), PAD, device=self.device) if reads_source else None
        self.real = torch.ones(size.rows, 1, 1, size.source, dtype=torch.bool, device=self.device)
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.tokens = torch.full((size.rows, size.width), PAD, device=self.device)
        self.itself = torch.arange(size.width, device=self.device).expand(size.rows, -1).contiguous()
        self.parents = self.itself.clone()
        self.seen = torch.zeros(size.rows, size.width, entries, dtype=torch.bool, device=self.device)
        self.begun = torch.zeros(1 if reads_source else size.rows, 1, dtype=torch.int64, device=self.device)
        """Number of positions of the text before the first step."""
        self.position_ids = torch.zeros(len(self.begun), entries, dtype=torch.int64, device=self.device)
        """The position of each entry."""

    def start_batch(self, source: Tensor) -> None:
        """Start a new batch of sources, int64 [rows, length]; `read_source` must follow before the first step."""
        assert self.source is not None
        rows, length = source.shape
        pad_id = self.model.config.pad_id
        self.source.fill_(PAD)
        self.source[:rows, :length] = source
        self.real.fill_(False)
        self.real[..., 0] = True  # an empty row needs something to attend to
        self.real[:rows, 0, 0, :length] = True if pad_id is None else source != pad_id
        self._begin()

    def read_source(self) -> None:
        """Run the encoder and compute each layer's keys and values of the source. Recorded as a graph."""
        assert isinstance(self.model, EncoderDecoder)
        states = self.model.encode(self.source, mask=self.real[:, 0, 0]).states
        for keys, block in zip(self.layers, self.model.decoder.blocks, strict=True):
            assert isinstance(block, CrossBlock)
            attention = block.cross_attention.f
            assert isinstance(attention, CrossAttention)
            assert keys.memory is not None
            for buffer, part in zip(keys.memory, attention.project_memory(states), strict=True):
                buffer.copy_(part)

    def start_texts(self, text: Tensor) -> None:
        """Start a new batch of texts to continue, int64 [rows, length], padded on the left; read them, if not empty."""
        assert isinstance(self.model, Decoder)
        self.begun.zero_()
        self._begin()
        rows, length = text.shape
        if not length:
            return
        real, cache = text != PAD, self.model.new_cache(length)
        self.model(text, mask=real, cache=cache)
        here = slice(self.before - length, self.before)
        for keys, read in zip(self.layers, cache.layers, strict=True):
            assert read.keys is not None
            assert read.values is not None
            keys.keys[:rows, :, here], keys.values[:rows, :, here] = read.keys, read.values
        self.seen[:rows, :, here] = real[:, None]
        self.begun[:rows] = real.sum(dim=1, keepdim=True)
        self.position_ids[:rows, here] = (real.cumsum(dim=1) - 1).clamp(min=0)
        self._set_step_positions()

    def _begin(self) -> None:
        self.step.zero_()
        self.seen.zero_()
        self.tokens.fill_(PAD)
        self.parents.copy_(self.itself)
        self._set_step_positions()

    def _set_step_positions(self) -> None:
        steps = torch.arange(self.size.steps, device=self.device).repeat_interleave(self.size.width)
        self.position_ids[:, self.before :] = self.begun + steps

    def take_step(self) -> None:
        """One decoding step. Recorded as a graph."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Read `tokens`, each of which continues the hypothesis in `parents`; return logits [rows, width, vocabulary]."""
        width, entries = self.size.width, self.seen.shape[2]
        self.seen.copy_(self.seen.gather(1, self.parents[..., None].expand(-1, -1, entries)))
        new = self.before + self.step * width + self.itself[0]
        self.seen.scatter_(2, new[None, :, None].expand(self.size.rows, -1, -1), True)
        decoder, ids = self.model.decoder, (self.begun + self.step).expand(-1, width)
        token_positions, of_source = (
            TokenPositions(ids, self.position_ids, Mask(values=self.seen[:, None])),
            Mask(values=self.real),
        )
        x = decoder.add_positions(self.model.embedding(self.tokens), ids)
        if self.by_kernel:
            rotation = make_rotation(decoder.positions, token_positions, self.dtype)
            context = FastContext(token_positions.mask, rotation, new, memory_mask=of_source, step=True)
        else:
            plain = make_context(decoder.positions, token_positions, self.dtype, past=new, memory_mask=of_source)
            context = FastContext(plain.mask, plain.rotation, plain.past, memory_mask=plain.memory_mask)
        logits = self.model.scores(decoder.run(x, context, self.layers).states)
        self.step += 1
        return logits


AnyDecoder = TypeVar("AnyDecoder", bound=StaticDecoder)


class StaticDecoders:
    """The static decoders of one model (the most recently used are kept), and their recordings in one memory pool."""

    def __init__(self) -> None:
        self.decoders: OrderedDict[Hashable, StaticDecoder] = OrderedDict()
        self.recorder: GraphRecorder | None = None

    def decoder(self, kind: type[AnyDecoder], model: EncoderDecoder | Decoder, size: Size) -> AnyDecoder:
        """The decoder of this size; a new one if the model's weights have moved in memory or have been replaced."""
        key = _key(kind, model, size)
        if key not in self.decoders:
            while len(self.decoders) >= SIZES:
                self._drop_oldest()
            form = fast_form(model)
            # A fast form is its own form; it is copied, because a reference to the model, which is the key, keeps it alive.
            form = copy.copy(form) if form is model else form
            try:
                self.decoders[key] = kind(form, size)
            except torch.OutOfMemoryError:
                while self.decoders:
                    self._drop_oldest()
                torch.cuda.empty_cache()
                self.decoders[key] = kind(form, size)
        self.decoders.move_to_end(key)
        decoder = self.decoders[key]
        assert isinstance(decoder, kind)
        return decoder

    def _drop_oldest(self) -> None:
        """Drop the least recently used decoder."""
        _, old = self.decoders.popitem(last=False)
        if self.recorder is not None:
            self.recorder.drop([_reading(old), _stepping(old)])

    def start_batch(self, decoder: StaticDecoder, source: Tensor) -> None:
        """Start a new batch of sources, int64 [rows, length], in the decoder."""
        decoder.start_batch(source)
        self._run(decoder.device, _reading(decoder))

    def take_step(self, decoder: StaticDecoder) -> None:
        """Run one step of the decoder."""
        self._run(decoder.device, _stepping(decoder))

    def _run(self, device: torch.device, piece: WorkItem) -> None:
        if self.recorder is None or self.recorder.device != device:
            pool = GraphPool(device) if device.type == "cuda" else None
            self.recorder = GraphRecorder(device, "decoding runs", lambda text: warnings.warn(text, stacklevel=2), pool)
        self.recorder.run([piece])


def _reading(decoder: StaticDecoder) -> WorkItem:
    return WorkItem((decoder, "read_source"), decoder.read_source)


def _stepping(decoder: StaticDecoder) -> WorkItem:
    return WorkItem((decoder, "take_step"), decoder.take_step)


def _key(kind: type[StaticDecoder], model: EncoderDecoder | Decoder, size: Size) -> Hashable:
    return kind, size, memory_key(model)


_decoders: weakref.WeakKeyDictionary[EncoderDecoder | Decoder, StaticDecoders] = weakref.WeakKeyDictionary()


def decoders_of(model: EncoderDecoder | Decoder) -> StaticDecoders:
    """The static decoders of a model, kept for as long as the model exists."""
    if model not in _decoders:
        _decoders[model] = StaticDecoders()
    return _decoders[model]
