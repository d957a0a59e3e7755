"""31 languages to and from English in one model, 62 directions: prepare the text, train for a given time, and score.

    python benchmarks/translation/multilingual.py prepare FOLDER           # FOLDER/multilingual.tar.xz, of tatoeba_multi
    python benchmarks/translation/multilingual.py run OUT --seconds 390    # OUT/multilingual.json and the translations

Both read from KILOLAYER_DATA: `prepare` reads tatoeba_multi, `run` reads multilingual.tar.xz. If a run already exists, `run`
continues it with its options; --no-score skips scoring. Other options (--train.lr 5e-4) are passed to `kilolayer train`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kilolayer import __version__
from kilolayer.cli.configuration import read_tables
from kilolayer.data.batches import BatchConfig
from kilolayer.data.corpora import find_corpora
from kilolayer.data.encode import encode_text
from kilolayer.data.filters import FilterConfig
from kilolayer.data.parallel import Direction, ParallelText
from kilolayer.data.text import read_lines
from kilolayer.data.tokenizer import SHARED_FILE, TokenizerConfig, Tokenizers, tokenizers_for
from kilolayer.evaluate.scores import Bleu, Chrf
from kilolayer.models.encoder_decoder import EncoderDecoder
from kilolayer.runs.checkpoint import step_of, steps
from kilolayer.runs.run import Run, cache_folder, choose_device
from kilolayer.tasks.translation.config import TranslationConfig
from kilolayer.tasks.translation.task import TranslationTask

Pair = tuple[str, str]  # English, the other language

CONFIG = Path(__file__).with_suffix(".toml")
WORK = Path("runs") / "multilingual"
TEXT, RUN = WORK / "text", WORK / "run"
ENGLISH = "eng"
LEAST = 10_000
VALID, TEST = 100, 500  # lines per language pair
# About 1,000 pieces per language; 9 scripts, with rare Chinese and Japanese characters as bytes. Trained on 500,000
# sentences, because a unigram model of all text would take many minutes.
VOCABULARY = TokenizerConfig(kind="unigram", vocab_size=32_000, sentences=500_000)
OWN_TOKENISER = {"cmn_Hans": "zh", "cmn_Hant": "zh", "jpn": "char"}  # scripts without spaces: 13a sees one word per sentence
PUNCTUATION = {code: " " for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "PSZ"}


def prepare(folder: Path) -> None:
    """Split the text, train the vocabulary, and pack both."""
    source = Path(os.environ["KILOLAYER_DATA"]) / "tatoeba_multi"
    train, test = (read_pairs(source / f"{part}.en-xx.tsv.xz") for part in ("train", "test"))
    config = read_tables(CONFIG, []).build(TranslationConfig)
    frequent = [language for language, pairs in sorted(train.items()) if len(pairs) >= LEAST]
    if config.data.languages != [ENGLISH, *frequent]:
        raise SystemExit(f"{CONFIG} should have the languages {frequent}")
    with tempfile.TemporaryDirectory() as work:
        text = Path(work)
        counts = write_split({each: train[each] for each in frequent}, {each: test[each] for each in frequent}, text)
        (text / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")
        tokenizers_for(find_corpora(replace(config.data, folder=work)), VOCABULARY, cache_folder()).save(text)
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / "multilingual.tar.xz", "w:xz", preset=9) as archive:
            archive.add(text, "text")
    print({key: sum(count[key] for count in counts.values()) for key in next(iter(counts.values()))})


def read_pairs(path: Path) -> dict[str, list[Pair]]:
    """The pairs of each language, from a file with the columns language, language, text, text, where one language is
    English."""
    found: dict[str, list[Pair]] = {}
    for line in read_lines(path):
        one, other, first, second = line.split("\t")
        if one == ENGLISH:
            found.setdefault(other, []).append((first, second))
        else:
            found.setdefault(one, []).append((second, first))
    return found


def write_split(train: dict[str, list[Pair]], test: dict[str, list[Pair]], folder: Path) -> dict[str, dict[str, int]]:
    """Write train, valid and test of each language and return their numbers of lines.

    Each part is the first lines by hash. No line of train shares its English side with any line of any language's valid and
    test, nor its other side with one of its own language's; valid and test are separated in the same way. The comparison
    ignores case, punctuation and white space.
    """
    tests = {language: first_by_hash(pairs, TEST) for language, pairs in test.items()}
    held = Held(tests)
    rest = {language: held.without(language, pairs) for language, pairs in train.items()}
    valid = {language: first_by_hash(pairs, VALID) for language, pairs in rest.items()}
    held = Held(valid)
    kept = {language: held.without(language, pairs) for language, pairs in rest.items()}
    for part, languages in {"train": kept, "valid": valid, "test": tests}.items():
        for language, pairs in languages.items():
            for side, name in enumerate((ENGLISH, language)):
                lines = "".join(f"{pair[side]}\n" for pair in pairs)
                (folder / f"{part}.{ENGLISH}-{language}.{name}").write_text(lines, encoding="utf-8", newline="")
    return {
        language: {
            "lines": len(train[language]),
            "removed": len(train[language]) - len(kept[language]),
            "train": len(kept[language]),
            "valid": len(valid[language]),
            "test": len(tests[language]),
        }
        for language in train
    }


class Held:
    """Sentences that training must not contain."""

    def __init__(self, parts: dict[str, list[Pair]]) -> None:
        self.english = {normalize(english) for pairs in parts.values() for english, _ in pairs}
        self.others = {language: {normalize(other) for _, other in pairs} for language, pairs in parts.items()}

    def without(self, language: str, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs of a language that share neither side with these sentences."""
        others = self.others[language]
        return [pair for pair in pairs if normalize(pair[0]) not in self.english and normalize(pair[1]) not in others]


