"""The batch that all systems read."""

from __future__ import annotations

import torch
from jobs import Setting
from torch import Tensor

PAD = 0


def batch(setting: Setting, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Source, target and labels, int64 [rows, length]: random, without special tokens; a language model has no source.

    If the setting is padded, rows have different lengths in source and target, followed by PAD.
    """
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(4, setting.vocabulary, (2, setting.rows, setting.length + 1), generator=noise)
    source, target, labels = ids[0, :, 1:], ids[1, :, :-1], ids[1, :, 1:]
    if setting.padded:
        lengths = torch.tensor(setting.lengths)
        positions = torch.arange(setting.length)
        behind_source, behind_target = (
            positions >= lengths[torch.randperm(setting.rows, generator=noise)][:, None] for _ in range(2)
        )
        source = source.masked_fill(behind_source, PAD)
        target, labels = (each.masked_fill(behind_target, PAD) for each in (target, labels))
    return source.contiguous().to(device), target.contiguous().to(device), labels.contiguous().to(device)
