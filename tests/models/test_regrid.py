from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kilolayer.layers.patches import to_patches
from kilolayer.models.regrid import repatched


@pytest.mark.parametrize(("old", "new"), [(4, 12), (4, 6), (2, 7), (3, 3)])
def test_a_patch_that_is_scaled_up_has_the_same_vector(old: int, new: int) -> None:
    images = torch.randn(2, 3, 2 * old, 3 * old, dtype=torch.float64)
    weight = torch.randn(5, 3 * old * old, dtype=torch.float64)
    patches = to_patches(images, old)
    scaled = F.interpolate(patches.view(-1, 3, old, old), size=(new, new), mode="bilinear").reshape(2, 6, -1)
    torch.testing.assert_close(scaled @ repatched(weight, old, new).T, patches @ weight.T)


def test_smaller_patches_have_the_nearest_projection() -> None:
    weight = torch.randn(5, 2 * 64)
    found = repatched(weight, 8, 4)
    assert found.shape == (5, 32)
    assert found.dtype == weight.dtype
    eye = torch.eye(64).view(64, 1, 8, 8)
    scaling = F.interpolate(eye, size=(4, 4), mode="bilinear", antialias=True).flatten(1)
    for channel in range(2):
        given, ours = weight.view(5, 2, 64)[:, channel], found.view(5, 2, 16)[:, channel]
        best = torch.linalg.lstsq(scaling, given.T).solution.T
        torch.testing.assert_close(ours, best, rtol=1e-4, atol=1e-4)
