"""Loads exported folders by Transformers' Auto classes, in a process that cannot import Kilolayer.

Reads a list of tasks as JSON, each a folder with texts, and writes what was found: ids, classes, texts, likelihoods.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
sys.modules["kilolayer"] = None  # type: ignore[assignment]  # importing it is then an error

import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

SEARCHES: dict[str, dict[str, Any]] = {"greedy": {"num_beams": 1}, "beam": {"num_beams": 5, "early_stopping": True}}


def load(auto: Any, task: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    folder = task["folder"]
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=task["trust"])
    model, loaded = auto.from_pretrained(folder, output_loading_info=True, trust_remote_code=task["trust"])
    names = [*loaded["missing_keys"], *loaded["unexpected_keys"], *loaded["mismatched_keys"]]
    return tokenizer, model.eval(), {"class": type(model).__name__, "not_loaded": names}


def translate(task: dict[str, Any]) -> dict[str, Any]:
    tokenizer, model, found = load(AutoModelForSeq2SeqLM, task)
    found["ids"] = [tokenizer(text).input_ids for text in task["texts"]]
    padded = tokenizer(task["texts"], return_tensors="pt", padding=True)
    for name, options in SEARCHES.items():
        found[f"padded {name}"] = model.generate(**padded, **options, do_sample=False, max_new_tokens=task["new"]).tolist()
        found[name] = []
        for text, limit in zip(task["texts"], task["limits"], strict=True):
            batch = tokenizer([text], return_tensors="pt")
            answer = model.generate(**batch, **options, do_sample=False, max_new_tokens=limit)
            found[name] += tokenizer.batch_decode(answer, skip_special_tokens=True)
    found["card"] = run_card(task["folder"])
    return found


def run_card(folder: str) -> str:
    """What the lines of Python in a folder's README print, where they stand beside it."""
    (code,) = re.findall(r"```python\n(.*?)```", (Path(folder) / "README.md").read_text(), flags=re.DOTALL)
    os.chdir(Path(folder).parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue()


def write(task: dict[str, Any]) -> dict[str, Any]:
    tokenizer, model, found = load(AutoModelForCausalLM, task)
    found["ids"] = [tokenizer(text).input_ids for text in task["texts"]]
    found["decoded"] = [tokenizer.decode(ids) for ids in found["ids"]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(task["tokens"])).logits.log_softmax(-1)
    labels = torch.tensor(task["tokens"])[:, 1:, None]
    found["likelihoods"] = logits[:, :-1].gather(2, labels)[..., 0].tolist()
    options = {"do_sample": False, "max_new_tokens": task["new"]}
    if task["pipeline"]:
        from transformers import pipeline

        write = pipeline("text-generation", task["folder"], trust_remote_code=task["trust"])
        answers = write(task["prompts"], return_full_text=False, **options)
        found["greedy"] = [answer[0]["generated_text"] for answer in answers]
        found["card"] = run_card(task["folder"])
    else:
        batch = tokenizer(task["prompts"], return_tensors="pt", padding=True)
        answers = model.generate(**batch, **options)[:, batch.input_ids.shape[1] :]
        found["greedy"] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return found


def encode(task: dict[str, Any]) -> dict[str, Any]:
    auto = {"masked_lm": AutoModelForMaskedLM, "classify": AutoModelForSequenceClassification}[task["task"]]
    tokenizer, model, found = load(auto, task)
    model.save_pretrained(again := f"{task['folder']} again")
    model = auto.from_pretrained(again, trust_remote_code=True).eval()
    batch = tokenizer(task["texts"], return_tensors="pt", padding=True)
    with torch.no_grad():
        return {**found, "ids": batch.input_ids.tolist(), "logits": model(**batch).logits.tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {"translate": translate, "write": write, "encode": encode}
    with contextlib.redirect_stdout(sys.stderr):  # Transformers prints there too
        answers = [kinds[task["do"]](task) for task in json.load(sys.stdin)]
    assert not [name for name in sys.modules if name.startswith("kilolayer.")]
    json.dump(answers, sys.stdout)
