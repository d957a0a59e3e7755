"""Norms: their formulas, and a norm of a user's own through everything that a model meets."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import FoldError, InputError, KilolayerError, OptionError
from kilolayer.layers.norms.base import Norm, make_norm, norm_class
from kilolayer.layers.norms.registry import norm_names
from kilolayer.layers.options import LayerOptions
from kilolayer.models.fold import fold
from kilolayer.probe.norm_inputs import norm_inputs
from kilolayer.recipes.base import NORM, NormSpec, Plan
from kilolayer.runs.export import export
from kilolayer.speed.fast import fast_form, unfused_residuals
from kilolayer.speed.written import WrittenStack, unroll_for_cpu

OWN = "tests.layers.own_norm:MeanNorm"
SIZES: dict[str, Any] = {"dim": 8, "heads": 2, "ffn_dim": 12, "layers": 2, "vocab_size": 11, "norm": OWN}
TOKENS = torch.tensor([[3, 5, 2, 9], [4, 1, 7, 0]])


def build(shape: str = "encoder", recipe: str = "deepnorm", **options: Any) -> Any:
    model = kl.build_model({"shape": shape, "recipe": recipe, **SIZES, **options}, dtype=torch.float64, seed=0)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=weight.dtype)
    return model


@pytest.mark.parametrize("name", norm_names())
def test_every_norm_is_its_formula(name: str) -> None:
    norm: Any = make_norm(NORM, 6, LayerOptions(norm=name, norm_eps=1e-3)).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
    centred = x - x.mean(-1, keepdim=True) if name == "layer" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected * norm.weight)
    torch.testing.assert_close(norm_class(name).normalize(x, 1e-3), expected)


def test_a_plan_can_name_a_norm_and_its_eps() -> None:
    norm: Any = make_norm(NormSpec("rms", 0.25), 6, LayerOptions(norm="layer"))
    assert (norm.title, norm.eps) == ("RMSNorm", 0.25)
    assert isinstance(make_norm(None, 6, LayerOptions()), torch.nn.Identity)


def test_a_recipe_may_still_say_yes_and_no() -> None:
    assert Plan(pre_norm=True, out_norm=False) == Plan(pre_norm=NORM)  # pyright: ignore[reportArgumentType]


def test_unknown_norms_are_named() -> None:
    with pytest.raises(OptionError, match="did you mean 'layer'"):
        LayerOptions(norm="layr")
    with pytest.raises(InputError, match="is not a norm"):
        kl.Encoder(11, 8, 2, 12, 1, norm="pathlib:Path")
    with pytest.raises(InputError, match="no module"):
        kl.Encoder(11, 8, 2, 12, 1, norm="nowhere:Norm")


@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln", "peri_ln"])
def test_an_own_norm_is_wherever_the_recipe_puts_one(recipe: str) -> None:
    own, ours = build(recipe=recipe), build(recipe=recipe, norm="rms")
    assert own.state_dict().keys() == ours.state_dict().keys()
    assert {type(module).__name__ for module in own.modules() if isinstance(module, Norm)} == {"MeanNorm"}


def gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(TOKENS)
    (out.logits.square().sum() + out.router_loss).backward()
    return out.logits.detach(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("every_operator")
@pytest.mark.parametrize("recipe", ["deepnorm", "sub_ln", "peri_ln"])
@pytest.mark.parametrize("moe", [{}, {"moe": {"experts": 2}}], ids=["dense", "sparse"])
def test_it_trains_alike_in_plain_and_fast_form(recipe: str, moe: Any) -> None:
    model = build("decoder", recipe, **moe).train()
    expected, grads = gradients(model)
    form = fast_form(model)
    found, others = gradients(form)
    torch.testing.assert_close(found, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, msg=name)
    assert [form.decoder._inspections[layer].reason() for layer in range(2)] == [None, None]  # the layers ran by operators
    form.cast_weights(torch.bfloat16)
    assert all(text.endswith("because their norms are MeanNorms") for text in unfused_residuals(form))


def test_it_is_written_out_for_the_cpu() -> None:
    model = build("decoder", "peri_ln").eval()
    written = unroll_for_cpu(model)
    assert isinstance(written.decoder, WrittenStack)
    torch.testing.assert_close(written(TOKENS).logits, model(TOKENS).logits)


def test_its_inputs_are_measured() -> None:
    model = build(recipe="peri_ln")
    found = norm_inputs(model, lambda each: each(TOKENS).logits.sum())["encoder"]
    assert {"self_attention.pre_norm", "feedforward.post_norm"} <= found.keys()


def test_no_scale_is_moved_through_it() -> None:
    with pytest.raises(FoldError, match="its norms are MeanNorms"):
        fold(build())


def test_a_norm_without_a_common_form_is_refused_inside_experts() -> None:
    with pytest.raises(OptionError, match="no `normalize`"):
        build(recipe="sub_ln", moe={"experts": 2}, norm="tests.layers.own_norm:Tanh")
    build(recipe="deepnorm", moe={"experts": 2}, norm="tests.layers.own_norm:Tanh")


def test_the_modelling_file_of_an_exported_folder_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_file = pytest.importorskip("kilolayer.huggingface.auto_classes.module_file")
    module_file.write_module(tmp_path, "copied_norms.py", type(kl.recipes.get("pre_ln")), OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    copied: Any = importlib.import_module("copied_norms")
    model = build("decoder", "pre_ln").eval()
    twin = copied.build_model({"shape": "decoder", "recipe": "pre_ln", **SIZES}, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())
    assert not any(type(module) in map(type, model.modules()) for module in twin.modules() if "Norm" in type(module).__name__)
    torch.testing.assert_close(twin.eval()(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.slow
def test_a_run_with_it_is_trained_loaded_diagnosed_and_its_export_says_why(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for part in ("train", "valid", "test"):
        (texts / f"{part}.en").write_text("the dog sleeps\na cat sings\n" * 20)
        (texts / f"{part}.de").write_text("der Hund schläft\neine Katze singt\n" * 20, encoding="utf-8")
    config = {
        "model": {name: value for name, value in SIZES.items() if name != "vocab_size"},
        "data": {"folder": texts, "directions": ["en-de"], "valid": "valid", "test": "test"},
        "tokenizer": {"vocab_size": 34, "byte_fallback": False, "character_coverage": 1.0},
        "batches": {"tokens": 200},
    }
    run = kl.train(config, run=tmp_path / "run", train={"steps": 3, "lr": 1e-3, "warmup_steps": 2, "device": "cpu"})
    loaded = kl.load(tmp_path / "run")
    assert loaded.translate(["the dog sleeps"]) == run.translate(["the dog sleeps"])
    assert OWN in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(KilolayerError, match="its norms are MeanNorms"):
        export(loaded, to="ctranslate2", out=tmp_path / "exported")
    diagnosis = kl.diagnose(tmp_path / "run")
    assert "self_attention.out_norm" in diagnosis.measured.norm_inputs["encoder"]
