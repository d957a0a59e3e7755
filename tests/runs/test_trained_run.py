"""What a run can do in Python is what the command's verbs do, to the letter."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.errors import InputError, KilolayerError, OptionError
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runs import checkpoint
from kilolayer.runs.trained_run import TrainedRun
from kilolayer.tasks import registry
from kilolayer.tasks.causal_lm.language_model import LanguageModel
from kilolayer.tasks.classify.classifier import Classifier
from kilolayer.tasks.masked_lm.masked_language_model import MaskedLanguageModel
from kilolayer.tasks.translation.translator import Translator
from kilolayer.training.loop import train
from tests.fixtures.small_runs import SMALL, new_run, new_text_run, table, task_of
from tests.runs.run_by_command import printed

CLASSES = {"translation": Translator, "causal_lm": LanguageModel, "masked_lm": MaskedLanguageModel, "classify": Classifier}
LINES = ["The dog sleeps.", "", "A cat sees the small dog."]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", CLASSES)
def test_a_run_is_of_the_class_of_its_task(task: str, trained: dict[str, Path]) -> None:
    run = kl.load(str(trained[task]))
    assert type(run) is CLASSES[task]
    assert run.folder == trained[task]
    assert run.config.task == task
    assert repr(run) == f"{CLASSES[task].__name__}({str(trained[task])!r})"
    shown = json.loads(printed("evaluate", trained[task], "--json"))
    assert {name: entry for name, entry in run.scores().items() if name.startswith("test")} == shown["scores"]
    assert all(run.scores()[name] == shown[name] for name in set(shown) - {"scores", "against"})
    assert [row["step"] for row in run.metrics("train")] == [1, 2, 3, 4]
    assert len(run.metrics()) > 4
    assert task != "classify" or run.report() == trained[task] / "report.html"


@pytest.mark.matrix(2)
@pytest.mark.parametrize("task", CLASSES)
def test_the_model_has_the_weights_of_the_checkpoint(task: str, trained: dict[str, Path]) -> None:
    run = kl.load(trained[task])
    kept = checkpoint.load(checkpoint.steps(run.folder / "checkpoints")[-1]).model
    assert not run.model.training
    assert run.model.config == run.config.model
    assert all(torch.equal(tensor, kept[name]) for name, tensor in run.model.state_dict().items())
    assert run.tokenizer.digest == run._run.vocabulary().digest
    assert run.model is run.model


@pytest.mark.slow
def test_the_model_is_the_mean_where_the_run_averages(corpus: Path, tmp_path: Path) -> None:
    made = new_text_run(tmp_path / "run", corpus, train={"steps": 4, "save_every": 2, "average": 2, "keep": 2})
    assert train(made, task_of(made)) == 0
    two = [checkpoint.load(path).model for path in checkpoint.steps(made.checkpoints)]
    for name, tensor in kl.load(made.folder).model.state_dict().items():
        assert torch.equal(tensor, ((two[0][name].double() + two[1][name].double()) / 2).float())


def test_an_unfinished_run_can_be_used(corpus: Path, tmp_path: Path) -> None:
    made = new_run(tmp_path / "run", corpus)
    run = kl.load(made.folder)
    with pytest.raises(InputError, match="no complete checkpoint"):
        run.translate("A dog.")
    assert train(made, task_of(made)) == 0
    assert run.translate("A dog.") == kl.load(made.folder).translate("A dog.")


@pytest.mark.parametrize(
    "search",
    [
        {},
        {"beam": 3, "length_penalty": 0.5},
        pytest.param({"seed": 3, "top_k": 20}, marks=pytest.mark.slow),
        pytest.param({"max_source_length": 4}, marks=pytest.mark.slow),
    ],
)
def test_translations_are_the_commands(search: dict[str, Any], trained: dict[str, Path]) -> None:
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in search.items()]
    run = kl.load(trained["translation"])
    expected = printed("translate", trained["translation"], *typed, lines=LINES).split("\n")[:-1]
    assert run.translate(LINES, **search) == expected
    assert run.translate(iter(LINES), direction="en-de", **search) == expected
    assert run.translate(LINES[0], **search) == expected[0]


def test_all_hypotheses_are_the_commands(trained: dict[str, Path]) -> None:
    run = kl.load(trained["translation"])
    search = run.search(method="beam", beam=3, n_best=3)
    rows = [
        f"{number}\t{score:.4f}\t{text}"
        for number, each in enumerate(run.translations(LINES, search), 1)
        for score, text in zip(each.scores, each.texts, strict=True)
    ]
    assert rows == printed("translate", trained["translation"], "--n-best=3", "--beam=3", lines=LINES).split("\n")[:-1]


def test_one_text_is_not_taken_for_its_letters(trained: dict[str, Path]) -> None:
    translator, writer = kl.load(trained["translation"]), kl.load(trained["causal_lm"])
    assert [each.text for each in translator.translations(LINES[0])] == [translator.translate(LINES[0])]
    search = writer.search(greedy=True, max_tokens=3)
    assert [each.prompt for each in writer.continuations("ein", search)] == ["ein"]


@pytest.mark.parametrize("text", [{"test": ""}, {"test": ["test", ""]}, {"source": "", "reference": ""}], ids=str)
def test_an_empty_path_is_no_text_to_score(text: dict[str, Any], trained: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match=r"^(test|source) is empty"):
        kl.load(trained["translation"]).scores(**text)


def test_a_stream_is_one_text(trained: dict[str, Path]) -> None:
    writer = kl.load(trained["causal_lm"])
    with pytest.raises(OptionError, match="samples has no effect with greedy"):
        writer.search(greedy=True, samples=2)
    with pytest.raises(OptionError, match="samples=2, but stream writes one text"):
        writer.stream("ein", print, writer.search(samples=2))


@pytest.mark.parametrize("given", [3, b"ein", None, "\ud800"])
def test_what_is_no_text_is_named(given: Any, trained: dict[str, Path]) -> None:
    translator, writer = kl.load(trained["translation"]), kl.load(trained["causal_lm"])
    with pytest.raises(InputError, match=r"(?s)not (a text|valid Unicode).*prompt 2"):
        list(writer.continuations(["ein", given], writer.search(greedy=True, max_tokens=3)))
    with pytest.raises(InputError, match=r"not (a text|valid Unicode)"):
        writer.stream(given, print)
    with pytest.raises(InputError, match=r"(?s)not (a text|valid Unicode).*line 2"):
        list(translator.translations(["ein", given]))


@pytest.mark.slow
def test_several_directions_need_a_name(corpus: Path, tmp_path: Path) -> None:
    run = kl.train(_both_ways(corpus), run=tmp_path / "run")
    for direction in ("en-de", "de-en"):
        expected = printed("translate", run.folder, "--direction", direction, lines=LINES).split("\n")[:-1]
        assert run.translate(LINES, direction=direction) == expected
    with pytest.raises(OptionError, match=r'(?s)several directions.*direction="'):
        run.translate(LINES)
    with pytest.raises(OptionError, match="did you mean 'en-de'"):
        run.translate(LINES, direction="en-d")


def _both_ways(corpus: Path) -> dict[str, Any]:
    data = {"directions": ["en-de", "de-en"]}
    return table(corpus, data=data, train={"steps": 2, "warmup_steps": 1}, tokenizer={"vocab_size": 95})


@pytest.mark.parametrize("options", [{"greedy": True}, {"seed": 7, "temperature": 0.8, "top_p": 0.9}])
def test_continuations_are_the_commands(options: dict[str, Any], trained: dict[str, Path]) -> None:
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    run = kl.load(trained["causal_lm"])
    shown = json.loads(printed("generate", run.folder, "--max-tokens=9", "--json", *words, lines=LINES))
    assert run.generate(LINES, max_tokens=9, **options) == [each["continuations"][0]["text"] for each in shown]
    plain = printed("generate", run.folder, "--max-tokens=9", *words, lines=LINES)
    texts = run.generate(LINES, max_tokens=9, **options)
    assert plain == "---\n".join(f"{line}{text}\n" for line, text in zip(LINES, texts, strict=True))
    streamed = printed("generate", run.folder, "--max-tokens=9", *words, "--prompt", LINES[0])
    assert streamed == f"{LINES[0]}{run.generate(LINES[0], max_tokens=9, **options)}\n"


def test_several_samples_and_their_probabilities_are_the_commands(trained: dict[str, Path]) -> None:
    run = kl.load(trained["causal_lm"])
    shown = json.loads(printed("generate", run.folder, "--samples=2", "--max-tokens=5", "--json", lines=LINES))
    found = list(run.continuations(LINES, run.search(samples=2, max_tokens=5)))
    assert [[vars(text) for text in each.continuations] for each in found] == [each["continuations"] for each in shown]
    assert [each.cut for each in found] == [False, False, True]  # the model reads 16 bytes


def test_fillings_are_the_commands(trained: dict[str, Path]) -> None:
    run, texts = kl.load(trained["masked_lm"]), ["The <mask> sings.", "A <mask> and a <mask>."]
    shown = json.loads(printed("fill", run.folder, "--top=3", "--json", lines=texts))
    found = run.fill(texts, top=3)
    assert [{"text": each.text, "filled": each.filled} for each in found] == [
        {"text": each["text"], "filled": each["filled"]} for each in shown
    ]
    assert [[[vars(guess) for guess in mask] for mask in each.masks] for each in found] == [each["masks"] for each in shown]
    assert run.fill(texts[0], top=3) == run.fill(texts[:1], top=3)[0]


def test_predictions_are_the_commands(trained: dict[str, Path]) -> None:
    run, rows = kl.load(trained["classify"]), ["so good", "the sea is bad", "good " * 30]
    shown = json.loads(printed("predict", run.folder, "--json", lines=rows))
    found = run.predict(rows)
    assert [{"first": each.sentences[0], "label": each.label, "probabilities": each.probabilities} for each in found] == shown
    assert [each.cut for each in found] == [False, False, True]
    assert run.predict(rows[0]).label == found[0].label
    assert run.predict([["so good"]])[0].label == found[0].label


@pytest.mark.slow
def test_pairs_and_numbers_are_predicted(corpus: Path, tmp_path: Path) -> None:
    examples = {"second": "b", "kind": "number", "label": "score"}
    tables = SMALL["classify"](corpus, examples=examples, train={"steps": 2, "warmup_steps": 1})
    run = kl.train(tables, run=tmp_path / "run")
    (shown,) = json.loads(printed("predict", run.folder, "--json", lines=["so good\tyes"]))
    for row in ("so good\tyes", ("so good", "yes")):
        (found,) = run.predict([row])
        assert (found.sentences, found.label, found.probabilities) == (["so good", "yes"], shown["number"], {})
    with pytest.raises(InputError, match=r"(?s)two sentences.*row 1"):
        run.predict(["so good"])


def test_methods_of_another_task_say_what_the_run_is(trained: dict[str, Path]) -> None:
    for task, methods in {"causal_lm": "translate fill predict", "translation": "generate", "classify": "translate"}.items():
        run = kl.load(trained[task])
        own = registry.get(task)
        for method in methods.split():
            with pytest.raises(AttributeError, match=f"this run is {own.title} and has no '{method}'"):
                getattr(run, method)
            with pytest.raises(KilolayerError, match=f"it has: .*{next(iter(own.verbs))}"):
                getattr(run, method)
            assert not hasattr(run, method)
    assert copy.copy(kl.load(trained["classify"])).predict("so good")


MISTAKES: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any], str]] = {
    "a number": ("translation", "translate", (["a", 3],), {}, "(?s)this is 3, not a text.*line 2"),
    "no lines": ("translation", "translate", (None,), {}, "lines are given as None"),
    "half a character": ("translation", "translate", (["\ud800"],), {}, "not valid Unicode"),
    "an unknown option": ("translation", "translate", (["a"],), {"bean": 3}, "did you mean 'beam'"),
    "a lonely option": ("translation", "translate", (["a"],), {"beam": 3, "top_k": 2}, "has no effect with method"),
    "several hypotheses": ("translation", "translate", (["a"],), {"method": "beam", "n_best": 2}, r"\.translations"),
    "no tokens": ("causal_lm", "generate", ("a",), {"max_tokens": 0}, "max_tokens must be 1 to 1,000,000"),
    "a wrong option": ("causal_lm", "generate", ("a",), {"temprature": 1.0}, "did you mean 'temperature'"),
    "an option of sampling": ("causal_lm", "generate", ("a",), {"greedy": True, "top_k": 3}, "no effect with method 'greedy'"),
    "several samples": ("causal_lm", "generate", ("a",), {"samples": 2}, r"\.continuations"),
    "no mask": ("masked_lm", "fill", (["<mask>", "none"],), {}, "(?s)has no mask.*text 2"),
    "no guesses": ("masked_lm", "fill", ("<mask>",), {"top": 0}, "top must be at least 1"),
    "an empty sentence": ("classify", "predict", (["so", " "],), {}, "(?s)a sentence is empty.*row 2"),
    "no rows": ("classify", "predict", (3,), {}, "rows are given as 3"),
    "a row that is a number": ("classify", "predict", (["so", 3],), {}, "(?s)this is 3, not a text.*row 2"),
    "a direction that is a number": (
        "translation",
        "translate",
        ("x",),
        {"direction": 5},
        "5 is not the name of any direction",
    ),
    "a direction and no text": ("translation", "scores", (), {"direction": "en-de"}, "no text is given"),
    "a kind of metrics": ("classify", "metrics", ("vaild",), {}, "(?s)did you mean 'valid'.*metrics.jsonl.*valid: event, "),
    "no kind at all": ("classify", "metrics", (5,), {}, "unknown kind of metrics '5'"),
    "no prompts at once": ("causal_lm", "continuations", (["a"],), {"at_once": 0}, "at_once is 0"),
    "no texts at once": ("masked_lm", "fillings", ([("<mask>", "1")],), {"at_once": -1}, "at_once is -1"),
    "no rows at once": ("classify", "predictions", ([["so"]],), {"at_once": 0}, "at_once must be a whole number, at least 1"),
    "half a row at once": ("classify", "predictions", ([["so"]],), {"at_once": 0.5}, "at_once is 0.5"),
    "no guesses for many": ("masked_lm", "fillings", ([],), {"top": 0}, "top must be at least 1"),
    "a row that is no text": ("classify", "predict", ([[3]],), {}, "this is 3, not a text"),
}


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_and_where(name: str, trained: dict[str, Path]) -> None:
    task, method, arguments, options, text = MISTAKES[name]
    with pytest.raises(KilolayerError, match=text):
        getattr(kl.load(trained[task]), method)(*arguments, **options)


def test_where_a_run_is_loaded_is_checked_at_once(trained: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this is not a run"):
        kl.load(tmp_path)
    with pytest.raises(InputError, match=f"(?s)does not exist; did you mean '{trained['classify']}'.*kl.train"):
        kl.load(trained["classify"].with_name("clasify"))
    with pytest.raises(InputError, match=r"the folder does not exist\n.*no/such/folder"):
        kl.load("no/such/folder")
    with pytest.raises(InputError, match="the run's folder is 5, not a path"):
        kl.load(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"a model without a run(?s:.*)kl\.load_model"):
        kl.load(kl.save(kl.load(trained["classify"]).model, tmp_path / "bare"))
    with pytest.raises(OptionError, match="device is 'gpu'"):
        kl.load(trained["classify"], device="gpu")
    wrong: Any = "int8"
    with pytest.raises(OptionError, match="unknown precision 'int8'"):
        kl.load(trained["classify"], precision=wrong)
    assert kl.load(trained["classify"], device=torch.device("cpu")).device == torch.device("cpu")


@pytest.mark.slow
def test_products_are_computed_as_asked(trained: dict[str, Path]) -> None:
    run = kl.load(trained["translation"], precision="bf16")
    assert run.translate(LINES) == printed("translate", run.folder, "--precision=bf16", lines=LINES).split("\n")[:-1]
    assert isinstance(run.reader, EncoderDecoder)
    assert {weight.dtype for weight in run.model.parameters()} == {torch.float32}


def test_scores_do_not_depend_on_the_precision_of_other_methods(trained: dict[str, Path], corpus: Path) -> None:
    run, rounded = (kl.load(trained["causal_lm"], precision=precision) for precision in ("fp32", "bf16"))
    assert rounded.scores(corpus / "test.en")["test"] == run.scores()["test"] == rounded.scores()["test"]
    assert not torch.equal(rounded.reader(torch.ones(1, 4).long()).logits, run.reader(torch.ones(1, 4).long()).logits)


class Counter(TrainedRun):
    """What a user's task may name."""

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def test_a_task_of_ones_own_names_its_class(trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    own = registry.get("causal_lm")
    monkeypatch.setitem(registry._registry, "causal_lm", replace(own, run=f"{__name__}:Counter"))
    run = kl.load(trained["causal_lm"])
    assert run.count() == sum(parameter.numel() for parameter in run.model.parameters()) > 0
    monkeypatch.setitem(registry._registry, "causal_lm", replace(own, run=registry.Registration.run))
    assert type(kl.load(trained["causal_lm"])) is TrainedRun
    monkeypatch.setitem(registry._registry, "causal_lm", replace(own, run="json:JSONDecoder"))
    with pytest.raises(InputError, match=r"let it extend kl\.TrainedRun"):
        kl.load(trained["causal_lm"])
