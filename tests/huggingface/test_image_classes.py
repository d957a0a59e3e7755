"""Image encoders and Transformers' ViT and BEiT: the same function with the same weights, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import kilolayer as kl
from kilolayer.data.drawn_images import drawn_images
from kilolayer.errors import InputError, OptionError
from kilolayer.huggingface.form import NoPlainForm, find_form
from kilolayer.huggingface.weights import to_theirs

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
}
IMAGES = torch.randn(2, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MASKED = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.4
TABLE: dict[str, Any] = {"vocab_size": 11, "use_mask_token": True, "use_absolute_position_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTModel", {}),
    "vit classifier": ("ViTForImageClassification", {"hidden_act": "gelu_new"}),
    "vit wide": ("ViTForImageClassification", {"image_size": [12, 8]}),
    "beit": ("BeitModel", {}),
    "beit with a class token's norm": ("BeitModel", {"use_mean_pooling": False, **TABLE}),
    "beit classifier": ("BeitForImageClassification", {"use_absolute_position_embeddings": True}),
    "beit first": ("BeitForImageClassification", {"use_mean_pooling": False, "layer_scale_init_value": 0.0, **TABLE}),
    "beit masked": ("BeitForMaskedImageModeling", TABLE),
    "beit masked, plain": ("BeitForMaskedImageModeling", {"layer_scale_init_value": 0.0, **TABLE}),
}


def foreign(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, "ViTConfig" if name.startswith("ViT") else "BeitConfig")(**{**SIZES, **options})
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn_like(weight) + (1 if weight.dim() == 1 else 0))
    return model


@pytest.mark.matrix(3)
@pytest.mark.parametrize("case", CASES)
def test_an_imported_model_is_the_same_function(case: str, tmp_path: Path) -> None:
    name, options = CASES[case]
    theirs = foreign(name, options)
    theirs.save_pretrained(tmp_path / "model")
    ours = kl.from_huggingface(tmp_path / "model", dtype=torch.float64)
    assert isinstance(ours, kl.ImageEncoder)
    theirs = theirs.double().eval()
    images = IMAGES[..., :8] if case == "vit wide" else IMAGES
    masked = MASKED if options.get("use_mask_token") and not name.endswith("Classification") else None
    ours.requires_grad_()
    out = ours(images, masked=masked)
    expected = theirs(images, **({} if masked is None else {"bool_masked_pos": masked}))
    if "For" in name:
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-10, atol=1e-10)
        loss, their_loss = out.logits.sin().sum(), expected.logits.sin().sum()
    else:
        torch.testing.assert_close(out.states, expected.last_hidden_state, rtol=1e-10, atol=1e-10)
        loss, their_loss = out.states.sin().sum(), expected.last_hidden_state.sin().sum()
    loss.backward()
    their_loss.backward()
    first = next(weight for name, weight in theirs.named_parameters() if name.endswith("patch_embeddings.projection.weight"))
    found = ours.patches.projection.weight.grad
    assert found is not None
    torch.testing.assert_close(found.view(first.shape), first.grad, rtol=1e-10, atol=1e-10)
    token = next(weight for name, weight in theirs.named_parameters() if name.endswith("embeddings.cls_token"))
    assert ours.patches.class_token is not None
    torch.testing.assert_close(ours.patches.class_token.grad, token.grad.flatten(), rtol=1e-10, atol=1e-10)


IMAGE: dict[str, Any] = {"size": 12, "patch": 4}
OURS: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 24, "layers": 3, "recipe": "pre_ln", "positions": "learned"}
FITTING: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {"head": {"outputs": 5, "pooler": "none"}, "activation": "gelu", "drop_path": 0.1},
    "BeitForImageClassification": {
        "head": {"outputs": 5, "pool": "mean", "pooler": "norm"},
        "final_norm": False,
        "recipe": "layer_scale",
        "image": {**IMAGE, "mask_token": True},
    },
    "BeitForMaskedImageModeling": {"vocab_size": 7, "output_bias": True, "image": {**IMAGE, "mask_token": True}},
}


@pytest.mark.parametrize("architecture", FITTING)
def test_a_model_of_their_form_is_exported(architecture: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kl.build_model({"image": IMAGE, **OURS, **FITTING[architecture]}, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * torch.randn_like(weight)
    form = find_form(model, 64)
    assert not isinstance(form, NoPlainForm), form.why
    config = form.foreign.foreign_config(model.config)
    assert config["architectures"] == [architecture]
    cls = getattr(transformers, architecture)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    from safetensors.torch import save_file

    save_file(to_theirs(form.foreign.entries(model.config), model.state_dict()), tmp_path / "model.safetensors")
    theirs, report = cls.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    masked = {"masked": MASKED} if architecture.startswith("BeitForMasked") else {}
    with torch.no_grad():
        expected = theirs.eval()(IMAGES, **({"bool_masked_pos": MASKED} if masked else {})).logits
        torch.testing.assert_close(model(IMAGES, **masked).logits, expected, rtol=1e-10, atol=1e-10)
        back = kl.from_huggingface(tmp_path, dtype=torch.float64)
        torch.testing.assert_close(back(IMAGES, **masked).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": "deepnorm"}, "not plain Pre-LN"),
        ({"recipe": "sub_ln"}, "not plain Pre-LN"),
        ({"positions": "sinusoidal"}, "positions are sinusoidal"),
        ({"image": {**IMAGE, "class_token": False}, "head": {"pool": "mean"}}, "no images with a class token"),
        ({"head": {"outputs": 5}}, 'pooler="none"'),
        ({"norm": "rms"}, "its norms are"),
        ({"head": "none", "map_head": {}}, "map head"),
        ({"head": "none", "vocab_size": 48, "image": {**IMAGE, "decoder": {}}}, "decoder of hidden patches"),
    ],
)
def test_other_models_are_refused_with_the_reason(options: dict[str, Any], words: str) -> None:
    table = {"image": IMAGE, **OURS, "head": {"outputs": 5, "pooler": "none"}, **options}
    form = find_form(kl.build_model(table), 64)
    assert isinstance(form, NoPlainForm)
    assert words in form.why


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    drawn_images(folder, 12, {"train": 18, "test": 6})
    return folder


def table_of(images: Path, task: str, /, **model: Any) -> dict[str, Any]:
    sources = {"train": str(images / "train"), "size": 12, "rows": 6}
    sources |= {"train_labels": str(images / "train_labels")} if task == "segment" else {}
    sizes = {**OURS, "image": {"patch": 4}, **model}
    return {"task": task, "model": sizes, "images": sources, "train": {"steps": 1, "device": "cpu"}}


@pytest.mark.parametrize("size", [12, 16])
@pytest.mark.parametrize("case", ["vit classifier", "beit with a class token's norm"])
def test_a_run_starts_from_their_folder(case: str, size: int, images: Path, tmp_path: Path) -> None:
    name, options = CASES[case]
    foreign(name, {**options, "num_labels": 6}).save_pretrained(tmp_path / "model")
    train: dict[str, Any] = {"start_from": str(tmp_path / "model"), "steps": 1, "lr": 1e-20, "device": "cpu"}
    sources = {"train": str(images / "train"), "size": size, "rows": 6}
    ours = kl.train({"task": "classify_image", "images": sources, "train": train}, run=tmp_path / "run").model.state_dict()
    theirs = kl.from_huggingface(tmp_path / "model", dtype=torch.float32).state_dict()
    assert ours.keys() - theirs.keys() == (
        set() if name == "ViTForImageClassification" else {"head.output.weight", "head.output.bias"}
    )
    taken = ours.keys() & theirs.keys() - ({"positions.weight"} if size != 12 else set())
    for key in taken:
        torch.testing.assert_close(ours[key], theirs[key])


def test_a_run_of_masked_images_is_exported_as_beit(images: Path, tmp_path: Path) -> None:
    run = kl.train(table_of(images, "masked_image", recipe="layer_scale"), run=tmp_path / "run")
    found = kl.export(run, to="huggingface", out=tmp_path / "out")
    assert found.architecture == "BeitForMaskedImageModeling"
    theirs, report = transformers.BeitForMaskedImageModeling.from_pretrained(found.folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours, pixels = run.model, IMAGES.float()
    assert isinstance(ours, kl.ImageEncoder)
    with torch.no_grad():
        out = ours(pixels, masked=MASKED)
        torch.testing.assert_close(theirs(pixels, bool_masked_pos=MASKED).logits, out.logits, rtol=1e-5, atol=1e-5)
        body = transformers.AutoModel.from_pretrained(found.folder)
        states = body(pixels, bool_masked_pos=MASKED).last_hidden_state
        normed = torch.nn.functional.layer_norm(states, (16,), *theirs.layernorm.parameters(), eps=ours.config.norm_eps)
        torch.testing.assert_close(normed, out.states, rtol=1e-5, atol=1e-5)
    card = (found.folder / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0].replace('"out"', repr(str(found.folder)))
    shown: list[Any] = []
    exec(code, {"print": shown.append})
    assert shown == [(1, 9, 48)]


def test_an_exported_classifier_names_the_classes_and_reads_images_as_the_run_does(images: Path, tmp_path: Path) -> None:
    run: Any = kl.train(table_of(images, "classify_image", recipe="pre_ln"), run=tmp_path / "run")
    found = kl.export(run, to="huggingface", out=tmp_path / "out")
    card = (found.folder / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("print(")[0].replace('"out"', repr(str(found.folder)))
    made: dict[str, Any] = {}
    exec(code, made)
    levels = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    smooth = Image.fromarray(levels).resize((64, 64), Image.Resampling.BICUBIC)
    for image in (smooth, smooth.crop((0, 0, 64, 32)), smooth.crop((0, 0, 32, 64)), smooth.resize((7, 7))):
        ours, theirs = run.classify(image).probabilities, made["classify"](image, top_k=20)
        assert {each["label"]: each["score"] for each in theirs} == pytest.approx(ours, abs=1e-3)


@pytest.mark.parametrize(
    ("task", "model", "words"),
    [
        ("segment", {"map_head": {"kind": "linear"}}, r"kl\.load\(folder\)\.segment"),
        (
            "masked_image",
            {"image": {"patch": 4, "decoder": {"layers": 1, "dim": 8, "heads": 2}}},
            "classifier that starts from it",
        ),
        ("masked_image", {"recipe": "sub_ln"}, "Pre-LN recipe"),
    ],
)
def test_a_run_that_is_not_exported_says_what_to_do(
    images: Path, tmp_path: Path, task: str, model: dict[str, Any], words: str
) -> None:
    run = kl.train(table_of(images, task, **model), run=tmp_path / "run")
    with pytest.raises(InputError) as caught:
        kl.export(run, to="huggingface", out=tmp_path / "out")
    assert re.search(words, caught.value.fix)


def test_beits_relative_bias_is_refused(tmp_path: Path) -> None:
    foreign("BeitModel", {"use_relative_position_bias": True}).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="use_relative_position_bias is True"):
        kl.from_huggingface(tmp_path)


def test_the_text_classes_refuse_image_models() -> None:
    from kilolayer.huggingface.auto_classes import KilolayerConfig, KilolayerForSequenceClassification

    with pytest.raises(OptionError, match="reads text"):
        KilolayerForSequenceClassification(KilolayerConfig({"image": IMAGE, **OURS, "head": {}}))
