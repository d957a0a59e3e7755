"""Work that is recorded once as a CUDA graph and then launched as one: a deep model's step is thousands of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """A graph, the buffers that it reads its inputs from, and what the recorded work returned, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any

    def replay(self, inputs: tuple[Tensor, ...]) -> Any:
        """Do what was recorded on new inputs of the same shapes."""
        for buffer, given in zip(self.inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output


class GraphPool:
    """The memory that recordings share, what one needs while it runs, the next one uses again, and the stream of their capture.

    recordings: those of each user of the pool, by shape key.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.recordings: list[dict[Hashable, Recording]] = []

    @property
    def is_used(self) -> bool:
        """Whether there is any recording."""
        return any(self.recordings)

    def clear(self) -> None:
        """Give the memory of all recordings back."""
        for recordings in self.recordings:
            recordings.clear()
        torch.cuda.empty_cache()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Around the warm-up of work that has gradients: on the stream of the capture.

        Autograd keeps the stream on which it first saw a weight for as long as anything of that pass is alive, and a recording
        must not wait for another stream.
        """
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            usual.wait_stream(self.stream)

    def record(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Recording:
        """Record `work(*inputs)` without doing it. It must have been done before on these shapes: its kernels must be there."""
        if not self.is_used:
            # Memory whose last recording is gone takes no new one.
            self.handle = torch.cuda.graph_pool_handle()
        buffers = tuple(given.to("cuda", copy=True) for given in inputs)  # the caller's own are not written to
        graph, output, cause = torch.cuda.CUDAGraph(), None, None
        try:
            with torch.cuda.graph(graph, self.handle, self.stream, capture_error_mode="thread_local"):
                try:
                    output = work(*buffers)
                except BaseException as error:
                    cause = error  # the end of a broken capture raises another
                    raise
        except RuntimeError as error:
            # Its random numbers would wait for the end of this capture for ever.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise (cause or error) from None
        return Recording(graph, buffers, output)
