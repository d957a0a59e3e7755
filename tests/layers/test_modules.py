"""All modules and tensors of a model, as torch finds them; and a model that is put back as it was."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain

import pytest
import torch

import kilolayer as kl
from kilolayer.layers.modules import in_mode, modules_of, tensors_of


def test_they_are_those_that_torch_finds() -> None:
    model = kl.EncoderDecoder(12, 16, 4, 24, 2, 2, "admin", moe=kl.MoE(experts=3))
    assert {id(module) for module in modules_of(model)} == {id(module) for module in model.modules()}
    assert {id(tensor) for tensor in tensors_of(model)} == {id(each) for each in chain(model.parameters(), model.buffers())}


@pytest.mark.parametrize("training", [False, True])
def test_all_are_in_one_mode_inside_and_as_they_were_afterwards(training: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2)).train(not training)
    model[1].train(training)
    before = [module.training for module in model.modules()]
    inside = []
    with suppress(KeyError), in_mode(model, training=training):
        inside = [module.training for module in model.modules()]
        raise KeyError
    assert inside == [training] * 3
    assert [module.training for module in model.modules()] == before
