"""Decoding in memory of fixed shape and place, so that the encoder's pass and each step can be recorded as CUDA graphs.

The hypotheses of a sentence lie side by side in one row, as in layers/cache.py: at step t the k-th one writes its keys and
values into the entry t * width + k, and `seen` says which entries are its own past. So no key ever moves. The entries of a text
that a language model continues stand before these. Rows, lengths and sources are rounded up to a few sizes, and a room of each
size serves batch after batch.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kilolayer.generate.reader import BOS, PAD, allowed_length, log_probabilities, right_aligned
from kilolayer.layers.attention import CrossAttention
from kilolayer.layers.block import CrossBlock, View
from kilolayer.layers.cache import StaticKeys
from kilolayer.layers.mask import Mask
from kilolayer.models.decoder import Decoder
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.operators.step_attention import serves
from kilolayer.speed.graph import GraphPool
from kilolayer.speed.recorder import Piece, Recorder, memory_key

ROOMS = 4  # kept of each model


@dataclass(frozen=True)
class Size:
    """rows: sentences; width: hypotheses of each; steps: the longest output; source: the longest input, or text before."""

    rows: int
    width: int
    steps: int
    source: int

    @classmethod
    def holding(cls, rows: int, width: int, steps: int, source: int, positions: int | None = None) -> Size:
        """The smallest of a few sizes that holds all this; a source is not made longer than what has positions."""
        longest = -(-source // 32) * 32
        longest = longest if positions is None else max(source, min(longest, positions))
        return cls(1 << (rows - 1).bit_length(), width, -(-steps // 32) * 32, longest)


class Room:
    """The memory of a batch of one size, and in it the encoder's pass and one step of a model."""

    def __init__(self, model: EncoderDecoder | Decoder, size: Size) -> None:
        self._model, self.size = weakref.ref(model), size  # the model's rooms do not keep it
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
        # Whether the kernel of step_attention.py serves, or SDPA, which takes a bias of its own form.
        self.by_kernel = model.decoder.positions.bias is None and serves(
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
        """Positions of the text before the first step."""
        self.places = torch.zeros(len(self.begun), entries, dtype=torch.int64, device=self.device)
        """The position of each entry."""

    @property
    def model(self) -> EncoderDecoder | Decoder:
        """Whose room this is."""
        model = self._model()
        assert model is not None
        return model

    def enter(self, source: Tensor) -> None:
        """Begin anew with a batch of sources, int64 [rows, length]; `read_source` must follow before the first step."""
        assert self.source is not None
        rows, length = source.shape
        pad_id = self.model.config.pad_id
        self.source.fill_(PAD)
        self.source[:rows, :length] = source
        self.real.fill_(False)
        self.real[..., 0] = True  # a row without a sentence looks somewhere
        self.real[:rows, 0, 0, :length] = True if pad_id is None else source != pad_id
        self._begin()

    def read_source(self) -> None:
        """The encoder's pass, and each layer's keys and values of it. What a graph records."""
        assert isinstance(self.model, EncoderDecoder)
        states = self.model.encode(self.source, mask=self.real[:, 0, 0]).states
        for keys, block in zip(self.layers, self.model.decoder.blocks, strict=True):
            assert isinstance(block, CrossBlock)
            attention = block.cross_attention.f
            assert isinstance(attention, CrossAttention)
            assert keys.memory is not None
            for place, part in zip(keys.memory, attention.read(states, None), strict=True):
                place.copy_(part)

    def enter_text(self, text: Tensor) -> None:
        """Begin with the first step after a text, int64 [rows, length], its padding on the left; read it, if there is any."""
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
        self.places[:rows, here] = (real.cumsum(dim=1) - 1).clamp(min=0)
        self._place_steps()

    def _begin(self) -> None:
        self.step.zero_()
        self.seen.zero_()
        self.tokens.fill_(PAD)
        self.parents.copy_(self.itself)
        self._place_steps()

    def _place_steps(self) -> None:
        steps = torch.arange(self.size.steps, device=self.device).repeat_interleave(self.size.width)
        self.places[:, self.before :] = self.begun + steps

    def take_step(self) -> None:
        """What another graph records."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Read `tokens`, each after the hypothesis in `parents`: logits [rows, width, vocabulary]."""
        width, entries = self.size.width, self.seen.shape[2]
        self.seen.copy_(self.seen.gather(1, self.parents[..., None].expand(-1, -1, entries)))
        new = self.before + self.step * width + self.itself[0]
        self.seen.scatter_(2, new[None, :, None].expand(self.size.rows, -1, -1), True)
        decoder, places = self.model.decoder, (self.begun + self.step).expand(-1, width)
        mask = Mask(values=self.seen[:, None], step=self.by_kernel)
        reading = Mask(values=self.real, step=self.by_kernel)
        positions = decoder.positions
        if positions.bias is not None:
            mask = mask.with_bias(positions.bias(places, self.places))
        if not self.by_kernel:
            mask, reading = mask.as_bias(self.dtype), reading.as_bias(self.dtype)
        rotation = None if positions.rotary is None else positions.rotary(places, self.dtype)
        x = positions.at_input(self.model.embedding(self.tokens), places)
        logits = self.model.scores(decoder.run(x, View(mask, rotation, new, None, reading), self.layers).states)
        self.step += 1
        return logits


class ReadingRoom(Room):
    """A room whose step leaves the log-probabilities of all tokens."""

    def __init__(self, model: EncoderDecoder | Decoder, size: Size) -> None:
        super().__init__(model, size)
        precise = torch.promote_types(model.embedding.weight.dtype, torch.float32)
        self.found = torch.zeros(size.rows, size.width, self.vocabulary, dtype=precise, device=self.device)

    def take_step(self) -> None:
        self.found.copy_(log_probabilities(self.read()))
        self.parents.copy_(self.itself)


AnyRoom = TypeVar("AnyRoom", bound=Room)


class Rooms:
    """The rooms of one model, the last used ones kept, and their recordings in one memory pool."""

    def __init__(self) -> None:
        self.rooms: OrderedDict[Hashable, Room] = OrderedDict()
        self.recorder: Recorder | None = None

    def room(self, kind: type[AnyRoom], model: EncoderDecoder | Decoder, size: Size) -> AnyRoom:
        """A room of this size; a model whose weights have moved gets a new one."""
        key = _key(kind, model, size)
        if key not in self.rooms:
            while len(self.rooms) >= ROOMS:
                self._leave()
            try:
                self.rooms[key] = kind(model, size)
            except torch.OutOfMemoryError:
                while self.rooms:
                    self._leave()
                torch.cuda.empty_cache()
                self.rooms[key] = kind(model, size)
        self.rooms.move_to_end(key)
        room = self.rooms[key]
        assert isinstance(room, kind)
        return room

    def _leave(self) -> None:
        """Give up the room that was not used for the longest time."""
        _, old = self.rooms.popitem(last=False)
        if self.recorder is not None:
            self.recorder.forget([_reading(old), _stepping(old)])

    def enter(self, room: Room, source: Tensor) -> None:
        """Begin a new batch of sources, int64 [rows, length], in the room."""
        room.enter(source)
        self._run(room.device, _reading(room))

    def take_step(self, room: Room) -> None:
        """A step of the room."""
        self._run(room.device, _stepping(room))

    def _run(self, device: torch.device, piece: Piece) -> None:
        if self.recorder is None or self.recorder.device != device:
            pool = GraphPool(device) if device.type == "cuda" else None
            self.recorder = Recorder(device, "decoding runs", lambda text: warnings.warn(text, stacklevel=2), pool)
        self.recorder.run([piece])


def _reading(room: Room) -> Piece:
    return Piece((room, "read_source"), room.read_source)


def _stepping(room: Room) -> Piece:
    return Piece((room, "take_step"), room.take_step)


def _key(kind: type[Room], model: EncoderDecoder | Decoder, size: Size) -> Hashable:
    return kind, size, memory_key(model)


_rooms: weakref.WeakKeyDictionary[EncoderDecoder | Decoder, Rooms] = weakref.WeakKeyDictionary()


def rooms_of(model: EncoderDecoder | Decoder) -> Rooms:
    """The rooms that are kept as long as the model."""
    return _rooms.setdefault(model, Rooms())


class StaticReader:
    """Reads in a room; sentences that leave keep their row, whose output is ignored."""

    def __init__(self, model: EncoderDecoder | Decoder, source: Tensor, *, width: int, max_length: int) -> None:
        reads_source = isinstance(model, EncoderDecoder)
        text = source if reads_source else right_aligned(source)
        length = text.shape[1] if reads_source else text.shape[1] - 1
        self.first = source.new_full((len(source), 1), BOS) if reads_source else text[:, -1:]
        self.max_length = allowed_length(model, max_length, before=0 if reads_source else length)
        self.rooms = rooms_of(model)
        positions = model.config.max_length if reads_source else None
        size = Size.holding(len(source), width, self.max_length, length, positions)
        self.room = self.rooms.room(ReadingRoom, model, size)
        if reads_source:
            self.rooms.enter(self.room, source)
        else:
            self.room.enter_text(text[:, :-1])
        self.rows = torch.arange(len(source), device=source.device)

    def branch(self, parents: Tensor) -> None:
        self.room.parents[self.rows, : parents.shape[1]] = parents

    def read(self, tokens: Tensor) -> Tensor:
        self.room.tokens[self.rows, : tokens.shape[1]] = tokens
        self.rooms.take_step(self.room)
        return self.room.found[self.rows, : tokens.shape[1]]

    def keep(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]
