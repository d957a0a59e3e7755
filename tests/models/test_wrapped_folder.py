"""`kl.load_model` reads what our classes for Transformers save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError

pytest.importorskip("transformers")


def saved(folder: Path, recipe: str, dtype: torch.dtype = torch.float32) -> kl.Decoder:
    from kilolayer.huggingface.auto_classes import KilolayerForCausalLM

    torch.manual_seed(3)
    moe = kl.MoE(experts=2) if recipe == "sub_ln" else None
    model = kl.Decoder(13, 16, 2, 24, 2, recipe=recipe, moe=moe, dtype=dtype).eval()
    KilolayerForCausalLM.from_kilolayer(model).save_pretrained(folder)
    return model


# With experts, with constants by layer that no file holds, with buffers that files hold, with scalars.
@pytest.mark.parametrize("recipe", ["sub_ln", "lns", "admin", "rezero"])
def test_the_model_inside_is_read_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    model, tokens = saved(tmp_path, recipe, torch.float64), torch.arange(1, 7).view(2, 3)
    found = kl.load_model(tmp_path)
    assert type(found) is kl.Decoder
    assert not found.training
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert kl.load_model(kl.save(found, tmp_path / "again"))(tokens).logits.equal(model(tokens).logits)
    assert {weight.dtype for weight in kl.load_model(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "deepnorm")
    path = tmp_path / "config.json"
    table = json.loads(path.read_text())
    for change, words in (
        ({"model": {**table["model"], "dim": 32}}, "the weights do not fit"),
        ({"model": {**table["model"], "heads": 3}}, "config.json"),
        ({"model": [1]}, "no table of the model"),
    ):
        path.write_text(json.dumps({**table, **change}))
        with pytest.raises(KilolayerError, match=words):
            kl.load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    path.write_text(json.dumps(table))
    with pytest.raises(InputError, match=r"no model.safetensors"):
        kl.load_model(tmp_path)
