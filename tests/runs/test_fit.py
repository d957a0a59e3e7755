from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

import kilolayer as kl
from kilolayer.cli.main import main
from kilolayer.runs.budget import Budget, Training, Work, budget
from kilolayer.runs.division import Division
from kilolayer.runs.fit import Fit, fit, more_processes, reserve

CONFIG = kl.ModelConfig(layers=2, dim=64, heads=4, ffn_dim=256, vocab_size=8000)
GIB = 2**30


@cache
def planned(batch: int) -> Budget:
    return budget(CONFIG, Work(batch, 128))


def fitted(memory: int, batch: int = 100, *, recompute: bool = False) -> Fit:
    return fit(planned(batch), memory, planned, recompute=recompute)


def peak(batch: int, recompute: bool) -> int:
    training = planned(batch).training
    return reserve(training.peak_recomputed if recompute else training.peak)


def test_what_is_proposed_fits_and_twice_the_batch_does_not() -> None:
    whole = fitted(1000 * GIB)
    assert whole.fits
    assert not whole.remedies
    seen = set()
    for step in range(1, 40):
        memory = whole.least + (whole.needed - whole.least) * step // 40
        found = fitted(memory)
        assert not found.fits
        assert [each.accumulate for each in found.remedies] == sorted(each.accumulate for each in found.remedies)
        for each in found.remedies:
            seen.add((each.recompute, each.accumulate))
            assert each.needed == peak(each.batch, each.recompute) <= memory
            assert each.batch == -(-100 // each.accumulate)
            if each.accumulate > 1:
                assert peak(-(-100 // (each.accumulate // 2)), each.recompute) > memory
    assert {(False, 2), (True, 1)} <= seen


def test_a_model_that_is_too_large_has_no_remedy() -> None:
    assert not fitted(fitted(GIB).least - 1).remedies
    assert fitted(fitted(GIB).least + 2**26).remedies


def test_layers_that_are_recomputed_already_are_not_proposed_again() -> None:
    recomputed = fitted(GIB, recompute=True)
    assert recomputed.needed == peak(100, recompute=True)
    assert all(each.recompute and each.accumulate > 1 for each in fitted(recomputed.needed - 1, recompute=True).remedies)


def test_more_processes_are_proposed_and_half_of_them_do_not_do() -> None:
    def shared(processes: int, batch: int = 100) -> Training:
        return replace(planned(batch), division=Division(processes, "full")).training

    more = [Division(1 << times, "full") for times in range(1, 8)]
    whole, seen = fitted(1000 * GIB), set()
    for step in range(1, 40):
        memory = reserve(shared(128).peak) + (whole.needed - reserve(shared(128).peak)) * step // 40
        last = fit(planned(100), memory, planned, more=more).remedies[-1]
        assert last.processes is not None
        seen.add(last.processes)
        assert (last.batch, last.recompute, last.needed) == (100, False, reserve(shared(last.processes).peak))
        assert last.needed <= memory
        assert last.processes == 2 or reserve(shared(last.processes // 2).peak) > memory
    assert len(seen) > 2
    needy = fit(planned(100), whole.least - 1, planned, more=more).remedies
    assert needy
    assert all(each.processes is not None for each in needy)


@pytest.mark.parametrize(
    ("division", "experts", "sizes"),
    [
        (Division(), None, [2, 4, 8]),
        (Division(6), None, [6, 12, 24]),
        (Division(4, "full", unit=3), None, [8, 16, 32]),
        (Division(), 4, [2, 4]),
    ],
)
def test_more_processes_are_more_than_now_and_divide_the_experts(
    division: Division, experts: int | None, sizes: list[int]
) -> None:
    found = more_processes(division, experts)
    assert [each.processes for each in found[:3]] == sizes
    assert all((each.shard, each.unit) == ("full", division.unit) and each.processes <= 4096 for each in found)


def test_the_command_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model.layers", "6", "--batch", "100", "--length", "128"]
    assert main([*words, "--memory", "1000"]) == 0
    assert "Training fits in 1,000.0 GiB" in capsys.readouterr().out
    assert main([*words, "--memory", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["fit"]
    assert not found["fits"]
    assert main([*words, "--memory", "4"]) == 0
    told = capsys.readouterr().out
    assert "does not fit in 4.0 GiB" in told
    assert told.count("It fits with") == len(found["remedies"]) > 0
    assert main([*words, "--memory", "1.1"]) == 0
    assert "weights, gradients and optimizer alone need" in capsys.readouterr().out
    assert main([*words, "--memory", "1.7"]) == 0
    told = capsys.readouterr().out
    assert "weights, gradients and optimizer alone need" in told
    assert 'It fits with train.shard = "full" on ' in told
    assert main([*words, "--train.optimizer", "muon", "--memory", "1.6"]) == 0
    assert "train.shard" not in capsys.readouterr().out  # whole matrices are needed
    for bad in ("0", "-1", "x", "nan", "1e9"):
        assert main([*words, "--memory", bad]) == 2
        assert "is not a number of GiB above 0" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [5, 9, 31, 100])
def test_no_more_batches_are_proposed_than_hold_the_batch(batch: int) -> None:
    whole = fitted(1000 * GIB, batch)
    for step in range(1, 20):
        for each in fitted(whole.least + (whole.needed - whole.least) * step // 20, batch).remedies:
            assert each.accumulate == -(-batch // each.batch)
