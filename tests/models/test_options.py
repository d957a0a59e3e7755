"""The options of the constructors, for type checkers, against those of `ModelConfig`."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import kilolayer as kl
from kilolayer.models.options import ModelOptions


@pytest.mark.parametrize("model", [kl.Encoder, kl.ImageEncoder, kl.Decoder, kl.EncoderDecoder])
def test_shared_options_have_the_types_of_the_configuration(model: type) -> None:
    types = {field.name: field.type for field in dataclasses.fields(kl.ModelConfig)}
    shown = inspect.signature(model).parameters
    shared = set(ModelOptions.__annotations__) - {"device", "dtype"}
    assert {name: shown[name].annotation for name in shared} == {name: types[name] for name in shared}