def normalize(text: str) -> str:
    """The text without case, punctuation, symbols and white space differences."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(PUNCTUATION).split())


def first_by_hash(pairs: Iterable[Pair], count: int) -> list[Pair]:
    """A selection of pairs that does not depend on their order."""
    return sorted(set(pairs), key=lambda pair: hashlib.sha256("\t".join(pair).encode()).digest())[:count]


def unpack() -> None:
    """Extract the prepared text and its vocabulary to the work folder."""
    with tarfile.open(Path(os.environ["KILOLAYER_DATA"]) / "multilingual.tar.xz") as archive:
        archive.extractall(WORK, filter="data")


def encode(options: list[str]) -> None:
    """Fill the cache with the token files of all directions, on all cores, for training to use."""
    config = read_tables(CONFIG, options).build(TranslationConfig)
    corpora, tokenizers = find_corpora(replace(config.data, folder=str(TEXT))), Tokenizers.load(TEXT)
    jobs = [(text, config.data.filters) for text in corpora.train] + [(text, None) for text in corpora.valid]
    jobs.sort(key=lambda job: -job[0].size)
    with multiprocessing.Pool() as pool:
        pool.starmap(partial(_encode_one, tokenizers), jobs, chunksize=1)


def _encode_one(tokenizers: Tokenizers, text: ParallelText, filters: FilterConfig | None) -> None:
    encode_text(text, tokenizers, cache_folder(), tagged=True, filters=filters)


def train(seconds: float, options: list[str]) -> None:
    """Start or continue training, until its end or for a given time; both leave a checkpoint."""
    text = ["--data.folder", str(TEXT), "--tokenizer.path", str(TEXT / SHARED_FILE)]
    new = [str(CONFIG), "--run", str(RUN), *text, *options]
    arguments = ["--resume", str(RUN)] if RUN.exists() else new
    with subprocess.Popen([sys.executable, "-m", "kilolayer", "train", *arguments]) as process:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
    if process.returncode not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        raise SystemExit(f"training failed with {process.returncode}")


def score(processes: int) -> dict[str, dict[str, Any]]:
    """Scores and translations of the test set of each direction. Several processes share the GPU."""
    run = Run.open(RUN)
    task, model = run.task(cache_folder()), run.load_model(torch.device("cpu"))
    assert isinstance(task, TranslationTask)
    # The children inherit the model and copy it to the GPU, which this process must not have used before.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, _share, (task, model)) as pool:
        found = pool.map(_score_one, task.corpora.directions, chunksize=1)
    return {direction.name: scores for direction, scores in zip(task.corpora.directions, found, strict=True)}


def _share(task: TranslationTask, model: EncoderDecoder) -> None:
    global _shared
    _shared = task, model.to(choose_device(task.config.train.device))


def _score_one(direction: Direction) -> dict[str, Any]:
    task, model = _shared
    other = direction.target if direction.source == ENGLISH else direction.source
    sources, references = (
        list(read_lines(TEXT / f"test.{ENGLISH}-{other}.{language}")) for language in (direction.source, direction.target)
    )
    hypotheses = [answer.text for answer in task.translate(model, sources, direction, task.config.search)]
    scores = {"bleu": Bleu(), "chrf": Chrf()}
    if direction.target in OWN_TOKENISER:
        scores["bleu_own_tokeniser"] = Bleu(tokenize=OWN_TOKENISER[direction.target])
    values = {name: round(metric.score(hypotheses, references).value, 2) for name, metric in scores.items()}
    return {"valid_loss": round(_valid_loss(task, model, direction), 4)} | values | {"hypotheses": hypotheses}


def _valid_loss(task: TranslationTask, model: EncoderDecoder, direction: Direction) -> float:
    """The validation loss of the model that is scored, in batches of the size of one direction's validation set."""
    corpora = replace(task.corpora, valid=task.corpora.valid_of(direction))
    config = replace(task.config, batches=BatchConfig(tokens=4096), train=replace(task.config.train, valid_bleu=False))
    alone = TranslationTask(corpora, task.tokenizers, task.cache, config)
    found = alone.validate(model, VALID)
    assert found is not None
    return found.loss


