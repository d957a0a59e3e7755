"""An adapted model comes back from its files with its recipe, and nothing is loaded without it in silence."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError
from kilolayer.models.adapt.table import YES, rows, table
from tests.models.adapt.adaptable_models import (
    BUILDERS,
    TARGET,
    bert,
    gpt2,
    llama,
    marian,
    run,
    t5,
    torch_encoder,
    transformers,
    vit,
)


def adapted(model: Any, recipe: Any, **options: Any) -> Any:
    """The model with a recipe, and with weights as after training: none has its initial value."""
    kl.adapt(model, recipe, seed=1, **options)
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise).to(parameter))
    return model.eval()


def assert_same(found: Any, model: Any) -> None:
    assert type(found) is type(model)
    assert not found.training
    expected = model.state_dict()
    assert list(found.state_dict()) == list(expected)
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
    assert torch.equal(run(found)[0], run(model)[0])


PAIRS = [(title, label) for label, row in table().items() for title in row if row[title] == YES]


@pytest.mark.matrix(20)
@pytest.mark.parametrize(("title", "label"), PAIRS)
def test_each_class_comes_back_with_each_of_its_recipes(title: str, label: str, tmp_path: Path) -> None:
    model = adapted(BUILDERS[title](), rows()[label])
    found = kl.load_model(kl.save(model, tmp_path / "ours"))
    assert_same(found, model)
    with pytest.raises(InputError, match="already has a recipe"):
        kl.adapt(found, rows()[label])
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path / "theirs")
        assert_same(kl.load_model(tmp_path / "theirs"), model)


CHANGED = [(gpt2, "sub_ln"), (llama, "sub_ln"), (gpt2, "layer_scale"), (bert, "keel"), (bert, "deepnorm")]


@pytest.mark.matrix(2)
@pytest.mark.parametrize(("build", "recipe"), CHANGED)
def test_the_warning_names_the_call_that_restores_the_model(
    build: Callable[[], Any], recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(build(), recipe)
    with caplog.at_level(logging.WARNING):
        model.save_pretrained(tmp_path / "model")
    (warning,) = (record.getMessage() for record in caplog.records if record.name.startswith("kilolayer"))
    assert "from_pretrained gives another function" in warning
    call = warning.partition("load it with ")[2].partition(";")[0]
    assert_same(eval(call, {"kl": kl}), model)
    theirs = type(model).from_pretrained(tmp_path / "model").double().eval()
    assert (run(theirs)[0] - run(model)[0]).abs().max() > 1e-3


@pytest.mark.parametrize(("build", "recipe"), [(llama, "pre_ln"), (vit, "pre_ln"), (bert, "ds_init")])
def test_a_recipe_that_only_starts_the_weights_gives_no_warning(
    build: Callable[[], Any], recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(build(), recipe)
    with caplog.at_level(logging.WARNING):
        model.save_pretrained(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("kilolayer")]
    theirs = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(run(theirs)[0], run(model)[0])


PARTS = [
    (lambda: bert("BertForMaskedLM"), "bert", "deepnorm"),
    (lambda: vit("ViTForImageClassification"), "vit", "layer_scale"),
    (lambda: marian("MarianMTModel"), "model", "deepnorm"),
]


@pytest.mark.parametrize(("build", "part", "recipe"), PARTS)
def test_a_part_with_all_layers_is_saved_with_the_recipe(
    build: Callable[[], Any], part: str, recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(build(), recipe)
    inner = model.get_submodule(part)
    inner.save_pretrained(tmp_path / "theirs")
    assert "load it with kl.load_model" in caplog.text
    assert_same(kl.load_model(tmp_path / "theirs"), inner)
    assert_same(kl.load_model(kl.save(inner, tmp_path / "ours")), inner)
    around = nn.ModuleList([build()])
    kl.adapt(around, recipe)
    around[0].save_pretrained(tmp_path / "inside")  # pyright: ignore
    assert type(kl.load_model(tmp_path / "inside")) is type(model)


def test_one_of_two_stacks_is_saved_without_the_recipe_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapted(t5(), "pre_ln").encoder.save_pretrained(tmp_path)
    assert not caplog.text
    model = adapted(t5(), "sub_ln")
    model.encoder.save_pretrained(tmp_path)
    assert "T5Stack is a part of an adapted model, and is saved without its recipe" in caplog.text
    with pytest.raises(InputError, match="without a recipe"):
        kl.load_model(tmp_path)


def test_no_part_of_a_baked_model_names_a_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("", "bert"):
        model = bert("BertForMaskedLM")
        kl.adapt(model, "deepnorm")
        kl.bake(model.get_submodule(name))
        for each in (model, model.bert):
            each.save_pretrained(tmp_path)
            assert not caplog.text
            assert "kilolayer" not in (tmp_path / "config.json").read_text()


def test_weights_that_from_pretrained_leaves_out_are_not_replaced_by_new_ones(tmp_path: Path) -> None:
    adapted(gpt2(), "sub_ln").save_pretrained(tmp_path / "added")
    theirs = transformers.GPT2Model.from_pretrained(tmp_path / "added")
    for options in ({}, {"start": False}):
        with pytest.raises(InputError, match=r"kl\.load_model"):
            kl.adapt(theirs, "sub_ln", **options)
    kl.adapt(theirs, "pre_ln", start=True)
    model = adapted(bert(), "deepnorm")  # adds nothing, so that start=False restores all of it
    model.save_pretrained(tmp_path / "none")
    again = transformers.BertModel.from_pretrained(tmp_path / "none").eval()
    kl.adapt(again, "deepnorm", start=False)
    assert_same(again, model)


def test_a_pretrained_model_is_not_started_again_unless_told(tmp_path: Path) -> None:
    fresh = bert("BertForMaskedLM")
    fresh.save_pretrained(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    for model in (loaded, loaded.bert, copy.deepcopy(loaded), nn.ModuleList([loaded])):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(InputError, match=r"(?s)loaded with from_pretrained.*start=False.*start=True"):
            kl.adapt(model, "deepnorm")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    kept, drawn = (copy.deepcopy(loaded) for _ in range(2))
    kl.adapt(kept, "deepnorm", start=False)
    kl.adapt(drawn, "deepnorm", start=True)
    weight = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(kept.state_dict()[weight], fresh.state_dict()[weight])
    assert not torch.equal(drawn.state_dict()[weight], fresh.state_dict()[weight])
    kl.adapt(transformers.BertForMaskedLM(transformers.BertConfig.from_pretrained(tmp_path)), "deepnorm")
    assert kl.adapt.__doc__ is not None
    assert "new weights" in kl.adapt.__doc__.partition("\n")[0]


@pytest.mark.parametrize("way", ["kl.save", "save_pretrained"])
def test_dtypes_ties_attention_and_generation_come_back(way: str, tmp_path: Path) -> None:
    model = adapted(gpt2("GPT2LMHeadModel", attn_implementation="eager"), "sub_ln").to(torch.bfloat16)
    model.transformer.ln_f.float()
    model.generation_config.max_new_tokens = 3
    if way == "kl.save":
        kl.save(model, tmp_path)
    else:
        model.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    found = kl.load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: weight.dtype for name, weight in found.named_parameters()} == {
        name: weight.dtype for name, weight in model.named_parameters()
    }
    assert found.lm_head.weight is found.transformer.wte.weight
    assert found.config._attn_implementation == "eager"
    assert found.generation_config.max_new_tokens == 3
    changed = kl.load_model(tmp_path, dtype=torch.float64)
    assert {weight.dtype for weight in changed.parameters()} == {torch.float64}
    assert torch.equal(changed.lm_head.weight, model.lm_head.weight.double())


def test_tables_that_a_class_computes_and_several_files_are_loaded(tmp_path: Path) -> None:
    model = adapted(marian("MarianMTModel"), "deepnorm").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    found, inputs = kl.load_model(tmp_path), {"input_ids": TARGET, "decoder_input_ids": TARGET}
    assert torch.equal(found(**inputs).logits, model(**inputs).logits)


def test_computed_tables_are_no_larger_than_the_model(tmp_path: Path) -> None:
    adapted(marian("MarianMTModel"), "deepnorm").save_pretrained(tmp_path)
    _edit(lambda table: table.update(max_position_embeddings=10**9))(tmp_path)
    with pytest.raises(InputError, match="more than all weights"):
        kl.load_model(tmp_path)


def test_buffers_outside_of_the_state_dict_come_back(tmp_path: Path) -> None:
    model = adapted(llama(), "lns").to(torch.bfloat16)  # also the frequencies of its rotary positions
    assert torch.equal(run(kl.load_model(kl.save(model, tmp_path)))[0], run(model)[0])


@pytest.mark.parametrize("options", [{"activation": "gelu", "layer_norm_eps": 1e-3}, {"norm_first": True, "bias": False}])
def test_the_options_of_torchs_layers_come_back(options: dict[str, Any], tmp_path: Path) -> None:
    model = torch_encoder(**options)
    adapted(model, "sub_ln" if model.layers[0].norm_first else "deepnorm")  # pyright: ignore
    found = kl.load_model(kl.save(model, tmp_path))
    assert_same(found, model)
    assert repr(found) == repr(model)
    assert found.layers[0].norm1.eps == model.layers[0].norm1.eps  # pyright: ignore


def test_a_loaded_model_trains_bakes_and_is_saved_again(tmp_path: Path) -> None:
    model = kl.load_model(kl.save(adapted(bert(), "deepnorm"), tmp_path / "first"))
    run(model.train())[0].square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    states = run(model.eval())[0]
    model.save_pretrained(tmp_path / "second")
    torch.testing.assert_close(run(kl.load_model(tmp_path / "second"))[0], states, rtol=0, atol=0)
    theirs = transformers.BertModel.from_pretrained(tmp_path / "second").eval()
    kl.adapt(theirs, "deepnorm", start=False)
    for each, name in ((model, "third"), (theirs, "fourth")):
        kl.bake(each)
        each.save_pretrained(tmp_path / name)
        with pytest.raises(InputError, match="without a recipe"):
            kl.load_model(tmp_path / name)
        plain = transformers.BertModel.from_pretrained(tmp_path / name).eval()
        torch.testing.assert_close(run(plain)[0], states, rtol=0, atol=1e-12)


def test_saving_again_replaces_the_model(tmp_path: Path) -> None:
    kl.save(adapted(bert(), "deepnorm"), tmp_path)
    later = adapted(gpt2(), "sub_ln")
    kl.save(later, tmp_path)
    assert_same(kl.load_model(tmp_path), later)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(InputError, match="holds something else"):
        kl.save(kl.Decoder(8, dim=16, heads=2, ffn_dim=32, layers=1), tmp_path)


def test_a_model_that_could_not_come_back_is_refused(tmp_path: Path) -> None:
    inside = nn.ModuleDict({"bert": adapted(bert(), "deepnorm"), "head": nn.Linear(16, 2)})
    own = adapted(torch_encoder(activation=nn.functional.silu), "deepnorm")
    wider = adapted(bert("BertForSequenceClassification"), "deepnorm")
    wider.classifier = nn.Linear(16, 5, dtype=torch.float64)
    apart = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    kl.adapt(apart.encoder, "deepnorm")
    kl.adapt(apart.decoder, "deepnorm")
    odd = adapted(torch_encoder(), "deepnorm")
    odd.layers[1].dropout.p = 0.5
    for model, text in (
        (inside, "class of your own"),
        (own, "activation"),
        (wider, "not the one that its class builds: classifier.weight"),
        (apart, "one by one"),
        (odd, "different options"),
        (bert(), "BertModel is not a Kilolayer model"),
    ):
        with pytest.raises(InputError, match=text):
            kl.save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(InputError, match="save_original_format"):
        adapted(vit(), "pre_ln").save_pretrained(tmp_path / "model", save_original_format=True)


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        change(found)
        (folder / "config.json").write_text(json.dumps(found))

    return edit


def _drop(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[next(name for name in tensors if "inner_norm" in name)]
    safetensors.torch.save_file(tensors, path)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a recipe's weight is missing": (_drop, r"inner_norm\.\w+ is missing there"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    "another width": (_edit(lambda table: table.update(n_embd=32)), "do not fit the configuration"),
    "another recipe": (_edit(lambda table: table["kilolayer"].update(recipe={"name": "pre_ln"})), "do not fit"),
    "no such recipe": (_edit(lambda table: table["kilolayer"]["recipe"].update(name="sub_lm")), "did you mean 'sub_ln'"),
    "a recipe that does not fit": (_edit(lambda table: table["kilolayer"].update(recipe={"name": "deepnorm"})), "does not fit"),
    "no recipe": (_edit(lambda table: table["kilolayer"].pop("recipe")), "the recipe is None"),
    "an entry of another type": (_edit(lambda table: table.update(kilolayer=5)), "without a recipe"),
    "another class": (_edit(lambda table: table.update(architectures=["Trainer"])), "the architecture is 'Trainer'"),
    "two classes": (_edit(lambda table: table.update(architectures=["GPT2Model", "BertModel"])), "the architecture is"),
    "a value of another type": (_edit(lambda table: table.update(n_embd="wide")), "Transformers cannot build the model"),
    "very many layers": (_edit(lambda table: table.update(n_layer=10**9)), "more than there are weights"),
    "very many labels": (_edit(lambda table: table.update(num_labels=10**9)), "1000000000 labels"),
    "an empty model of torch": (
        _edit(lambda table: (table.clear(), table.update(model_type="torch", kilolayer={}))),
        "neither",
    ),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_says_so(name: str, tmp_path: Path) -> None:
    harm, text = DAMAGE[name]
    kl.save(adapted(gpt2(), "sub_ln"), tmp_path)
    harm(tmp_path)
    with pytest.raises(KilolayerError, match=text):
        kl.load_model(tmp_path)


def test_a_model_without_a_recipe_says_how_to_load_it(tmp_path: Path) -> None:
    t5().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"(?s)without a recipe.*from_pretrained"):
        kl.load_model(tmp_path)


def test_an_adapted_model_is_not_imported_without_its_recipe(tmp_path: Path) -> None:
    adapted(gpt2("GPT2LMHeadModel"), "lns").save_pretrained(tmp_path / "scaled")
    with pytest.raises(InputError, match=r"(?s)saved with a recipe.*kl\.bake"):
        kl.from_huggingface(tmp_path / "scaled")
    plain = adapted(gpt2("GPT2LMHeadModel"), "pre_ln")
    plain.save_pretrained(tmp_path / "plain")
    found = kl.from_huggingface(tmp_path / "plain", dtype=torch.float64)
    torch.testing.assert_close(found(TARGET).logits, plain(TARGET).logits, rtol=0, atol=1e-10)
