"""Patches of images against loops: how they are cut, projected and masked."""

from __future__ import annotations

import torch

from kilolayer.layers.patches import PatchEmbedding, from_patches, to_patches


def test_patches_are_cut_row_by_row_and_flattened_by_channel() -> None:
    images = torch.randn(2, 3, 6, 9)
    found = to_patches(images, 3)
    assert found.shape == (2, 6, 27)
    for image in range(2):
        for row in range(2):
            for column in range(3):
                block = images[image, :, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
                assert torch.equal(found[image, 3 * row + column], block.flatten())
    assert torch.equal(from_patches(found, (2, 3), 3), images)


def test_the_projection_is_a_convolution() -> None:
    embedding = PatchEmbedding(48, 8, class_token=True, mask_token=True, std=0.1, token_std=0.1).double()
    with torch.no_grad():
        for weight in embedding.parameters():
            weight.normal_()
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64)
    kernel = embedding.projection.weight.view(8, 3, 4, 4)
    expected = torch.nn.functional.conv2d(images, kernel, embedding.projection.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embedding(to_patches(images, 4)), expected, rtol=1e-12, atol=1e-12)
    masked = torch.tensor([[True, False, False, True, False, False], [False] * 6])
    found = embedding(to_patches(images, 4), masked)
    for image in range(2):
        for patch in range(6):
            vector = embedding.mask_token if masked[image, patch] else expected[image, patch]
            torch.testing.assert_close(found[image, patch], vector, rtol=1e-12, atol=1e-12)