def averages(scores: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over directions, as in DeepNet's Table 3."""
    groups = {
        "X-En": [each for name, each in scores.items() if name.endswith(f"-{ENGLISH}")],
        "En-X": [each for name, each in scores.items() if name.startswith(f"{ENGLISH}-")],
        "All": list(scores.values()),
    }
    return {
        group: {key: round(fmean(each[key] for each in members), 2) for key in ("valid_loss", "bleu", "chrf")}
        for group, members in groups.items()
    }


def history() -> dict[str, Any]:
    """The training history from the run's metrics."""
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    spent = zip([0.0, *(row["seconds"] for row in trained)], trained, strict=False)
    return {
        "scored_step": step_of(steps(RUN / "checkpoints")[-1]),
        "steps": trained[-1]["step"],
        "seconds": round(trained[-1]["seconds"], 1),
        "epochs": round(trained[-1]["epoch"], 2),
        "target_tokens": round(sum(row["tokens_per_second"] * (row["seconds"] - before) for before, row in spent)),
        "skipped_steps": sum(row["skipped"] for row in trained),
        "train": [(row["step"], round(row["nll"], 4)) for row in trained],
        "valid": [(row["step"], round(row["loss"], 4)) for row in rows if row["kind"] == "valid"],
    }


def write(out: Path, command: str, scores: dict[str, dict[str, Any]], seconds: dict[str, float]) -> None:
    """Write multilingual.json, and all translations to one file: direction, tab, translation."""
    lines = [f"{name}\t{line}\n" for name, each in scores.items() for line in each.pop("hypotheses")]
    with lzma.open(out / "multilingual-hypotheses.txt.xz", "wt", encoding="utf-8") as file:
        file.writelines(lines)
    packages = ("torch", "sentencepiece", "sacrebleu")
    document = {
        "command": command,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"python": platform.python_version(), "kilolayer": __version__}
        | {name: version(name) for name in packages},
        "signatures": [Bleu().signature(), Chrf().signature()],
        "averages": averages(scores),
        "training": history(),
        "wall_seconds": seconds,
        "directions": scores,
        "lines": json.loads((TEXT / "counts.json").read_text()),
    }
    (out / "multilingual.json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["averages"]))


def run(out: Path, seconds: float, processes: int, scored: bool, options: list[str]) -> None:
    """Run everything from the archive to the scores, and time each stage."""
    out.mkdir(parents=True, exist_ok=True)
    stages = {} if TEXT.exists() else {"unpack": unpack, "encode": partial(encode, options)}
    stages["train"] = partial(train, seconds, options)
    spent = {}
    for name, stage in stages.items():
        spent[name] = _timed(stage)[1]
    if scored:
        scores, spent["score"] = _timed(partial(score, processes))
        command = " ".join(["python benchmarks/translation/multilingual.py run OUT --seconds", f"{seconds:g}", *options])
        write(out, command, scores, spent)
    print(spent)


def _timed(stage: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return stage(), round(time.monotonic() - started, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="31 languages to and from English in one model.", allow_abbrev=False)
    parser.add_argument("stage", choices=("prepare", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=390, help="training time, including its start")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=8, help="parallel processes for translation")
    parser.add_argument("--no-score", action="store_true")
    chosen, options = parser.parse_known_args()
    if chosen.stage == "prepare":
        prepare(chosen.out)
    else:
        options = ["--train.steps", str(chosen.steps), *options]
        run(chosen.out, chosen.seconds, chosen.processes, not chosen.no_score, options)


if __name__ == "__main__":
    main()
