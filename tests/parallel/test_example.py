"""The script of the documentation, as torchrun runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import kilolayer as kl

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_trains_and_saves_a_whole_model(tmp_path: Path) -> None:
    out = tmp_path / "experts.safetensors"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/expert_parallel.py"), "--steps", "2", "--experts", "4", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "step 2: loss" in ended.stdout
    whole = kl.Decoder(32, 64, 4, 128, 4, recipe="sub_ln", moe=kl.MoE(experts=4))
    whole.load_state_dict(safetensors.torch.load_file(out))
    assert whole(torch.ones(1, 3, dtype=torch.int64)).logits.isfinite().all()
