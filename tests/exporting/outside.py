"""Loads exported folders by Transformers' Auto classes, in a process that has never imported Kilolayer.

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

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer  # noqa: E402


def load(auto: Any, folder: str) -> tuple[Any, Any, dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loaded = auto.from_pretrained(folder, output_loading_info=True)
    names = [*loaded["missing_keys"], *loaded["unexpected_keys"], *loaded["mismatched_keys"]]
    return tokenizer, model.eval(), {"class": type(model).__name__, "not_loaded": names}


def translate(task: dict[str, Any]) -> dict[str, Any]:
    tokenizer, model, found = load(AutoModelForSeq2SeqLM, task["folder"])
    found["ids"] = [tokenizer(text).input_ids for text in task["texts"]]
    for name, options in {"greedy": {"num_beams": 1}, "beam": {"num_beams": 5, "early_stopping": True}}.items():
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
    tokenizer, model, found = load(AutoModelForCausalLM, task["folder"])
    found["ids"] = [tokenizer(text).input_ids for text in task["texts"]]
    found["decoded"] = [tokenizer.decode(ids) for ids in found["ids"]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(task["tokens"])).logits.log_softmax(-1)
    labels = torch.tensor(task["tokens"])[:, 1:, None]
    found["likelihoods"] = logits[:, :-1].gather(2, labels)[..., 0].tolist()
    options = {"do_sample": False, "max_new_tokens": task["new"]}
    if task["pipeline"]:
        from transformers import pipeline

        answers = pipeline("text-generation", task["folder"])(task["prompts"], return_full_text=False, **options)
        found["greedy"] = [answer[0]["generated_text"] for answer in answers]
        found["card"] = run_card(task["folder"])
    else:
        batch = tokenizer(task["prompts"], return_tensors="pt", padding=True)
        answers = model.generate(**batch, **options)[:, batch.input_ids.shape[1] :]
        found["greedy"] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = [{"translate": translate, "write": write}[task["do"]](task) for task in json.load(sys.stdin)]
    assert "kilolayer" not in sys.modules
    json.dump(answers, sys.stdout)
