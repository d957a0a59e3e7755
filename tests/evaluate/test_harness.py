"""lm-eval's own requests and tasks on our models: the same likelihoods as ours."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import kilolayer as kl
from kilolayer.data.vocabulary import ByteVocabulary
from kilolayer.errors import KilolayerError
from kilolayer.evaluate.choices import score_choices

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 48
TEXTS = [("Question: who?\nAnswer: ", "me"), ("", "a beginning"), ("x" * 60, " y"), ("Where", " there"), ("Where", " é")]


@pytest.fixture
def model() -> kl.Decoder:
    model = kl.Decoder(ByteVocabulary.vocab_size, 16, 2, 32, 2, pad_id=None, positions="rotary").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def harness(model: kl.Decoder) -> Any:
    from kilolayer.evaluate.harness import HarnessModel

    return HarnessModel(model, ByteVocabulary(), LENGTH)


def requests(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=index) for index, each in enumerate(arguments)]


def test_both_give_the_same_likelihoods(model: kl.Decoder) -> None:
    found = harness(model).loglikelihood(requests("loglikelihood", *TEXTS), disable_tqdm=True)
    expected = score_choices(model, ByteVocabulary(), TEXTS, LENGTH)
    assert [value for value, _ in found] == pytest.approx([each.log_likelihood for each in expected], abs=1e-12)
    assert [greedy for _, greedy in found] == [each.greedy for each in expected]


@torch.no_grad()
def test_a_whole_text_is_scored_in_the_windows_of_lm_eval(model: kl.Decoder) -> None:
    from lm_eval.utils import get_rolling_token_windows

    for text in ("short", "a long text " * 12, ""):
        tokens = ByteVocabulary().encode(text.encode()).tolist()
        expected = 0.0
        for read, predicted in get_rolling_token_windows(tokens, prefix_token=3, max_seq_len=LENGTH, context_len=1):
            logits = model(torch.tensor([read])).logits[0, -len(predicted) :].log_softmax(dim=-1)
            expected += float(logits.gather(1, torch.tensor(predicted)[:, None]).sum())
        (found,) = harness(model).loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
        assert found == pytest.approx(expected, abs=1e-9)


def test_what_is_written_ends_before_a_stop_text(model: kl.Decoder) -> None:
    adapter = harness(model)

    def written(**options: Any) -> str:
        (text,) = adapter.generate_until(requests("generate_until", ("Where", options)))
        return text

    whole = written(max_gen_toks=12)
    assert 0 < len(whole) <= 12
    stop = whole[len(whole) // 2 :][:1]
    assert written(max_gen_toks=12, until=[stop, "\x00never"], do_sample=False) == whole.partition(stop)[0]
    assert written(max_gen_toks=12, until=stop) == whole.partition(stop)[0]
    assert written(max_gen_toks=12, do_sample=True, temperature=0.0) == whole
    drawn = written(max_gen_toks=12, do_sample=True, temperature=5.0)
    assert drawn == written(max_gen_toks=12, do_sample=True, temperature=5.0)
    for samples in ({}, {"do_sample": None}):
        assert written(max_gen_toks=12, temperature=5.0, **samples) == drawn
    assert written(max_gen_toks=12, temperature=5.0, do_sample=False) == whole
    assert written(max_new_tokens=12, max_tokens=3, num_beams=1) == whole
    with pytest.raises(KilolayerError, match="no beam search"):
        written(num_beams=4)
    with pytest.raises(KilolayerError, match="unknown generation option 'repetition_penalty'"):
        written(repetition_penalty=2.0)


TASK = """\
task: made_choices
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Question: {{{{goal}}}}\\nAnswer:"
doc_to_choice: "{{{{[sol1, sol2]}}}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_bytes
"""


def test_a_task_of_lm_eval_has_our_accuracy(model: kl.Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from kilolayer.evaluate.shots import SETS
    from kilolayer.evaluate.shots.examples import read_examples
    from kilolayer.evaluate.shots.score import score_set
    from tests.evaluate.made_questions import write_lines

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    rows = [{"goal": f"{n} of", "sol1": "a" * (n + 1), "sol2": "bc" * (9 - n), "label": n % 2} for n in range(9)]
    path = write_lines(tmp_path / "piqa.val.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "made.yaml").write_text(TASK.format(path=path))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    answer = lm_eval.simple_evaluate(harness(model), tasks=["made_choices"], task_manager=manager, bootstrap_iters=0)
    assert answer is not None
    theirs = answer["results"]["made_choices"]
    ours = {
        each.norm: each for each in score_set(model, ByteVocabulary(), LENGTH, read_examples(SETS["piqa"], tmp_path), shots=0)
    }
    assert theirs["acc,none"] == pytest.approx(ours["none"].value)
    assert theirs["acc_bytes,none"] == pytest.approx(ours["bytes"].value)
    assert not math.isnan(theirs["acc,none"])


def test_a_run_is_a_model_of_lm_eval_by_name(tmp_path: Path) -> None:
    from lm_eval.api.registry import get_model

    from kilolayer.cli.harness import RunModel

    assert get_model("kilolayer") is RunModel
    with pytest.raises(KilolayerError, match="this is not a run"):
        RunModel.create_from_arg_string(f"run={tmp_path}", {"batch_size": 1, "device": None})
