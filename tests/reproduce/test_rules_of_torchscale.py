"""The verdicts on TorchScale's figures follow their rules."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kilolayer.reproduce.base import Found, get
from kilolayer.reproduce.lab import Lab
from kilolayer.reproduce.stored_run import Run
from tests.reproduce.made_up_runs import run_of, two_seeds


@pytest.mark.parametrize(
    ("word", "depths", "experts"),
    [
        ("held", (2.0, 1.9, 1.8), (2.0, 1.9, 1.8)),
        ("not held", (2.0, "diverged", 1.8), (2.0, "waiting", 1.8)),
        ("not held", (2.0, "waiting", 2.1), (2.0, 1.9, 1.8)),
        ("undecided", (2.0, "waiting", 1.8), (2.0, 1.9, 1.8)),
        ("undecided", (2.0, 1.9, 1.8), (2.0, "failed", 1.8)),
    ],
)
def test_larger_models_are_judged_by_their_rule(word: str, depths: Any, experts: Any) -> None:
    found = {
        "depth": [run for n, loss in enumerate(depths) for run in two_seeds(loss, layers=n)],
        "experts": [run for n, loss in enumerate(experts) for run in two_seeds(loss, model__moe__experts=n)],
    }
    for name in ("torchscale-figure1", "torchscale-figure2"):
        assert get(name).judge(found).word == word


def clipped(dense: float | str, plain: float | str, sparse: float | str) -> Found:
    """TorchScale's Figure 3; the runs with fewer experts are all alike."""
    runs = [
        run
        for count, losses in ((16, (2.0, 2.0)), (256, (plain, sparse)))
        for clip, loss in zip(("plain", "sparse"), losses, strict=True)
        for run in two_seeds(loss, model__moe__experts=count, train__clip=clip)
    ]
    return {"dense": two_seeds(dense), "sparse": runs}


@pytest.mark.parametrize(
    ("word", "dense", "plain", "sparse"),
    [
        ("held", 2.0, 2.0, 1.9),
        ("undecided", 2.0, 1.95, 1.9),  # plain clipping helps too
        ("not held", 2.0, 1.8, 1.9),
        ("not held", 2.0, 1.905, 1.9),
        ("undecided", 2.0, "dead", 1.9),
        ("undecided", 2.0, "waiting", 1.9),
        ("undecided", 1.9, 2.0, 1.9),  # experts do not help
        ("undecided", 1.9, 1.8, 1.9),
        ("undecided", 2.0, 2.0, "dead"),
        ("undecided", "waiting", 2.0, 1.9),
    ],
)
def test_clipping_is_judged_where_experts_help(word: str, dense: Any, plain: Any, sparse: Any) -> None:
    found = clipped(dense, plain, sparse)
    verdict = get("torchscale-figure3").judge(found)
    assert verdict.word == word
    assert ("experts do not help at this size" in verdict.why) == (dense == 1.9 or sparse == "dead")
    for run in found["sparse"]:
        run["routing"] = None
    if dense != 2.0:
        assert get("torchscale-figure4").judge(found).word == "undecided"


@dataclass(frozen=True)
class Clipped(Lab):
    """Runs with a record each, but for those of `missing`, by the way of clipping and the seed.

    entropy: of the routing with SparseClip; 1 without. late: after which share of the steps the gradient is clipped.
    """

    missing: dict[tuple[str, int], str] = field(default_factory=dict)
    entropy: float = 0.9
    late: float = 0.0

    def multilingual(self, count: int | None = None, /, **sections: Any) -> dict[str, Any]:
        return {}

    def compare_settings(self, name: str, config: Any, settings: Any) -> list[Run]:
        return [self._run(dict(each)) for each in settings]

    def _run(self, options: dict[str, Any]) -> Run:
        clip, seed = options.get("train.clip", "dense"), options["train.seed"]
        outcome = self.missing.get((clip, seed), "finished")
        folder = self.folder / f"{clip}-{seed}"
        if outcome != "waiting":
            folder.mkdir(parents=True, exist_ok=True)
            rows: list[dict[str, Any]] = []
            for step in range(1, 11):
                rows.append({"kind": "train", "step": step, "clipped": 9 if step == 1 + 10 * self.late else 0})
                rows.append({"kind": "routing", "step": step, "entropy": [self.entropy if clip == "sparse" else 1.0]})
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        loss = {"dense": 2.0, "plain": 1.95, "sparse": 1.9}[clip] + 0.001 * seed
        return {**run_of(loss, seed, outcome), "options": options, "folder": str(folder)}


@pytest.mark.parametrize(
    ("word", "entropy", "late"),
    [
        ("held", 0.9, 0.0),
        ("not held", 1.1, 0.0),
        ("not held", 0.9, 0.5),
        ("undecided", 1.01, 0.0),
        ("undecided", 0.9, 5.0),  # nothing is clipped
    ],
)
def test_routing_is_judged_by_its_rule(word: str, entropy: float, late: float, tmp_path: Path) -> None:
    reproduction = get("torchscale-figure4")
    assert reproduction.judge(reproduction.measure(Clipped(tmp_path / "all", entropy=entropy, late=late))).word == word


@pytest.mark.matrix(2)
@pytest.mark.parametrize("outcome", ["waiting", "unfinished", "failed", "diverged"])
def test_routing_is_judged_where_every_run_has_finished(outcome: str, tmp_path: Path) -> None:
    reproduction = get("torchscale-figure4")
    for missing in ({("plain", 2): outcome}, {("sparse", seed): outcome for seed in (1, 2)}):
        found = reproduction.measure(Clipped(tmp_path / str(len(missing)), missing=missing))
        assert reproduction.judge(found).word == "undecided"
        assert reproduction.numbers(found).rows[0][1] == "1.000"
        assert len(reproduction.panels(found)) == 2


def test_the_curves_of_clipping_are_those_of_the_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Run] = {}
    monkeypatch.setattr("kilolayer.reproduce.pictures.curves", lambda runs, _key, _title: drawn.update(runs))
    get("torchscale-figure3").panels(clipped(2.0, 2.0, 1.9))
    assert {name: run["options"]["train.seed"] for name, run in drawn.items()} == {"dense": 1, "plain": 1, "sparse": 1}
