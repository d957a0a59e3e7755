"""What kl.adapt takes, refuses, starts and leaves alone."""

from __future__ import annotations

import copy
import io
import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.models.adapt.layouts import layout_of
from kilolayer.models.adapt.stacks import find
from kilolayer.models.adapt.table import POST_LN, PRE_LN, YES, rows, table
from kilolayer.recipes.role import Role
from tests.models.adapt.adaptable_models import (
    BUILDERS,
    SOURCE_REAL,
    STATES,
    bart,
    bert,
    gpt2,
    llama,
    run,
    t5,
    torch_encoder,
    transformers,
    vit,
)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("title", [*POST_LN, *PRE_LN])
def test_each_class_takes_the_recipes_of_the_table_and_refuses_the_others_with_its_reason(title: str) -> None:
    model, answers = BUILDERS[title](), {label: row[title] for label, row in table().items()}
    plain, _ = run(model)
    for label, recipe in rows().items():
        if answers[label] != YES:
            with pytest.raises(InputError) as raised:
                kl.adapt(model, recipe)
            assert answers[label] in str(raised.value)
    torch.testing.assert_close(run(model)[0], plain, rtol=0, atol=0)
    for label, recipe in rows().items():
        if answers[label] == YES:
            other = copy.deepcopy(model)
            kl.adapt(other, recipe, seed=1)
            assert torch.isfinite(run(other)[0]).all(), label


def test_a_change_inside_attention_alone_holds_in_evaluation_too() -> None:
    class InsideAttention(kl.recipes.Recipe):
        def plan(self, place: kl.recipes.Place) -> kl.recipes.Plan:
            return kl.recipes.Plan(out_norm=True, head_scale=place.kind is kl.recipes.Kind.SELF_ATTENTION)

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    kl.adapt(model, kl.recipes.parse(InsideAttention()), seed=1)
    with torch.no_grad():
        for name, scale in model.named_parameters():
            if "head_scale" in name:
                scale.mul_(3)
        states = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
        # torch's layers have a path of their own for evaluation, which calls no module.
        torch.testing.assert_close(model.eval()(states), model.train()(states), rtol=0, atol=1e-5)


def test_the_table_has_both_kinds_of_recipes_apart() -> None:
    answers = table()
    assert {label for label, row in answers.items() if row["BERT"] == YES} == {
        'admin, start="closed"',
        "deepnorm",
        "ds_init",
        "keel",
        "post_ln",
        "post_ln_init",
    }
    assert {label for label, row in answers.items() if row["GPT-2"] == YES} == {
        "complete_p, base_width=dim",
        "layer_scale",
        "lns",
        "normformer",
        "peri_ln",
        "pre_ln",
        "sub_ln",
    }
    assert "(`out_norm`)" in answers["deepnorm"]["GPT-2"]


HEADS = [
    ("BertForMaskedLM", lambda: bert("BertForMaskedLM"), "deepnorm"),
    ("BertForSequenceClassification", lambda: bert("BertForSequenceClassification"), "deepnorm"),
    ("BartForConditionalGeneration", lambda: bart("BartForConditionalGeneration"), "deepnorm"),
    ("GPT2LMHeadModel", lambda: gpt2("GPT2LMHeadModel"), "sub_ln"),
    ("LlamaForCausalLM", lambda: llama("LlamaForCausalLM"), "sub_ln"),
    ("T5ForConditionalGeneration", lambda: t5("T5ForConditionalGeneration"), "sub_ln"),
    ("T5EncoderModel", lambda: t5("T5EncoderModel"), "sub_ln"),
    ("ViTForImageClassification", lambda: vit("ViTForImageClassification"), "layer_scale"),
]


@pytest.mark.matrix(3)
@pytest.mark.parametrize(("name", "build", "recipe"), HEADS, ids=[name for name, _, _ in HEADS])
def test_models_with_heads_are_found(name: str, build: Any, recipe: str) -> None:
    report = kl.adapt(build(), recipe, seed=0)
    assert name in repr(report)
    assert sum(report.sublayers.values()) in (4, 10)


