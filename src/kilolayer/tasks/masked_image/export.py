"""What an exported masked image model adds: example code. No Auto class of Transformers has BEiT's outputs at each patch."""

from __future__ import annotations

from kilolayer.huggingface.task_export import TaskExport
from kilolayer.tasks.masked_image.config import MaskedImageConfig


class MaskedImageExport(TaskExport[MaskedImageConfig]):
    """The part of a masked image model."""

    def transformers_use(self, folder: str, architecture: str, trust: bool) -> str:
        image = self.config.model.image
        assert image is not None
        (height, width), (rows, columns) = image.sides, image.grid
        return (
            f"import torch\nfrom transformers import {architecture}\n\n"
            f'model = {architecture}.from_pretrained("{folder}")\n'
            f"pixels = torch.zeros(1, {image.channels}, {height}, {width})  # from -1 to 1\n"
            f"masked = torch.rand(1, {rows * columns}) < {self.config.masking.share}  # the patches that are hidden\n"
            "print(model(pixels, bool_masked_pos=masked).logits.shape)"
        )
