"""The code of a page as a script under accelerate, as its launcher starts it. Run on each process."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

DOCS = Path(__file__).parents[2] / "docs"
SHARDS = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
"""What `accelerate launch` sets with --use_fsdp and the options that the pages name."""


def run_page(group: dist.ProcessGroup, page: str, parallel: str, folder: str) -> None:
    """Run the code of a page in a folder, in fp64. parallel: "none", "ddp" or "fsdp"."""
    warnings.simplefilter("default")  # other libraries' own
    rank, size = str(dist.get_rank()), str(group.size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ACCELERATE_USE_CPU": "true"}
    with pytest.MonkeyPatch.context() as patch:
        for name in SHARDS:
            patch.delenv(name, raising=False)
        for name, value in ({} if parallel == "none" else launched | (SHARDS if parallel == "fsdp" else {})).items():
            patch.setenv(name, value)
        _shard_on_cpus(patch)
        patch.chdir(folder)
        torch.set_default_dtype(torch.float64)
        try:
            names: dict[str, Any] = {}
            exec("\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)), names)
            accelerator = names["trainer"].accelerator if "trainer" in names else names["accelerator"]
            assert accelerator.is_fsdp2 is (parallel == "fsdp")
            assert accelerator.num_processes == group.size()
        finally:
            torch.set_default_dtype(torch.float32)
            _forget_state()
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)


def _shard_on_cpus(patch: pytest.MonkeyPatch) -> None:
    """Let accelerate shard on CPUs, as it does on GPUs; by itself it makes copies there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        plugin = options.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin

    patch.setattr(AcceleratorState, "__init__", init)


def _forget_state() -> None:
    """Accelerate's state is one for a whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