def test_the_report_says_what_was_changed() -> None:
    report = kl.adapt(bart(), "deepnorm", seed=5)
    assert report.constants["encoder"].alpha == pytest.approx(0.81 * (2**4 * 2) ** (1 / 16))
    assert report.sublayers == {"encoder": 4, "decoder": 6}
    assert report.added == ()
    assert "BartModel (BART) under DeepNorm" in repr(report)
    assert "alpha" in repr(report)
    assert "seed 5" in repr(report)
    assert kl.adapt(gpt2(), "sub_ln").added[0] == "h.0.recipe_self_attention.inner_norm.weight"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: "bert-base-uncased", "this is not a model: 'bert-base-uncased'"),
        (lambda: nn.Linear(2, 2), "supported: nn.Transformer, nn.TransformerEncoder"),
        (lambda: nn.ModuleList([torch_encoder(), torch_encoder()]), "2 encoders"),
        (lambda: bert(is_decoder=True, add_cross_attention=True), "cross-attention"),
        (lambda: bart("BartForCausalLM"), "without its encoder"),
        (lambda: bert().to("meta"), "meta device"),
    ],
)
def test_what_is_not_known_is_refused(build: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        kl.adapt(build(), "deepnorm")
    assert words in str(raised.value)


def encoder_layer(width: int = 16, **options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64, **options)


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.ModuleList(encoder_layer() for _ in range(4))
        self.upper = nn.ModuleList(encoder_layer() for _ in range(8))


def repeated(*layers: nn.Module, times: int) -> nn.Module:
    return nn.Sequential(*layers * times)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.ModuleDict({"layers": nn.ModuleList([encoder_layer()] * 12)}), "layers.0 and layers.1 are one layer"),
        (lambda: repeated(encoder_layer(), encoder_layer(), times=3), "0 and 2 are one layer"),
        (lambda: repeated(Block(encoder_layer()), times=3), "0.layer and 1.layer are one layer"),
    ],
)
def test_a_layer_that_is_used_at_several_places_is_refused(build: Any, words: str) -> None:
    with pytest.raises(InputError) as raised:
        kl.adapt(build(), "deepnorm")
    assert words in str(raised.value)


def test_a_second_name_of_the_layers_is_no_second_use() -> None:
    model = nn.ModuleDict({"bert": bert()})
    model["all"] = model["bert"].encoder.layer  # pyright: ignore
    model["last"] = model["bert"].encoder.layer[-1]  # pyright: ignore
    assert kl.adapt(model, "deepnorm").depths.encoder == 2


def test_layers_in_blocks_and_wrappers_are_one_stack() -> None:
    plain = nn.Sequential(*(encoder_layer() for _ in range(6)))
    blocks = nn.Sequential(*(Block(copy.deepcopy(layer)) for layer in plain))
    mixed = nn.Sequential(*(checkpoint_wrapper(each) if index % 2 else each for index, each in enumerate(copy.deepcopy(plain))))
    expected = kl.adapt(plain, "deepnorm", start=False)
    for model in (blocks, mixed):
        report = kl.adapt(model, "deepnorm", start=False)
        assert report.constants == expected.constants
        assert report.sublayers == {"encoder": 12}
        torch.testing.assert_close(model(STATES), plain(STATES), rtol=0, atol=1e-12)
    mixed(STATES).sum().backward()
    compiled: Any = [torch.compile(encoder_layer(), backend="eager") for _ in range(6)]
    assert kl.adapt(nn.ModuleList(compiled), "deepnorm").constants == expected.constants


