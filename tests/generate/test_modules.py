"""All modules and tensors of a model, as torch finds them; and a model that is put back as it was."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain

import torch
from small_translators import sources, translator

import kilolayer as kl
from kilolayer.generate.config import SearchConfig
from kilolayer.generate.modules import evaluation, modules_of, tensors_of
from kilolayer.generate.search import generate


def test_they_are_those_that_torch_finds() -> None:
    model = translator(moe=kl.MoE(experts=3), recipe="admin")
    assert {id(module) for module in modules_of(model)} == {id(module) for module in model.modules()}
    assert {id(tensor) for tensor in tensors_of(model)} == {id(each) for each in chain(model.parameters(), model.buffers())}


def test_a_search_leaves_each_module_as_it_was() -> None:
    model = translator(dropout=0.5).train()
    model.encoder.eval()
    before = [module.training for module in model.modules()]
    source = sources([4, 7])
    found = [generate(model, source, SearchConfig(beam=3)) for _ in range(2)]
    assert found[0] == found[1]
    assert [module.training for module in model.modules()] == before


def test_inside_nothing_is_in_training() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 2)).train()
    inside = []
    with suppress(KeyError), evaluation(model):
        inside = [module.training for module in model.modules()]
        raise KeyError
    assert inside == [False] * 3
    assert all(module.training for module in model.modules())
