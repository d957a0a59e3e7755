"""Work that is recorded once as a CUDA graph and then launched as one: a deep model's step is thousands of small kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
        self.pool = torch.cuda.graph_pool_handle()
        self.recordings: dict[Hashable, Recording] = {}

    def record(self, key: Hashable, work: Callable[..., None], inputs: tuple[Tensor, ...]) -> None:
        """Record `work(*inputs)` without doing it. It must have been done before on these shapes: its kernels must be there."""
        places = tuple(given.to("cuda") for given in inputs)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work(*places)
        except RuntimeError:
            # Its random numbers would wait for the end of this recording for ever.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        self.recordings[key] = Recording(graph, places)

    def replay(self, key: Hashable, inputs: tuple[Tensor, ...]) -> None:
        """Do what was recorded under `key`, on new inputs of the same shapes."""
        recording = self.recordings[key]
        for place, given in zip(recording.inputs, inputs, strict=True):
            place.copy_(given, non_blocking=True)
        recording.graph.replay()
