"""Work that is recorded once as a CUDA graph and then launched as one: a deep model's step is thousands of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """A graph and the tensors that it reads its inputs from."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]


class Graphs:
    """Recordings by shape, all in one memory pool: what one needs while it runs, the next one uses again."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.recordings: dict[Hashable, Recording] = {}

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Around work that will be recorded, where it has gradients: on the stream of the recordings.

        Autograd keeps the stream on which it first saw a weight for as long as anything of that pass is alive, and a recording
        must not wait for another stream.
        """
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            yield
        usual.wait_stream(self.stream)

    def record(self, key: Hashable, work: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """Record `work(*inputs)` without doing it. It must have been done before on these shapes: its kernels must be there."""
        places = tuple(given.to("cuda", copy=True) for given in inputs)  # the caller's own are not written to
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                try:
                    work(*places)
                except BaseException as error:
                    cause = error  # the end of a broken recording raises another
                    raise
        except RuntimeError as error:
            # Its random numbers would wait for the end of this recording for ever.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise (cause or error) from None
        self.recordings[key] = Recording(graph, places)

    def replay(self, key: Hashable, inputs: tuple[Tensor, ...]) -> None:
        """Do what was recorded under `key`, on new inputs of the same shapes."""
        recording = self.recordings[key]
        for place, given in zip(recording.inputs, inputs, strict=True):
            place.copy_(given, non_blocking=True)
        recording.graph.replay()
