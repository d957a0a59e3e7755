"""The report page: valid, self-contained, complete, and written from whatever a run has left."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.display import TitledTable
from kilolayer.errors import InputError
from kilolayer.report.facts import facts_of
from kilolayer.report.numbers import show_number
from kilolayer.report.page import render, write_report
from kilolayer.report.record import Record, read_record
from kilolayer.report.run_parts import score_parts
from kilolayer.report.scores_section import scores_section
from kilolayer.tasks import registry
from tests.report.made_run import BRIEF, CONFIG, SAMPLES, SCORES, entries, make_run
from tests.report.parsed_page import Page


def page_of(run: Path) -> Page:
    return Page(write_report(run).path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "deep <one>", entries(), analysis=True)


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return page_of(run)


def test_the_page_is_self_contained(run: Path, page: Page) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags)
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in references)
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}  # the name of a language
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|innerHTML|outerHTML|document\.write)\b", page.scripts[1])
    assert "@import" not in text
    assert all(not name.startswith("on") for name, _ in page.attributes)
    assert len(text) < 600_000
    assert not list(run.glob("*.part"))


def test_ids_are_unique(page: Page) -> None:
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_headline_holds_recipe_depth_parameters_loss_and_bleu(page: Page) -> None:
    parameters = sum(p.numel() for p in kl.EncoderDecoder(500, 64, 4, 128, 18, 12, "deepnorm").parameters())
    best = min(entry["loss"] for entry in entries() if entry["kind"] == "valid")
    for shown in ("deep <one>", "DeepNorm", "18L-12L", f"{parameters / 1e6:.3g} M", f"{best:.3f}", "31.88", "2,000 steps"):
        assert shown in page.text, shown


def test_scores_stand_with_their_signatures(page: Page) -> None:
    text = page.text.replace("| ", "|")
    for score in SCORES["test"].values():  # pyright: ignore
        if "value" in score:
            assert f"{score['value']:.2f}" in text
            assert score["signature"] in text
    assert "not available: nltk is not installed (pip install nltk)" in text


def test_every_plot_is_there(page: Page) -> None:
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == page.tags.count("svg") == 5 + 2 + 3 + 6
    assert "Training and validation loss by step" in labels
    assert "Gradient norm by layer and step" in labels
    assert "Residual stream RMS by layer of the decoder" in labels
    assert "Word accuracy by frequency in the training text" in labels
    assert "BLEU by sentence length" in labels


def test_samples_are_shown_and_escaped(run: Path, page: Page) -> None:
    for sample in SAMPLES:
        assert all(text in page.text for text in sample.values())
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "b" not in page.tags


HOSTILE = (
    "</title></style></pre></svg><script>alert(1)</script><img src=x onerror=f()>{{ 7 * 7 }}{% raw %}\"' onload='' $\\frac{$"
)


def hostile_run(folder: Path) -> Path:
    """A run whose every text and name is hostile, wherever the format allows one."""
    loads = {"layers": [HOSTILE, HOSTILE], "load": [[0.97, 0.01, 0.02], [0.5, 0.5, 0.0]], "entropy": [0.1, 0.2]}
    metrics = [
        {
            "kind": "train",
            "step": 10,
            "loss": 5.0,
            "nll": HOSTILE,
            "lr": 1e-3,
            "epoch": HOSTILE,
            "seconds": HOSTILE,
            HOSTILE: 1,
        },
        {"kind": "train", "step": 20, "loss": 4.0, "nll": 4.0, "tokens_per_second": HOSTILE, "clipped": HOSTILE},
        {"kind": "valid", "step": 20, "loss": 4.0, "bleu": 3.0, "directions": {HOSTILE: {"loss": 4.0, "bleu": HOSTILE}}},
        {"kind": "layers", "step": 1, "gradient": {"encoder": [1.0, HOSTILE], HOSTILE: [1.0]}, "update": HOSTILE},
        {"kind": "layers", "step": 20, "gradient": {"encoder": [1e-9, 1.0], HOSTILE: [1.0]}, "residual": {"encoder": HOSTILE}},
        {"kind": "routing", "step": 20, **loads, "dropped": [0.5, 0.4], "temperature": [HOSTILE, 0.3], "clipped": HOSTILE},
        {"kind": "event", "step": 20, "text": HOSTILE},
    ]
    score = {"name": HOSTILE, "value": 1.5, "signature": f"{HOSTILE}|{HOSTILE}", "digits": HOSTILE}
    scores = {
        HOSTILE: {HOSTILE: score, "ter": {"reason": HOSTILE}},
        "length_buckets": [{"label": HOSTILE, "bleu": 3.0, "sentences": HOSTILE}],
        "frequency_buckets": [{"label": HOSTILE, "f1": 0.5}],
    }
    fields = ("source", "reference", "hypothesis", "prompt", "text", "continuation", HOSTILE)
    make_run(folder, metrics)
    (folder / "config.toml").write_text(
        f"# {HOSTILE}\n[train]\nfreeze = 'experts'\nstart_from = {json.dumps(HOSTILE)}\n[model]\nname = {json.dumps(HOSTILE)}\n"
    )
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "samples.json").write_text(json.dumps([dict.fromkeys(fields, HOSTILE)]))
    (folder / "log.txt").write_text(f"{HOSTILE}\nwarning: {HOSTILE}\n")
    return folder


def assert_harmless(run: Path) -> Page:
    text = write_report(run).path.read_text(encoding="utf-8")
    shown = Page(text)
    assert not {"img", "iframe", "object", "link"} & set(shown.tags)
    assert shown.tags.count("script") == 2  # the numbers of the plots, and our own script
    json.loads(shown.scripts[0])
    assert all(not name.startswith("on") for name, _ in shown.attributes)
    assert text.count("</title>") == text.count("</style>") == 1
    assert text.count("</script>") == 2
    return shown


@pytest.mark.slow
def test_hostile_text_in_every_field_of_a_run_is_escaped(tmp_path: Path) -> None:
    shown = assert_harmless(hostile_run(tmp_path / '"><script>alert(0)<\u2044script>'))
    words = re.sub(r"\s+", " ", HOSTILE)
    assert "{{ 7 * 7 }}" in shown.text
    assert '"><script>alert(0)<\u2044script> - Kilolayer' in shown.text
    for place in (
        f"Step 20: {words}",  # an event
        f"warning: {words}",  # the log
        f"Layer {words} has collapsed",
        f"the faults are those of {words}",  # the configuration
        f"not available: {words}",
        f"hypothesis {words}",  # a sample
    ):
        assert place in shown.text, place
    assert shown.text.count(words) >= 20


@pytest.mark.slow
def test_hostile_names_of_directions_are_escaped(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    tests = {f"{side} {HOSTILE}": {"bleu": {"value": 1.0, "name": HOSTILE, "signature": HOSTILE}} for side in "ab"}
    buckets = {f"a {HOSTILE}": [{"label": HOSTILE, "f1": 0.5, "bleu": 1.0}]}
    averages = {"averages": {HOSTILE: {"bleu": 1.0}}, "frequency_buckets": buckets, "length_buckets": buckets}
    (run / "scores.json").write_text(json.dumps(tests | averages))
    (run / "config.toml").write_text(f"[model]\n{HOSTILE}")
    words = re.sub(r"\s+", " ", HOSTILE)
    shown = assert_harmless(run)
    assert f"average {words}" in shown.text
    assert f"b {words}" in shown.text


def scored(*values: float, **more: object) -> dict[str, Any]:
    """A scores.json of a test set for each value, with their mean."""
    entries = [{"bleu": {"name": "BLEU", "value": each, "signature": "s", **more}} for each in values]
    sets = {f"test de-{number}": entry for number, entry in enumerate(entries)}
    return {**sets, "averages": {"all": {"bleu": sum(values) / len(values)}}}


@pytest.mark.parametrize(("more", "shown"), [({}, ["31.10", "7.00", "19.05"]), ({"digits": 3}, ["31.099", "6.999", "19.05"])])
def test_every_face_shows_a_score_with_the_same_digits(more: dict[str, int], shown: list[str]) -> None:
    headline = registry.get("translation").headline
    scores = scored(31.0987, 6.9992, **more)
    section = scores_section(scores, headline)
    assert section.by_direction is not None
    assert section.averages is not None
    assert [row[1] for row in (*section.by_direction.rows, *section.averages.rows)] == shown
    table, *_ = score_parts(scores, headline)
    assert isinstance(table, TitledTable)
    assert [row[1] for row in table.rows] == shown
    assert [fact.value for fact in facts_of(Record("run", scores=scores))] == shown[:1]


def test_the_tile_has_as_many_digits_as_the_headline() -> None:
    config = {"task": "causal_lm"}
    scores = {"test": {"bits_per_byte": {"name": "bits per byte", "value": 1.23, "signature": "s"}}}
    validations = [{"step": 3, "bits_per_byte": 1.23}]
    for record in (Record("run", config, scores=scores), Record("run", config, valid=validations)):
        assert [fact.value for fact in facts_of(record)] == ["1.2300"]


def test_warnings_are_in_words(page: Page) -> None:
    assert "Step 57 was skipped without changing the model: gradient is not finite." in page.text
    assert page.text.count("gradient is not finite") == 1  # one fact is one bullet
    assert "WARNING 3 pairs were longer than 256 tokens <cut>" in page.text


def test_skipped_steps_are_one_sentence_and_changes_one_each() -> None:
    skipped = [{"step": step, "text": f"step {step} skipped: the gradient is not finite"} for step in range(27, 37)]
    changes = [{"step": 9, "change": True, "text": f"continued with {text}"} for text in ("train.lr 1", "train.steps 50")]
    shown = Page(
        render(Record("run", train=[{"step": 40, "loss": 1.0}], event=[*skipped, *changes], log=["error: a", "error: a"]))
    )
    sentence = "10 steps, from 27 to 36, were skipped without changing the model: the gradient is not finite."
    bullets = [text for text in shown.texts if text.strip()]
    assert {sentence, "Continued with train.lr 1.", "Continued with train.steps 50.", "40 steps"} <= set(bullets)
    assert shown.text.count("not finite") == 1
    assert bullets.count("error: a") == 1


def test_an_error_that_is_a_score_is_no_warning() -> None:
    log = ["step 20: validation loss 0.9587, mean squared error of pixels 0.07805", "an error of the disk"]
    shown = Page(render(Record("run", train=[{"step": 40, "loss": 1.0}], log=log)))
    warnings = shown.text.partition("Warnings")[2].partition("Training")[0]
    assert "an error of the disk" in warnings
    assert "squared" not in warnings


def test_configuration_and_directions_are_shown(page: Page) -> None:
    assert re.sub(r"\s+", " ", CONFIG.strip()) in page.text
    assert "de-en" in page.text
    assert "Clipped in 100 of 2,000 steps" in page.text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kept", ["config.toml", "metrics.jsonl", "scores.json"])
def test_one_file_is_enough(tmp_path: Path, kept: str) -> None:
    made = make_run(tmp_path / "run")
    for path in made.iterdir():
        if path.name != kept:
            path.unlink()
    shown = page_of(made)
    assert ("Training" in shown.headings) == (kept == "metrics.jsonl")
    assert ("Scores" in shown.headings) == (kept == "scores.json")
    assert ("Configuration" in shown.headings) == (kept == "config.toml")


@pytest.mark.matrix(2)
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "log.txt", "scores.json", "samples.json"])
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    made = make_run(tmp_path / "run")
    (made / missing).unlink()
    shown = page_of(made)
    if missing in ("config.toml", "metrics.jsonl"):
        assert f"{missing} is missing." in shown.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_still_writes(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    whole = (made / "metrics.jsonl").read_text()
    (made / "metrics.jsonl").write_text(whole[: 3 * len(whole) // 4])
    shown = page_of(made)
    assert "The last line of metrics.jsonl is incomplete" in shown.text
    assert "Training" in shown.headings


def test_a_run_without_a_step(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    for name in ("metrics.jsonl", "log.txt"):
        (made / name).write_text("")
    shown = page_of(made)
    assert "No training steps have been recorded yet." in shown.text


@pytest.mark.usefixtures("undrawn")
def test_a_clean_run_says_that_it_is_clean(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    (made / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in BRIEF))
    (made / "log.txt").write_text("start\n")
    assert "None: no steps were skipped" in page_of(made).text


@pytest.mark.usefixtures("undrawn")
def test_damage_is_named_and_survived(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    whole = (made / "metrics.jsonl").read_text()
    (made / "metrics.jsonl").write_text('{"kind": "train", "step": null}\n[1]\nnot json\n\n' + whole)
    (made / "scores.json").write_text("{")
    (made / "samples.json").write_text('"text"')
    (made / "config.toml").write_text("[model\n")
    shown = page_of(made)
    assert "Lines 1, 2, 3 of metrics.jsonl cannot be read and are left out." in shown.text
    assert "scores.json cannot be read" in shown.text
    assert "config.toml cannot be read" in shown.text


@pytest.mark.matrix(3)
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "scores",
    [
        [],
        {"test": {"bleu": None}},
        {"test": {"bleu": {"value": "high"}}},
        {"test": 3, "length_buckets": {}, "frequency_buckets": [1, {}]},
        {"test": {"bleu": {"value": 12.5}}},
        {"test a": {"bleu": {"value": 1}}, "test b": {"bleu": {}, "ter": {"value": 2}}, "averages": 3, "frequency_buckets": {}},
        {"averages": {"xx-en": 3}, "frequency_buckets": {"test a": 3, "test b": [{"f1": "x"}]}, "length_buckets": {"a": []}},
    ],
)
def test_scores_of_any_form_do_not_stop_the_page(tmp_path: Path, scores: object) -> None:
    made = make_run(tmp_path / "run")
    (made / "scores.json").write_text(json.dumps(scores))
    assert "Training" in page_of(made).headings


@pytest.mark.parametrize("parts", [("test",), ("test a", "test b")])
def test_the_page_says_which_weights_were_scored(tmp_path: Path, parts: tuple[str, ...]) -> None:
    made = make_run(tmp_path / "run")
    weights = {"chosen": "best", "steps": [20], "passed_over": [30]}
    (made / "scores.json").write_text(json.dumps({**{each: {"bleu": {"value": 1.0}} for each in parts}, "weights": weights}))
    assert "Scored weights: best, step 20; damaged or missing: step 30." in page_of(made).text


def test_values_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    lines = [
        {"kind": "train", "step": 1, "loss": float("nan"), "lr": None, "grad_norm": float("inf")},
        {"kind": "train", "step": 2, "loss": 3.0, "lr": 1e-3, "grad_norm": 0.0, "clipped": "many"},
        {"kind": "valid", "step": 2, "loss": float("nan"), "bleu": None, "directions": {"en-de": None}},
        {"kind": "layers", "step": 2, "gradient": {"encoder": [None, 1.0, 0.0]}, "update": [], "residual": None},
    ]
    (made / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = page_of(made)
    assert "Best validation loss" not in shown.text
    assert "en-de" in shown.text


def test_a_resumed_run_shows_the_steps_that_count(tmp_path: Path) -> None:
    steps = [(1, 9.0), (2, 8.0), (3, 7.0), (2, 5.0)]
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = read_record(tmp_path).train
    assert [(entry["step"], entry["loss"]) for entry in kept] == [(1, 9.0), (2, 5.0)]


@pytest.mark.usefixtures("undrawn")
def test_many_of_everything_is_cut_short_in_words(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    events = [{"kind": "event", "step": step, "text": f"step {step}: odd"} for step in range(1, 101)]
    (made / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (made / "samples.json").write_text(json.dumps(SAMPLES * 50))
    (made / "log.txt").write_text("a\n" * 1000)
    shown = page_of(made)
    assert "Step 40: odd" in shown.text
    assert "60 more in log.txt and metrics.jsonl." in shown.text
    assert "70 more in samples.json." in shown.text
    assert "The last 60 lines" in shown.text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_report(tmp_path / "absent")
    with pytest.raises(InputError, match="not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_writing_again_gives_the_same_page(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_report(run)
    before = (run / "report.html").read_text(encoding="utf-8")
    assert write_report(run).path == run / "report.html"
    assert (run / "report.html").read_text(encoding="utf-8") == before


@pytest.mark.usefixtures("undrawn")
def test_what_is_wrong_with_the_model_is_said_on_the_page_and_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {
        "layers": ["encoder 2"],
        "load": [[0.97, 0.01, 0.01, 0.01]],
        "entropy": [0.1],
        "dropped": [0.0],
        "temperature": [0.3],
    }
    stacks = {"encoder": {"reached": 1e-9}, "decoder": {"reached": 1.0}}
    blind = {"kind": "valid", "step": 5, "loss": 4.0, "source_gain": 0.004}
    ill = [{"kind": "stacks", "step": 5, **stacks}, {"kind": "routing", "step": 5, **shares}, blind]
    run = make_run(tmp_path / "ill", [*BRIEF, *ill])
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / 'report.html'}\n"
    reached = "The encoder is dead: over the last tenth of the steps, the gradient of its first layers was 1/1,000,000,000"
    collapsed = "Layer encoder 2 has collapsed: expert 1 takes 97% of the tokens."
    unread = "At step 5 the right source lowers the loss by only 0.004 nats per token"
    for text in (said.err, page_of(run).text):
        assert reached in text
        assert collapsed in text
        assert unread in text
    assert main(["report", str(make_run(tmp_path / "well"))]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "shown"), [(25_932, "25,932"), (0.031579, "0.03158"), (2616.46, "2,616"), (math.nan, "-")])
def test_counts_keep_their_digits(value: float, shown: str) -> None:
    assert show_number(value) == shown
