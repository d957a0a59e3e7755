"""A task in one file of a user's, without a vocabulary, that has every part of a built-in one: nothing else is edited."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.errors import InputError, OptionError
from kilolayer.tasks import registry

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
TINY: dict[str, Any] = {
    "model": {"layers": 1, "dim": 16, "heads": 2, "ffn_dim": 32},
    "train": {"steps": 60, "lr": 0.01, "warmup_steps": 5, "device": "cpu", "threads": 1, "layers_every": 0},
}


def block(language: str) -> str:
    """The block of the page that is the file pictures.py or pictures.toml."""
    (found,) = [each for each in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if '"pictures:' in each]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The two files, and nothing else, in a folder on the path."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "pictures.py").write_text(block("python"))
    (folder / "pictures.toml").write_text(block("toml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("pictures", None)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return kl.train(folder / "pictures.toml", run=folder / "run", **TINY)


@pytest.fixture(scope="module")
def pictures(folder: Path) -> ModuleType:
    import pictures  # pyright: ignore[reportMissingImports]

    return pictures


def test_it_learns_without_a_vocabulary(trained: Any) -> None:
    assert trained.tokenizer is None
    assert not list(trained.folder.glob("tokenizer*"))
    assert trained.scores()["test"]["accuracy"]["value"] > 0.5  # a guess is right in a third of the pictures


def test_loaded_it_is_the_tasks_object(trained: Any, pictures: ModuleType) -> None:
    run: Any = kl.load(trained.folder)
    assert type(run) is pictures.PictureClassifier
    pixels, classes = pictures.drawn(run.config.pictures, 16, 300, 2).parts  # those of the test set
    right = np.mean([name == pictures.CLASSES[place] for name, place in zip(run.classify(pixels), classes, strict=True)])
    assert right == pytest.approx(trained.scores()["test"]["accuracy"]["value"])


def test_it_adds_a_verb(trained: Any, pictures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = pictures.drawn(trained.config.pictures, 16, 5, 3).parts[0]
    np.save(tmp_path / "five.npy", pixels.numpy())
    assert main(["look", str(trained.folder), str(tmp_path / "five.npy")]) == 0
    assert capsys.readouterr().out.split() == trained.classify(pixels)
    assert main(["generate", str(trained.folder), "--prompt", "a"]) == 2
    assert f"kilolayer look {trained.folder}" in capsys.readouterr().err


def helped(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit):
        main([str(word) for word in words])
    return " ".join(capsys.readouterr().out.split())


def test_help_lists_its_verb_where_it_is_named(folder: Path, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    about = "look classify the pictures in a file of numpy"
    for named in (trained.folder, folder / "pictures.toml", "pictures:PictureTask"):
        assert about in helped(capsys, "--help", named)
    alone = helped(capsys, "--help")
    assert about not in alone
    assert "kilolayer --help my_module:MyTask" in alone
    assert about not in helped(capsys, "--help", folder / "none")
    assert main(["--help", "no_such_module:Task"]) == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    assert main(["look", "--help"]) == 2
    assert "of a task of your own, followed by a run folder of it" in capsys.readouterr().err
    assert "an array [pictures, height, width]" in helped(capsys, "look", trained.folder, "--help")
    assert all(registry.is_built_in(registry.get(name)) for name in registry.names())


def test_help_of_train_lists_its_tables(folder: Path, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Standard deviation of the noise on each pixel. (0 to 10) [0.3]"
    assert text not in helped(capsys, "train", "--help")
    assert text in helped(capsys, "train", folder / "pictures.toml", "--help")
    assert "pictures.tested" in helped(capsys, "train", f"--resume={trained.folder}", "--help")


def test_the_bounds_of_its_tables_hold(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="noise is 11") as caught:
        kl.train(folder / "pictures.toml", run=tmp_path / "run", pictures={"noise": 11})
    assert caught.value.fix == "noise must be at least 0 and at most 10"
    assert main(["plan", str(folder / "pictures.toml"), "--pictures.rows", "many"]) == 2
    assert "rows is 'many'" in capsys.readouterr().err


def test_a_verb_that_exists_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        block("python")
        .replace('"look"', '"report"')
        .replace('"pictures:', '"taken_verb:')
        .replace('"pictures"', '"taken_verb"')
    )
    (folder / "taken_verb.py").write_text(code)
    assert main(["--help", "taken_verb:PictureTask"]) == 2
    assert (
        "the verb 'report' of the task 'taken_verb:PictureTask' is already that of kilolayer.cli.report"
        in capsys.readouterr().err
    )
    (folder / "taken_verb.py").unlink()


EVALUATION = """
from kilolayer.cli.output import show_line

