"""CUDA graphs: work is recorded once and then replayed in one launch, because a deep model's step is thousands of kernels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recording:
    """A CUDA graph, the buffers of its inputs, and its outputs, which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Any

    def replay(self, inputs: tuple[Tensor, ...]) -> Any:
        """Run the recorded work on new inputs of the same shapes."""
        for buffer, given in zip(self.inputs, inputs, strict=True):
            buffer.copy_(given, non_blocking=True)
        self.graph.replay()
        return self.output


class GraphPool:
    """The memory pool that recordings share (each reuses the temporary memory of the others), and their capture stream.

    recordings: by user of the pool, and then by shape key.
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
        """Free all recordings and their memory."""
        for recordings in self.recordings:
            recordings.clear()
        torch.cuda.empty_cache()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A context for the warm-up of work with gradients, which must run on the capture stream.

        Autograd remembers the stream on which it first saw a weight for as long as anything of that pass is alive, and a
        recording must not wait for another stream.
        """
        usual = torch.cuda.current_stream()
        self.stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            usual.wait_stream(self.stream)

    def record(self, work: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Recording:
        """Record `work(*inputs)` without running it. It must have run before on these shapes, so that its kernels exist."""
        if not self.is_used:
            # A memory pool cannot be reused after its last recording is gone.
            self.handle = torch.cuda.graph_pool_handle()
        buffers = tuple(given.to("cuda", copy=True) for given in inputs)  # the caller's stay untouched
        graph, output, cause = torch.cuda.CUDAGraph(), None, None
        # cuBLAS keeps one workspace per stream, and anyone may free it: what is recorded must use one in its own pool.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, self.handle, self.stream, capture_error_mode="thread_local"):
                try:
                    output = work(*buffers)
                except BaseException as error:
                    cause = error  # ending a failed capture raises another error
                    raise
        except RuntimeError as error:
            # Otherwise the generator would wait forever for the end of this capture.
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())
            raise (cause or error) from None
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        return Recording(graph, buffers, output)
