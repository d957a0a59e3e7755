"""MAE's decoder (He et al. 2022): it predicts every patch of an image from the states of the visible ones.

x = [s_class, (s_i where patch i is visible, else mask_token)] + positions,    outputs = U Stack(x)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kilolayer.layers.grid_positions import Grid, StackGridPositions, make_grid_positions, placed
from kilolayer.layers.initialize import KeyedGenerator
from kilolayer.models.model import Model
from kilolayer.recipes.base import Side


class PatchDecoder(Model):
    """A small stack, with the recipe of the encoder, in which every position attends to every other.

    Its configuration is that of an image encoder of its own width and depth: `ModelConfig.patch_decoder`.
    """

    def _allocate(self) -> None:
        config, image = self.config, self.config.image
        assert image is not None
        assert config.vocab_size is not None
        self.first_patch = image.first_patch
        self.mask_token = nn.Parameter(torch.empty(config.dim))
        self.positions = make_grid_positions(config, image.grid, image.first_patch, self._token_std)
        self.encoder = self._stack("encoder")
        self.vocabulary = self._vocabulary(config.vocab_size)
        self.output_bias = self._output_bias()

    def reset_parameters(self, generator: KeyedGenerator | None = None) -> None:
        generator = generator or KeyedGenerator()
        generator.normal_(self.mask_token, self._token_std, "mask_token")

    def _stack_positions(self, side: Side) -> StackGridPositions:
        return StackGridPositions(self.config)

    def forward(self, states: Tensor, visible: Tensor, grid: Grid) -> Tensor:
        """Outputs at every patch of the grid, [batch, patches, vocab_size].

        states: of the class token, if there is one, and of the visible patches, [batch, (1 +) k, dim].
        visible: int64 [batch, k].
        """
        own, seen = states[:, : self.first_patch], states[:, self.first_patch :]
        masks = self.mask_token.to(seen.dtype).expand(len(seen), grid[0] * grid[1], -1)
        patches = masks.scatter(1, visible[:, :, None].expand_as(seen), seen)
        x = self.positions(torch.cat([own, patches], dim=1), grid)
        out = self.encoder(placed(x, grid, self.first_patch))
        return self._finish_scores(self.vocabulary(out.states[:, self.first_patch :]))