def add_flags(group):
    group.add_argument("--shout", action="store_true", help="print it in capitals")

def evaluate(run, options):
    accuracy = f"accuracy {run.scores(options.device)['test']['accuracy']['value']:.3f}"
    show_line(accuracy.upper() if options.shout else accuracy)
    return 0
"""


def test_it_adds_flags_to_evaluate(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python").replace('"pictures:', '"spoken:').replace("verbs=", 'evaluation="spoken_scores",\n        verbs=')
    (tmp_path / "spoken.py").write_text(code)
    (tmp_path / "spoken_scores.py").write_text(EVALUATION)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        tables = {**TINY, "train": {**TINY["train"], "steps": 2}}
        run = kl.train({"task": "spoken:PictureTask"}, run=tmp_path / "run", **tables)
        capsys.readouterr()
        assert main(["evaluate", str(run.folder), "--shout"]) == 0
        assert capsys.readouterr().out == f"ACCURACY {run.scores()['test']['accuracy']['value']:.3f}\n"
        assert "print it in capitals" in helped(capsys, "evaluate", run.folder, "--help")
    for module in ("spoken", "spoken_scores"):
        sys.modules.pop(module, None)


def test_it_adds_a_section_to_the_report(trained: Any) -> None:
    page, counts = (trained.folder / "report.html").read_text(), trained.scores()["confusion"]
    section = page[page.index("Confusion</h2>") :].partition("</section>")[0]
    cells = [int(cell) for cell in re.findall(r'<td class="number">(\d+)</td>', section)]
    assert cells == np.ravel(counts).tolist()
    assert sum(cells) == 300


def test_it_has_a_plan(folder: Path, trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder / "pictures.toml"), *(f"--model.{k}={v}" for k, v in TINY["model"].items()), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["work"]["batch"], plan["work"]["length"]) == (32, 12)
    assert plan["parameters"]["total"] == sum(weight.numel() for weight in trained.model.parameters())


def test_resumed_it_goes_on_as_if_it_had_not_stopped(folder: Path, tmp_path: Path) -> None:
    whole, first = ({**TINY, "train": {**TINY["train"], "steps": steps}} for steps in (20, 10))
    whole = kl.train(folder / "pictures.toml", run=tmp_path / "whole", **whole)
    kl.train(folder / "pictures.toml", run=tmp_path / "parts", **first)
    parts = kl.train(resume=tmp_path / "parts", train={"steps": 20}, pictures={"tested": 50})
    theirs, ours = (load_file(run.folder / "checkpoints/step-00000020/model.safetensors") for run in (whole, parts))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert parts.scores()["test"]["accuracy"]["signature"] == "pictures:50"
    with pytest.raises(InputError, match=r"pictures\.noise cannot change .*: its pictures would be others"):
        kl.train(resume=tmp_path / "parts", train={"steps": 30}, pictures={"noise": 0.1})


@pytest.mark.slow
def test_it_is_compared(folder: Path, trained: Any, tmp_path: Path) -> None:
    other = {**TINY, "model": {**TINY["model"], "recipe": "pre_ln"}}
    kl.train(folder / "pictures.toml", run=tmp_path / "pre", **other)
    shown = str(kl.compare_runs([trained.folder, tmp_path / "pre"]))
    values = [kl.load(run).scores()["test"]["accuracy"]["value"] for run in (trained.folder, tmp_path / "pre")]
    assert all(f"{value:.3f}" in shown for value in values)
    assert "accuracy" in shown


def test_its_exported_folder_has_a_card_and_computes_the_same(
    trained: Any, pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    kl.export(trained, to="huggingface", out=tmp_path / "exported")
    card = (tmp_path / "exported/README.md").read_text()
    assert 'pipeline_tag: "image-classification"' in card
    assert f"accuracy {trained.scores()['test']['accuracy']['value']:.3f} (`pictures:300`)" in card
    assert json.loads((tmp_path / "exported/config.json").read_text())["id2label"] == dict(
        zip("012", pictures.CLASSES, strict=True)
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    pixels = pictures.drawn(trained.config.pictures, 16, 50, 4).parts[0]
    found = names["model"](inputs_embeds=pixels).logits.argmax(dim=-1)
    assert [names["model"].config.id2label[place] for place in found.tolist()] == trained.classify(pixels)


def test_one_file_is_all_that_it_takes(folder: Path, trained: Any) -> None:
    code = [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]
    assert code == [folder / "pictures.py"]
    parts = registry.get("pictures:PictureTask")
    named = [parts.config, parts.task, parts.run, parts.report, parts.export, *(verb.home for verb in parts.verbs.values())]
    assert {path.partition(":")[0] for path in named} == {"pictures"}
