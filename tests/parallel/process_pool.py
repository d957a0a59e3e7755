"""Processes that wait for work: started once, given functions to run side by side, killed when one of them fails or hangs."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fork_server import SERVER

SECONDS = 120


class ProcessPool:
    """`run` calls a function on each process, with a process group of the first of them as its first argument."""

    def __init__(self, folder: Path, sizes: tuple[int, ...] = (1, 2, 4)) -> None:
        self.folder, self.sizes = folder, sizes
        self.started = 0
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.lines: list[Connection[Any, Any]] = []

    def run(self, function: Callable[..., None], size: int, *arguments: Any) -> None:
        """Raise what a process raised; a process that does not answer in time is killed, and the others with it."""
        if not self.processes:
            self._start()
        for line in self.lines:
            line.send((function, size, arguments))
        deadline, pending, faults = time.monotonic() + SECONDS, set(self.lines), list[str]()
        while pending and (answered := wait(pending, max(0.0, deadline - time.monotonic()))):
            for line in answered:
                assert isinstance(line, Connection)
                pending.remove(line)
                try:
                    fault = line.recv()
                except EOFError:
                    fault = "a process is gone"
                if fault is not None:
                    faults.append(fault)
                    deadline = min(deadline, time.monotonic() + 1)  # the others may be waiting for this one
        if faults or pending:
            self.stop()
            raise AssertionError("\n".join(faults) or f"{len(pending)} processes did not answer within {SECONDS} seconds")

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for line in self.lines:
            line.close()
        self.processes, self.lines = [], []

    def _start(self) -> None:
        self.started += 1
        store = f"file://{self.folder}/store-{self.started}"
        for rank in range(max(self.sizes)):
            ours, theirs = SERVER.Pipe()
            process = SERVER.Process(target=_serve, args=(rank, self.sizes, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(ours)


def _serve(rank: int, sizes: tuple[int, ...], store: str, line: Connection[Any, Any]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=SECONDS / 2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=max(sizes), timeout=timeout)
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in sizes}
    while True:
        function, size, arguments = line.recv()
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed", category=UserWarning)  # a processor without bf16
        try:
            torch.manual_seed(rank)
            if rank < size:
                function(groups[size], *arguments)
            line.send(None)
        except BaseException:
            line.send(f"rank {rank} of {size}:\n{traceback.format_exc()}")
