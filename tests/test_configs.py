"""The shipped configurations: each value has its source, the sizes are the papers', and each runs."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from kilolayer import config as configuration
from kilolayer.cli.main import main
from kilolayer.data.corpora import expand
from kilolayer.data.drawn_images import drawn_images
from kilolayer.data.grammar import pairs
from kilolayer.runs.budget import Work, budget
from kilolayer.tasks.config import RunConfig

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(FOLDER.glob("*.toml"))
SOURCE = re.compile(
    r"(DeepNet|TorchScale), (section|Table|Figure) |Very Deep, (section|Table|footnote) |OPUS-100 \(|Flores-101 \("
    r"|ours: |ours, not stated|the authors' release|convention: "
)
# Parameters that the papers state: Very Deep, Table 1; DeepNet, Tables 3, 4 and 5.
STATED = {
    "wmt14-en-de-admin-60l-12l": 256e6,
    "wmt14-en-fr-admin-60l-12l": 262e6,
    "opus100-500l-500l": 3.8e9,
    "opus100-48l-48l": 480e6,
    "opus100-12l-12l-1024d-post-ln": 610e6,
    "flores-102-100l-100l": 3.2e9,
    "torchscale-lm-12l-256-experts": 13e9,
}
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@cache
def read(path: Path) -> RunConfig:
    return configuration.build(RunConfig, configuration.load(path))


@each_config
def test_every_value_has_its_source(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\w+ = ", line) and not line.startswith("extends"):
            comment = line.partition("#")[2] or (above if above.startswith("#") else "")
            assert SOURCE.search(comment), f"{path.name}: {line}"


@each_config
def test_vocabularies_of_model_and_text_agree(path: Path) -> None:
    config = read(path)
    if "tokenizer" in configuration.load(path):
        known = 260 if config.tokenizer.of_bytes else config.tokenizer.vocab_size
        assert config.model.vocab_size == known + (config.task == "masked_lm")  # the mask


@pytest.mark.parametrize(
    ("name", "parameters"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1] > 3e9 else ()) for each in STATED.items()],
)
def test_models_have_the_size_that_the_papers_state(name: str, parameters: float) -> None:
    model = read(FOLDER / f"{name}.toml").model
    assert budget(model, Work(1, 4)).parameters == pytest.approx(parameters, rel=0.01)


def test_the_models_of_table_4_cost_about_the_same() -> None:
    work = Work(1, 32)
    deep, wide = (
        budget(read(FOLDER / f"opus100-{name}.toml").model, work).forward_flops_per_token
        for name in ("48l-48l", "12l-12l-1024d-post-ln")
    )
    # DeepNet counts 6 FLOPs a parameter and token: 480M and 610M. The vocabulary's share of the wide one is the larger.
    assert 0.6 < deep / wide < 1.0


def test_a_file_names_the_depth_that_it_has() -> None:
    for path in CONFIGS:
        depths = read(path).model.depths
        if named := re.search(r"(\d+)l-(\d+)l", path.stem):
            assert (depths.encoder, depths.decoder) == (int(named[1]), int(named[2]))
        elif named := re.search(r"-(\d+)l", path.stem):
            assert max(depths.encoder, depths.decoder) == int(named[1])


# Of the command that TorchScale's release prints for GPT pre-training, examples/fairseq/README.md.
RELEASED_LM = "--lr 5e-4 --warmup-updates 750 --dropout 0.1 --weight-decay 0.01 --clip-norm 0.0 --max-update 50000"


@pytest.mark.parametrize("depth", [12, 24, 48, 96])
def test_torchscales_language_models_are_trained_as_its_release_says(depth: int) -> None:
    words = RELEASED_LM.split()
    released = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    config = read(FOLDER / f"torchscale-lm-{depth}l.toml")
    train = config.train
    found = (train.lr, train.warmup_steps, config.model.dropout, train.weight_decay, train.clip_norm, train.steps)
    assert found == tuple(released.values())


def test_torchscales_sparse_models_are_clipped_as_its_paper_asks_for() -> None:
    sparse = [read(path).train for path in FOLDER.glob("torchscale-*experts.toml")]
    assert len(sparse) == 4
    assert {(train.clip, train.clip_norm) for train in sparse} == {("auto", 2.0)}


@pytest.mark.parametrize(("name", "directions"), [("opus100-500l-500l", 198), ("flores-102-100l-100l", 202)])
def test_many_languages_are_translated_from_and_to_english(name: str, directions: int) -> None:
    data = read(FOLDER / f"{name}.toml").data
    found = expand(data.directions, data.languages)
    assert len(found) == directions
    assert all({"en", "eng"} & {direction.source, direction.target} for direction in found)


def test_a_plan_reads_the_batch_and_the_beam_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(FOLDER / "wmt17-en-de-6l-6l.toml")
    assert main(["plan", path, "--json", "--length", "32"]) == 0
    work = json.loads(capsys.readouterr().out)["work"]
    assert (work["batch"], work["length"], work["beam"]) == (128, 32, 4)
    assert main(["plan", path, "--train.lrr", "1"]) == 2
    assert "did you mean 'lr'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def text() -> dict[str, list[str]]:
    """Lines of train, valid and test, English and German in turn."""
    found = list(pairs(140, seed=3, unseen=False))
    parts = {"train": found[:100], "backtranslated": found[100:120], "valid": found[120:130], "test": found[130:]}
    return {f"{part}.{side}": [pair[side] for pair in some] for part, some in parts.items() for side in (0, 1)}


def write_text(folder: Path, config: RunConfig, languages: list[str], text: dict[str, list[str]]) -> None:
    """Give every direction of the configuration the same text: English as the source, German as the target."""
    folder.mkdir()
    for direction in expand(config.data.directions, languages):
        names = direction.name if languages else ""
        for part in (*config.data.train, *config.data.synthetic, "valid", "test"):
            for side, language in enumerate((direction.source, direction.target)):
                stem = f"{part}.{names}" if names else part
                (folder / f"{stem}.{language}").write_text("".join(f"{line}\n" for line in text[f"{part}.{side}"]))


# Of configurations that differ in depth alone, one.
FAMILIES = {re.sub(r"-\d+l(-\d+l)?|-\d+(?=-experts)", "", path.stem): path for path in CONFIGS}
ONE_OF_A_KIND = {
    "wmt17-en-de",
    "wmt14-en-fr-admin-bt",
    "gpt3-medium",
    "torchscale-lm-experts",
    "shakespeare",
    "masked-lm",
    "cifar10",
    "camvid",
}
QUICK = [path for name, path in FAMILIES.items() if name in ONE_OF_A_KIND]


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    "path",
    [path if path in QUICK else pytest.param(path, marks=pytest.mark.slow) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_every_config_trains(
    path: Path, text: dict[str, list[str]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch, capsys
) -> None:
    """Two steps of a tiny model on tiny text: all else as shipped."""
    monkeypatch.setenv("KILOLAYER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    config, table = read(path), configuration.load(path)
    depth = ["--model.layers=2"] if "layers" in table["model"] else ["--model.encoder_layers=2", "--model.decoder_layers=1"]
    typed = [*depth, "--model.dim=16", "--model.heads=2", "--model.ffn_dim=32"]
    typed += ["--train.steps=2", "--train.accumulate=2", "--train.device=cpu"]
    kinds = {"translation": tiny_translation, "classify_image": tiny_images, "segment": tiny_pairs, "masked_image": tiny_masked}
    tiny_data = kinds.get(config.task, tiny_language)
    typed += tiny_data(config, table, tmp_path / "text", text)
    assert main(["train", str(path), "--run", str(tmp_path / "run"), *typed]) == 0, capsys.readouterr().err
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 2
    assert not any(line.get("skipped") for line in metrics)
    assert (tmp_path / "run/report.html").exists()


def tiny_images(config: RunConfig, table: configuration.Table, folder: Path, text: dict[str, list[str]]) -> list[str]:
    """What to type for a model of a few small images."""
    drawn_images(folder, 32, {"train": 30, "test": 12})
    typed = [f"--images.{part}={folder / part}" for part in ("train", "test")]
    return [*typed, "--images.valid_share=0.2", "--images.size=32", "--images.rows=8", "--train.keep=5"]


def tiny_masked(config: RunConfig, table: configuration.Table, folder: Path, text: dict[str, list[str]]) -> list[str]:
    """What to type for a masked image model of a few small images, with a tokenizer if codes are predicted."""
    drawn_images(folder, 32, {"train": 30, "test": 12})
    size = 32 // config.model.image.patch * config.model.image.patch
    typed = [f"--images.train={folder / 'train'}", f"--images.size={size}", "--images.rows=8"]
    typed += [f"--images.valid={folder / 'test'}"] if config.images.valid else [f"--images.test={folder / 'test'}"]
    if config.model.image.decoder:
        typed += ["--model.image.decoder.dim=16", "--model.image.decoder.heads=2"]
        typed += [] if config.images.valid else ["--images.valid_share=0.2"]
    if config.target.kind == "codes":
        patch, codes = config.model.image.patch, config.model.vocab_size
        words = [f"--model.patch={patch}", f"--model.codes={codes}", "--model.dim=8", "--train.steps=1", "--train.device=cpu"]
        (folder / "tokenizer.toml").write_text('task = "image_tokenizer"\n')
        assert main(["train", str(folder / "tokenizer.toml"), "--run", str(folder / "tokenizer"), *typed, *words]) == 0
        typed.append(f"--target.tokenizer={folder / 'tokenizer'}")
    return typed


def tiny_language(config: RunConfig, table: configuration.Table, folder: Path, text: dict[str, list[str]]) -> list[str]:
    """What to type for a language model on tiny text."""
    folder.mkdir()
    (folder / "text.txt").write_text("\n".join(text["train.0"]))
    typed = [f"--text.train={folder / 'text.txt'}", "--text.length=16", "--text.valid_share=0.1", "--text.test_share=0.1"]
    typed += ["--text.stride=8"] if table["text"].get("stride") else []
    return ["--batches.tokens=512", *typed, *([] if config.tokenizer.of_bytes else ["--tokenizer.vocab_size=300"])]


def tiny_translation(config: RunConfig, table: configuration.Table, folder: Path, text: dict[str, list[str]]) -> list[str]:
    """What to type for a translator of tiny text."""
    typed = ["--tokenizer.vocab_size=90", "--tokenizer.byte_fallback=false", "--batches.shapes=3", f"--data.folder={folder}"]
    typed += ["--search.max_length_factor=1", "--batches.tokens=512"]
    languages = []
    if config.data.languages:
        english = config.data.directions[0].partition("-")[0]
        languages = [english, *config.data.languages[:2]]
        typed.append(f"--data.languages={json.dumps(languages)}")
    if config.data.folder is None:  # a model alone
        config = configuration.build(RunConfig, {**table, "data": {"directions": ["en-de"]}})
        typed.append('--data.directions=["en-de"]')
    write_text(folder, config, languages, text)
    return typed


def tiny_pairs(config: RunConfig, table: configuration.Table, folder: Path, text: dict[str, list[str]]) -> list[str]:
    """What to type for a segmentation model of tiny images."""
    drawn_images(folder, 24, {"train": 18, "valid": 6, "test": 6})
    sources = [f"--images.{name}={folder / name}" for name in config.images.sources()]
    return [*sources, "--images.size=24", "--model.map_head.channels=8"]