def test_lists_that_may_follow_each_other_are_not_advised_to_be_adapted_one_by_one() -> None:
    with pytest.raises(InputError, match="2 encoders: lower, upper") as raised:
        kl.adapt(Halves(), "deepnorm")
    assert "depend on the whole depth" in raised.value.fix
    with pytest.raises(InputError, match=r"2 encoders: 0\.layers, 1\.layers"):
        kl.adapt(nn.ModuleList([torch_encoder(), torch_encoder()]), "deepnorm")


@pytest.mark.parametrize(
    ("options", "others", "words"),
    [
        ({"norm_first": True}, {"norm_first": False}, "some layers of Sequential are Pre-LN and others Post-LN"),
        ({"width": 16}, {"width": 32}, "different widths: 16, 32"),
    ],
)
def test_layers_that_do_not_suit_each_other_are_refused(options: Any, others: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        kl.adapt(nn.Sequential(encoder_layer(**options), encoder_layer(**others)), "deepnorm")


def with_weight_norm(model: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model.layers[1].linear1)
    return model


def with_older_weight_norm(model: Any) -> Any:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.layers[1].linear1)
    return model


class LowRank(nn.Linear):
    """A matrix with an adapter beside it."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, dtype=plain.weight.dtype)
        self.load_state_dict(plain.state_dict())
        self.down = nn.Linear(plain.in_features, 2, bias=False, dtype=plain.weight.dtype)
        self.up = nn.Linear(2, plain.out_features, bias=False, dtype=plain.weight.dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) + self.up(self.down(states))


def with_adapter(model: Any) -> Any:
    model.layers[1].linear2 = LowRank(model.layers[1].linear2)
    return model


def with_shared_weight(model: Any) -> Any:
    model.layers[1].linear1.weight = model.layers[0].linear1.weight
    return model


def quantized(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


COMPUTED = [
    (with_weight_norm, "layers.1.linear1", "remove_parametrizations"),
    (with_older_weight_norm, "layers.1.linear1", "weight_g, weight_v"),
    (with_adapter, "layers.1.linear2", "down.weight, up.weight"),
    (with_shared_weight, "layers.0.linear1 and layers.1.linear1", "have one weight"),
]


@pytest.mark.parametrize("start", [None, False])
@pytest.mark.parametrize(("change", "where", "words"), COMPUTED)
def test_weights_that_are_not_plain_parameters_are_refused_and_left_as_they_are(
    change: Any, where: str, words: str, start: bool | None
) -> None:
    model = change(torch_encoder())
    states = run(model)[0]
    with pytest.raises(InputError) as raised:
        kl.adapt(model, "deepnorm", start=start)
    assert where in str(raised.value)
    assert words in str(raised.value)
    torch.testing.assert_close(run(model)[0], states, rtol=0, atol=0)


@pytest.mark.parametrize(("change", "where", "words"), COMPUTED[:3])
def test_bake_refuses_weights_that_are_not_plain_parameters(change: Any, where: str, words: str) -> None:
    model = torch_encoder()
    kl.adapt(model, "deepnorm", seed=1)
    model = change(model)
    states = run(model)[0]
    with pytest.raises(InputError, match=where):
        kl.bake(model)
    torch.testing.assert_close(run(model)[0], states, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_weights_and_attention_over_another_width_are_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match="before it was quantized"):
        kl.adapt(quantized(bert().float()), "deepnorm", start=False)
    model: Any = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32), 2)
    model.layers[0].multihead_attn = nn.MultiheadAttention(16, 2, kdim=24, vdim=24)
    with pytest.raises(InputError, match="leave kdim and vdim out"):
        kl.adapt(model, "deepnorm")
    model.layers[0].multihead_attn = nn.MultiheadAttention(16, 2, add_bias_kv=True)
    kl.adapt(model, "deepnorm")


def test_a_layer_with_a_forward_of_its_own_is_not_known() -> None:
    class Own(nn.TransformerEncoderLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Renamed(nn.TransformerEncoderLayer):
        pass

    assert layout_of(Own(16, 2)) is None
    assert layout_of(Renamed(16, 2)) is not None


def test_the_refusal_names_the_recipes_that_fit() -> None:
    with pytest.raises(InputError) as raised:
        kl.adapt(bert(), "pre_ln")
    fitting = [name for name in kl.recipes.names() if table().get(name, {}).get("BERT") == YES]
    assert raised.value.fix == f"choose one that does: {', '.join(fitting)}"
    for name in fitting:
        kl.adapt(bert(), name)


def test_a_recipe_is_given_once() -> None:
    model = bert()
    kl.adapt(model, "deepnorm")
    with pytest.raises(InputError, match="already has a recipe"):
        kl.adapt(model, "deepnorm")


def test_norm_first_without_a_final_norm_is_refused_with_what_to_do() -> None:
    encoder = torch_encoder(norm_first=True)
    encoder.norm = None
    with pytest.raises(InputError, match=r"norm=nn\.LayerNorm"):
        kl.adapt(encoder, "sub_ln")


@pytest.mark.parametrize("recipe", ["deepnorm", "keel"])
def test_torchs_fast_path_is_not_taken(recipe: str) -> None:
    encoder = torch_encoder()
    kl.adapt(encoder, recipe, seed=1)
    trained = encoder(STATES, src_key_padding_mask=~SOURCE_REAL)
    encoder.eval()
    with torch.no_grad():
        evaluated = encoder(STATES, src_key_padding_mask=~SOURCE_REAL)
    torch.testing.assert_close(evaluated[SOURCE_REAL], trained[SOURCE_REAL], rtol=0, atol=1e-13)


def test_weights_start_at_xavier_times_the_gain_of_their_role() -> None:
    config = transformers.T5Config(vocab_size=8, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    model = transformers.T5Model(config)
    gamma = kl.adapt(model, "sub_ln", seed=2).constants["decoder"].gamma
    block = model.decoder.block[1]
    attention, network = block.layer[0].SelfAttention, block.layer[2].DenseReluDense
    xavier = (2 / (128 + 128)) ** 0.5
    # T5 has no 1 / sqrt(head width) on its scores, so that its queries hold it.
    for weight, deviation in [
        (attention.q.weight, xavier / math.sqrt(32)),
        (attention.k.weight, xavier),
        (attention.v.weight, gamma * xavier),
        (attention.o.weight, gamma * xavier),
        (network.wi.weight, gamma * (2 / 384) ** 0.5),
        (network.wo.weight, gamma * (2 / 384) ** 0.5),
    ]:
        assert weight.std().item() == pytest.approx(deviation, rel=0.05)


def test_the_parts_of_a_fused_matrix_have_their_own_gains() -> None:
    layer = nn.TransformerEncoderLayer(128, 4, 256)
    encoder: Any = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    beta = kl.adapt(encoder, "deepnorm", seed=2).constants["encoder"].beta
    query, key, value = encoder.layers[0].self_attn.in_proj_weight.chunk(3)
    xavier = (2 / 256) ** 0.5
    for weight, deviation in ((query, xavier), (key, xavier), (value, beta * xavier)):
        assert weight.std().item() == pytest.approx(deviation, rel=0.05)
    assert encoder.layers[0].self_attn.in_proj_bias.abs().sum() == 0


def test_a_seed_fixes_the_weights_and_start_false_leaves_them() -> None:
    first, second, third = gpt2(), gpt2(), gpt2()
    for model, seed in ((first, 7), (second, 7), (third, 8)):
        kl.adapt(model, "pre_ln", seed=seed)
    assert torch.equal(first.h[0].attn.c_attn.weight, second.h[0].attn.c_attn.weight)
    assert not torch.equal(first.h[0].attn.c_attn.weight, third.h[0].attn.c_attn.weight)
    plain = gpt2()
    before = copy.deepcopy(plain.state_dict())
    kl.adapt(plain, "sub_ln", start=False)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in before.items())


def test_what_was_saved_is_loaded_into_a_model_that_was_adapted_again() -> None:
    trained = gpt2()
    kl.adapt(trained, "normformer", seed=1)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    again = gpt2()
    kl.adapt(again, "normformer", start=False)
    again.load_state_dict(trained.state_dict())
    torch.testing.assert_close(run(again)[0], run(trained)[0], rtol=0, atol=0)


@pytest.mark.parametrize("title", ["BERT", "nn.TransformerEncoder, norm_first"])
def test_a_copy_and_a_pickle_have_hooks_of_their_own(title: str) -> None:
    model = BUILDERS[title]()
    kl.adapt(model, "deepnorm" if title == "BERT" else "sub_ln", seed=1)
    states, _ = run(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        torch.testing.assert_close(run(other)[0], states, rtol=0, atol=0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0)
        torch.testing.assert_close(run(model)[0], states, rtol=0, atol=0)


def test_deepnorm_adds_nothing_to_the_state_dict() -> None:
    model = bert()
    before = list(model.state_dict())
    kl.adapt(model, "deepnorm")
    assert list(model.state_dict()) == before


def test_recomputed_layers_have_the_same_gradients() -> None:
    model = bert()
    kl.adapt(model, kl.recipes.get("admin", start="closed", weight="trainable"), seed=1)
    weight = model.encoder.layer[0].attention.self.query.weight
    run(model)[0].square().sum().backward()
    expected = weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    run(model)[0].square().sum().backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-12)


def test_generation_with_a_cache_is_the_forward() -> None:
    model = gpt2("GPT2LMHeadModel").eval()
    kl.adapt(model, "sub_ln", seed=1)
    prompt = torch.tensor([[4, 5, 6]])
    cached, whole = (
        model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=use, pad_token_id=1) for use in (True, False)
    )
    assert torch.equal(cached, whole)


def test_the_constants_of_a_decoder_do_not_depend_on_the_encoder_that_it_reads() -> None:
    for label, row in table().items():
        for title in ("nn.TransformerDecoder", "nn.TransformerDecoder, norm_first"):
            if row[title] == YES:
                recipe = rows()[label]
                assert recipe.describe(encoder_layers=3, decoder_layers=6).decoder == (
                    recipe.describe(encoder_layers=48, decoder_layers=6).decoder
                )


class OlderViTLayer(nn.Module):
    """The layer's modules in earlier releases of Transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention.attention, self.attention.output = nn.Module(), nn.Module(), nn.Module()
        self.attention.attention.__dict__["num_attention_heads"] = 2
        for name in ("query", "key", "value"):
            setattr(self.attention.attention, name, nn.Linear(16, 16))
        self.attention.output.dense = nn.Linear(16, 16)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense, self.output.dense = nn.Linear(16, 32), nn.Linear(32, 16)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(16), nn.LayerNorm(16)


OlderViTLayer.__module__, OlderViTLayer.__name__ = "transformers.models.vit.modeling_vit", "ViTLayer"


def test_the_older_layer_of_vit_is_read_too() -> None:
    model = nn.ModuleList([OlderViTLayer()])
    attention, network = (sublayer for _, _, sublayer in find(model).stacks[0].sublayers())
    assert [matrix.role for matrix in attention.matrices] == [Role.QUERY_KEY, Role.QUERY_KEY, Role.VALUE, Role.ATTENTION_OUTPUT]
    assert attention.heads == 2
    assert network.last.values.shape == (16, 32)
    assert kl.adapt(model, "layer_scale").sublayers == {"encoder": 2}


def test_the_page_has_the_table_as_it_is() -> None:
    root = Path(__file__).parents[3]
    made = runpy.run_path(str(root / "docs/make_adapt.py"))
    assert (root / "docs/adapt.md").read_text() == made["page"](), "run: python docs/make_adapt.py"
