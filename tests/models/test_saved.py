"""A bare model in a folder comes back to the bit, and a folder that is none says so."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.models import saved
from kilolayer.models.model import Model
from kilolayer.moe.layer import need_sparse_layers

WIDTHS: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 32, "vocab_size": 20}
IDS = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])

SHAPES: dict[str, Callable[..., Model]] = {
    "encoder": lambda **options: kl.Encoder(**WIDTHS, layers=2, **options),
    "decoder": lambda **options: kl.Decoder(**WIDTHS, layers=2, **options),
    "encoder_decoder": lambda **options: kl.EncoderDecoder(**WIDTHS, encoder_layers=2, decoder_layers=2, **options),
}


def output(model: Any) -> Tensor:
    """Its scores, or an encoder's states, of two sequences."""
    with torch.no_grad():
        out = model.eval()(IDS, IDS) if isinstance(model, kl.EncoderDecoder) else model.eval()(IDS)
    return out.states if out.logits is None else out.logits


def bits(model: Model) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every parameter and buffer."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (each.dtype, each.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, each in tensors.items()
    }


def assert_same(model: Model, other: Model) -> None:
    assert type(other) is type(model)
    assert other.config == model.config
    assert bits(other) == bits(model)
    assert torch.equal(output(other), output(model))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", kl.recipes.names())
def test_a_model_comes_back_to_the_bit(recipe: str, shape: str, tmp_path: Path) -> None:
    model = SHAPES[shape](recipe=recipe)
    assert kl.save(model, tmp_path / "model") == tmp_path / "model"
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.toml", "model.safetensors"]
    assert_same(model, kl.load_model(str(tmp_path / "model")))


OPTIONS: dict[str, dict[str, Any]] = {
    "sparse": {"moe": kl.MoE(experts=3, every=1, loss_free=1e-3)},
    "untied": {"tie_embeddings": False},
    "learned positions": {"positions": "learned", "max_length": 8},
    "relative positions": {"positions": "t5"},
    "drop path": {"drop_path": 0.2, "dropout": 0.1},
    "grouped keys": {"kv_heads": 1, "activation": "swiglu", "norm": "rms"},
    "no padding": {"pad_id": None},
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_so_does_one_with_options(name: str, tmp_path: Path) -> None:
    model = kl.Decoder(**WIDTHS, layers=2, **OPTIONS[name])
    for buffer in model.buffers():
        if buffer.dim():  # biases of experts, which start at 0
            buffer.add_(0.125)
    kl.save(model, tmp_path)
    assert_same(model, kl.load_model(tmp_path))


def test_so_do_a_head_and_an_encoder_without_a_vocabulary(tmp_path: Path) -> None:
    headed = kl.Encoder(**WIDTHS, layers=2, head=kl.Head(outputs=3))
    assert_same(headed, kl.load_model(kl.save(headed, tmp_path / "headed")))
    reader = kl.Encoder(None, dim=16, heads=2, ffn_dim=32, layers=2)
    found = kl.load_model(kl.save(reader, tmp_path / "reader"))
    assert (bits(found), found.config) == (bits(reader), reader.config)


@pytest.mark.parametrize("weight", ["derived", "trainable", "fixed"])
def test_admins_calibrated_scales_come_back(weight: str, tmp_path: Path) -> None:
    model = kl.EncoderDecoder(
        **WIDTHS, encoder_layers=2, decoder_layers=2, recipe=kl.recipes.get("admin", **ADMIN.get(weight, {}))
    )
    before = bits(model)
    kl.calibrate(model, (IDS, IDS))
    assert bits(model) != before
    assert_same(model, kl.load_model(kl.save(model, tmp_path)))


ADMIN: dict[str, dict[str, Any]] = {"trainable": {"weight": "trainable"}, "fixed": {"weight": "fixed"}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_dtype_comes_back_and_another_can_be_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = kl.Decoder(**WIDTHS, layers=2, recipe="lns").to(dtype)
    kl.save(model, tmp_path)
    assert_same(model, kl.load_model(tmp_path))
    changed = kl.load_model(tmp_path, dtype=torch.float32)
    assert {each.dtype for each in changed.parameters()} == {torch.float32}
    assert torch.equal(changed.embedding.weight, model.embedding.weight.float())  # pyright: ignore


def test_a_lowered_model_computes_as_before(tmp_path: Path) -> None:
    model = kl.Decoder(**WIDTHS, layers=2)
    model.cast_weights(torch.bfloat16)
    found = kl.load_model(kl.save(model, tmp_path))
    assert_same(model, found)
    assert {each.dtype for each in found.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("residual", [torch.float16, torch.float64])
def test_the_states_between_layers_keep_their_dtype(residual: torch.dtype, tmp_path: Path) -> None:
    model = kl.Decoder(**WIDTHS, layers=1)
    model.cast_weights(torch.bfloat16, residual)
    assert kl.load_model(kl.save(model, tmp_path)).embedding.states_dtype == residual  # pyright: ignore


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    tied, untied = (kl.Decoder(**WIDTHS, layers=1, tie_embeddings=tie) for tie in (True, False))
    shapes = []
    for number, model in enumerate((tied, untied)):
        tensors = safetensors.torch.load_file(kl.save(model, tmp_path / str(number)) / "model.safetensors")
        shapes.append([tuple(tensor.shape) for tensor in tensors.values()].count((20, 16)))
    assert shapes == [1, 2]


def test_the_fast_form_is_saved_as_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = kl.Decoder(**WIDTHS, layers=2)
    found = kl.load_model(kl.save(kl.fast(model), tmp_path))
    assert bits(found) == bits(model)


def test_a_loaded_model_trains(tmp_path: Path) -> None:
    model = kl.load_model(kl.save(kl.Decoder(**WIDTHS, layers=2, moe=kl.MoE(experts=2, every=1)), tmp_path))
    assert not model.training
    output_ = model.train()(IDS)
    (output_.logits.float().square().mean() + output_.router_loss).backward()
    assert all(each.grad is not None for each in model.parameters())
    assert need_sparse_layers(model)


def load_or_error(folder: Path) -> Any:
    """The model in a folder, or what is wrong with it."""
    try:
        found = kl.load_model(folder)
    except InputError as error:
        return error.what
    return found.config, bits(found)


EARLIER: dict[str, Callable[[], Model] | None] = {
    "into a new folder": None,
    "over a model of the same configuration": lambda: kl.Decoder(**WIDTHS, layers=1),
    "over one that its weights would fit": lambda: kl.Decoder(**WIDTHS, layers=1, activation="gelu"),
}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("call", range(4))
def test_an_interrupted_save_leaves_the_old_model_the_new_one_or_none(
    earlier: str, call: int, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, model, folder = EARLIER[earlier], kl.Decoder(**WIDTHS, layers=1), tmp_path / "model"
    old = None if make is None else make()
    if old is not None:
        kl.save(old, folder)
    calls = 0

    def dying(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1 and not late:
                raise KeyboardInterrupt
            found = step(*arguments)
            if calls == call + 1:
                raise KeyboardInterrupt
            return found

        return run

    with monkeypatch.context() as patch:
        for name in ("write_tensors", "remove", "write", "move"):
            patch.setattr(saved, name, dying(getattr(saved, name)))
        with suppress(KeyboardInterrupt):
            kl.save(model, folder)
    allowed: list[Any] = [(each.config, bits(each)) for each in (old, model) if each is not None]
    if earlier != "over a model of the same configuration":
        allowed += [f"this is not a saved model: {what}" for what in ("the folder does not exist", "there is no config.toml")]
        allowed.append("the model is incomplete: there is no model.safetensors")
    assert load_or_error(folder) in allowed
    kl.save(model, folder)
    assert_same(model, kl.load_model(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "model.safetensors"]


def test_saving_again_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    folder = kl.save(kl.Decoder(**WIDTHS, layers=1), tmp_path / "model")
    later = kl.Encoder(**WIDTHS, layers=2)
    kl.save(later, folder)
    assert_same(later, kl.load_model(folder))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else"):
        kl.save(later, folder)
    for name, text in {"config.toml": "[train]\nsteps = 3\n", "model.safetensors": ""}.items():
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text(text)
    for _ in range(2):
        with pytest.raises(InputError, match=r"something else|not a model's"):
            kl.save(later, tmp_path / "other")
        (tmp_path / "other/model.safetensors").unlink(missing_ok=True)
    assert (tmp_path / "other/config.toml").read_text() == "[train]\nsteps = 3\n"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="this is a file"):
        kl.save(later, tmp_path / "file")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def _rename(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(iter(tensors))
    safetensors.torch.save_file({f"{name}s" if each == name else each: tensor for each, tensor in tensors.items()}, path)


def _edit(old: str, new: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        text = (folder / "config.toml").read_text()
        assert old in text
        (folder / "config.toml").write_text(text.replace(old, new))

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut short": (_cut, "not a safetensors file"),
    "weights that are a pickle": (
        lambda folder: torch.save({"weight": torch.ones(1)}, folder / "model.safetensors"),
        "not a safetensors file",
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors"),
    "no configuration": (lambda folder: (folder / "config.toml").unlink(), "this is not a saved model"),
    "a tensor of another name": (_rename, "the weights do not fit the configuration: "),
    "another width": (_edit("ffn_dim = 32", "ffn_dim = 48"), r"the weights do not fit.*\(32, 16\) there and \(48, 16\) here"),
    "another option": (_edit("ffn_dim = 32", "ffn_dims = 32"), "did you mean 'ffn_dim'"),
    "a run's tables": (_edit("[model]", "[train]\n[model]"), "kl.load"),
    "another dtype of states": (_edit("[model]", 'states_dtype = "int3"\n[model]'), "states_dtype is 'int3'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_says_so(name: str, tmp_path: Path) -> None:
    harm, text = DAMAGE[name]
    folder = kl.save(kl.Decoder(**WIDTHS, layers=1), tmp_path / "model")
    harm(folder)
    with pytest.raises(KilolayerError, match=f"(?s){text}"):
        kl.load_model(folder)


def test_a_model_that_could_not_come_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Linear is not a Kilolayer model"):
        kl.save(torch.nn.Linear(2, 2), tmp_path / "model")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="materialize"):
        kl.save(kl.build_model(kl.ModelConfig(**WIDTHS, layers=1), device="meta"), tmp_path / "model")
    changed = kl.Decoder(**WIDTHS, layers=1)
    changed.register_parameter("mine", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(InputError, match="mine is missing there"):
        kl.save(changed, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_place_or_a_dtype_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = kl.save(kl.Decoder(**WIDTHS, layers=1), tmp_path / "model")
    for options, text in (
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "cuda"}, "there is no CUDA device"),
        ({"dtype": "bf16"}, r"dtype is 'bf16'(?s:.*)torch\.bfloat16"),
    ):
        with pytest.raises(OptionError, match=text):
            kl.load_model(folder, **options)
    for wrong, text in ((5, "the folder of the model is 5, not a path"), (tmp_path / "modle", "did you mean '.*/model'")):
        with pytest.raises(InputError, match=text):
            kl.load_model(wrong)
    with pytest.raises(InputError, match="the folder of the model is 5, not a path"):
        kl.save(kl.Decoder(**WIDTHS, layers=1), 5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"(?s)int is not a Kilolayer model.*kl\.save.*kl\.load"):
        kl.save(5, "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="str is not a Kilolayer model"):
        kl.save("folder", kl.Decoder(**WIDTHS, layers=1))  # pyright: ignore[reportArgumentType]


def test_the_files_hold_the_model_and_no_code(tmp_path: Path) -> None:
    model = kl.Decoder(**WIDTHS, layers=1, recipe="sub_ln")
    kl.save(model, tmp_path)
    table = tomllib.loads((tmp_path / "config.toml").read_text())
    assert kl.ModelConfig(**table["model"]) == model.config
    assert set(table) == {"model"}
    assert safetensors.torch.load_file(tmp_path / "model.safetensors").keys() == bits(model).keys()
