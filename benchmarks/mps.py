"""NVIDIA's multi-process service, under which processes that share a GPU run at the same time (speed/together.json)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress

from kilolayer.compare.machine import MPS, takes_turns


def start_service() -> Service | None:
    """Start the service for the processes that are started from now on, if it is installed and does not run yet."""
    if not takes_turns():
        return None
    try:
        service = Service()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"processes take turns on the GPU: {error}", flush=True)
        return None
    os.environ.update(service.environment)
    return service


class Service:
    """The service, from now until `stop`. environment: variables for its clients."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="mps-")
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{self.folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{self.folder}/log"}
        for path in self.environment.values():
            os.mkdir(path)
        subprocess.run([MPS, "-d"], env=os.environ | self.environment, check=True, timeout=30)

    def servers(self) -> list[str]:
        """The servers that clients have started, by process number."""
        return self._tell("get_server_list").split()

    def stop(self) -> None:
        """End the service; its clients have ended, or get five seconds."""
        with suppress(OSError, subprocess.SubprocessError):  # a service that does not end must not cost the results
            self._tell("quit -t 5")
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, words: str) -> str:
        environment = os.environ | self.environment
        done = subprocess.run(
            [MPS], input=f"{words}\n", env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout
