"""The weights of a model that reads images, for images of another size."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from kilolayer.layers.grid_positions import resampled
from kilolayer.models.config import ModelConfig
from kilolayer.models.trainable_config import TrainableConfig

POSITIONS = "positions.weight"


def regridded(
    weights: Mapping[str, Tensor], there: ModelConfig | TrainableConfig, here: ModelConfig | TrainableConfig
) -> dict[str, Tensor]:
    """The weights of the model `there`, with its learned positions resampled for the grid of patches of the model `here`.

    Those of models that do not both read images, or do not both learn their positions, are left as they are.
    """
    if isinstance(there, TrainableConfig) or isinstance(here, TrainableConfig):
        return dict(weights)
    learned = there.positions == here.positions == "learned"
    if there.image is None or here.image is None or not learned:
        return dict(weights)
    return {**weights, POSITIONS: resampled(weights[POSITIONS], there.image.grid, here.image.grid)}
