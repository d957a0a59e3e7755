"""An encoder that reads images: the shape of ViT, BEiT and MAE.

    x = [class_token, W p_1 + b, ..., W p_n + b] + positions,    states = Encoder(x)

It is an `Encoder` that is given embedded patches instead of tokens: layers, recipes, heads and fast forms are those of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from kilolayer import recipes
from kilolayer.errors import InputError
from kilolayer.layers.context import Sequences
from kilolayer.layers.embedding import check_range
from kilolayer.layers.grid_positions import Grid, StackGridPositions, make_grid_positions, placed
from kilolayer.layers.grid_positions import resampled as resampled  # the name under which tasks know it
from kilolayer.layers.patches import PatchEmbedding, to_patches
from kilolayer.layers.projection import Projection
from kilolayer.models.config import ModelConfig
from kilolayer.models.encoder import Encoder, states_at
from kilolayer.models.head import Head
from kilolayer.models.image_input import ImageInput
from kilolayer.models.map_head import MapHead
from kilolayer.models.options import ModelOptions, takes_options
from kilolayer.models.outputs import EncoderOutput
from kilolayer.models.patch_decoder import PatchDecoder
from kilolayer.models.upernet import MAP_HEADS, LinearMap, UperNet
from kilolayer.recipes.base import Plan, Recipe, Side
from kilolayer.recipes.role import Role


class ImageEncoder(Encoder):
    """An encoder of images, which reads their patches as a sequence. The options are those of `ModelConfig`.

    image: how images are divided. vocab_size: the number of outputs at each patch, such as the codes of a tokenizer or the
    pixels of a patch; None: none. head: scores whole images. map_head: scores every pixel.
    """

    image: ImageInput

    @takes_options
    def __init__(
        self,
        image: ImageInput,
        dim: int,
        heads: int,
        ffn_dim: int,
        layers: int,
        recipe: str | Recipe = recipes.DEFAULT,
        *,
        vocab_size: int | None = None,
        output_transform: bool = False,
        head: Head | None = None,
        map_head: MapHead | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        self._build(ModelConfig.of("encoder", {**locals(), **options}), options.get("device"), options.get("dtype"))

    def _allocate_input(self) -> None:
        config, image = self.config, self.config.image
        assert image is not None
        self.image, self.embedding, self.token_types = image, None, None
        gain, table = config.recipe.embedding_gain("encoder", config.depths), config.recipe.init_of(config.depths).table
        # As scaled token embeddings, patches of normalized pixels start with entries of about the recipe's gain.
        self.patches = PatchEmbedding(
            image.pixels,
            config.dim,
            class_token=image.class_token,
            mask_token=image.mask_token,
            std=gain * (image.pixels**-0.5 if table is None else table),
            token_std=self._token_std,
        )
        self.positions = make_grid_positions(config, image.grid, image.first_patch, self._token_std)

    def _allocate(self) -> None:
        super()._allocate()
        decoder, map_head = self.config.patch_decoder, self.config.map_head
        self.map_head = None if map_head is None else MAP_HEADS[map_head.kind](self.config, map_head)
        self.decoder_input = self.decoder = None
        if decoder is not None:
            self.decoder_input = Projection(self.config.dim, [(Role.HEAD, decoder.dim)], Plan())
            self.decoder = PatchDecoder.from_config(decoder, seed=0)

    def _stack_positions(self, side: Side) -> StackGridPositions:
        return StackGridPositions(self.config)

    @property
    def grid(self) -> Grid:
        """Rows and columns of patches in an image of the configured size."""
        return self.image.grid

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        images: Tensor,
        *,
        masked: Tensor | None = None,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
        hidden_states: bool = False,
        attention_weights: bool = False,
    ) -> EncoderOutput:
        """Encode a batch of images: states [batch, (1 +) patches, dim], the class token's first, and logits.

        images: [batch, channels, height, width], floating-point; height and width may differ from those of the configuration.
        masked: bool [batch, patches], True at patches that the mask token replaces.
        visible: int64 [batch, k], the patches that are read; the others are not, and states are [batch, (1 +) k, dim].
        positions: int64 [batch, k], the patches to predict; logits are then [batch, k, vocab_size], else at each patch. With a
        decoder, logits are what it predicts for each patch from the visible ones; with a map head, scores of all pixels,
        [batch, classes, height, width].
        hidden_states, attention_weights: return them too. With attention_weights, no fast form of the layers is used.
        """
        if positions is not None and visible is not None:
            raise InputError("positions has no effect on visible patches alone", fix="give masked=, or read .states")
        grid = self._grid_of(images)
        inputs = self._embed(images, grid, masked, visible)
        if positions is not None:
            self._check_positions(positions, inputs.states[:, self.image.first_patch :])
        if self.map_head is not None:
            of_depths = bool(self.map_head.depths) or hidden_states
            out = self._encode(inputs, None, hidden_states=of_depths, attention_weights=attention_weights)
            scores = self._pixel_scores(self.map_head, out, grid, visible)
            return replace(out, logits=scores, hidden_states=out.hidden_states if hidden_states else None)
        out = self._encode(inputs, positions, hidden_states=hidden_states, attention_weights=attention_weights)
        if visible is None or self.decoder is None or self.decoder_input is None:
            return out
        states = self.decoder_input(out.states).to(out.states.dtype)
        return replace(out, logits=self.decoder(states, visible, grid))

    def _pixel_scores(self, head: LinearMap | UperNet, out: EncoderOutput, grid: Grid, visible: Tensor | None) -> Tensor:
        if visible is not None:
            raise InputError("a map head needs the states of all patches", fix="remove visible")
        states = [(out.hidden_states or ())[depth] for depth in head.depths] or [out.states]
        size = (grid[0] * self.image.patch, grid[1] * self.image.patch)
        return head([each[:, self.image.first_patch :] for each in states], grid, size)

    def reconstruct(self, images: Tensor, visible: Tensor) -> Tensor:
        """What the decoder predicts for every patch from the visible ones: [batch, patches, vocab_size].

        images: [batch, channels, height, width]. visible: int64 [batch, k].
        """
        if self.decoder is None:
            raise InputError("this model has no decoder", fix="build it with the table [model.image.decoder]")
        logits = self(images, visible=visible).logits
        assert logits is not None
        return logits

    def _embed(self, images: Tensor, grid: Grid, masked: Tensor | None, visible: Tensor | None) -> Sequences:
        """The class token and the patches with their positions; of the patches, only those that are visible."""
        if masked is not None:
            self._check_masked(masked, len(images), grid)
        x = self.patches(to_patches(images, self.image.patch), masked)
        inputs = placed(self.positions(self.patches.with_class_token(x), grid), grid, self.image.first_patch)
        if visible is not None:
            read = self._with_class_token(visible, inputs.states)
            assert inputs.coordinates is not None
            inputs = Sequences(states_at(inputs.states, read), coordinates=inputs.coordinates[0][read])
        return replace(self._read(None, None, inputs.states, None, None), coordinates=inputs.coordinates)

    def _with_class_token(self, visible: Tensor, x: Tensor) -> Tensor:
        """The indices in x of the class token and of the visible patches: int64 [batch, (1 +) k]."""
        first = self.image.first_patch
        patches = x.shape[1] - first
        if visible.dtype != torch.int64 or visible.dim() != 2 or len(visible) != len(x) or not visible.shape[1]:
            raise InputError(
                f"visible is {visible.dtype} of shape {list(visible.shape)}",
                fix=f"give int64 of shape [batch, k], here [{len(x)}, k]",
            )
        check_range("visible", visible, patches)
        return F.pad(visible + first, (first, 0))

    def _logits(self, states: Tensor, real: Tensor | None, positions: Tensor | None) -> Tensor | None:
        patches = states if self.head is not None else states[:, self.image.first_patch :]
        return super()._logits(patches, real, positions)

    def _grid_of(self, images: Tensor) -> Grid:
        image = self.image
        if not isinstance(images, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"images are {type(images).__name__}", fix="convert them: torch.as_tensor(...)")
        if not images.is_floating_point():
            raise InputError(f"images are {images.dtype}", fix="give normalized floating-point pixels")
        if images.dim() != 4 or images.shape[1] != image.channels or 0 in images.shape:
            raise InputError(
                f"images have shape {list(images.shape)}", fix=f"allowed: [batch, {image.channels}, height, width]"
            )
        height, width = images.shape[2:]
        if height % image.patch or width % image.patch:
            raise InputError(
                f"images of {height} x {width} pixels are not divided by patches of {image.patch}",
                fix=f"resize them to multiples of {image.patch}",
            )
        return height // image.patch, width // image.patch

    def _check_masked(self, masked: Tensor, batch: int, grid: Grid) -> None:
        if self.patches.mask_token is None:
            raise InputError("this model has no mask token", fix="remove masked, or build it with image.mask_token = true")
        shape = [batch, grid[0] * grid[1]]
        if masked.dtype != torch.bool or list(masked.shape) != shape:
            raise InputError(
                f"masked is {masked.dtype} of shape {list(masked.shape)}", fix=f"give bool of shape [batch, patches], {shape}"
            )
