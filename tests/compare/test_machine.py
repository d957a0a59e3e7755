"""What runs need, and what a machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilolayer.compare import machine
from kilolayer.compare.machine import Demand, Device, cores, demand_of, devices_for, free_memory, threads_of
from kilolayer.config import build
from kilolayer.runs.budget import Work, budget
from kilolayer.tasks.config import RunConfig
from tests.fixtures.small_runs import table, text_table


def test_a_device_holds_what_fits_beside_what_is_there() -> None:
    device = Device("cpu", 10.0)
    assert device.holds(Demand("cpu", 6.0, 1.0))
    device.demands["first"] = Demand("cpu", 6.0, 1.0)
    assert device.holds(Demand("cpu", 4.0, 1.0))
    assert not device.holds(Demand("cpu", 4.1, 1.0))
    assert not device.holds(Demand("cuda", 1.0, 1.0))


def test_what_is_too_large_is_tried_alone_and_what_is_unknown_has_no_limit() -> None:
    assert Device("cpu", 10.0).holds(Demand("cpu", 100.0, 1.0))
    assert Device("cpu", None, demands={"first": Demand("cpu", 1e30, 1.0)}).holds(Demand("cpu", 1e30, 1.0))


def test_a_demand_is_that_of_the_plan(tmp_path: Path) -> None:
    config = build(RunConfig, table(tmp_path, model={"vocab_size": 90}, train={"steps": 7, "accumulate": 3}))
    found = demand_of(config)
    usual = config.usual_batch(None)
    plan = budget(config.model, Work(usual.rows, usual.length, 1, "fp32"))
    assert found.kind == "cpu"
    assert found.memory == machine.PROCESS["cpu"] + machine.SPARE["cpu"] * plan.training.peak
    assert found.flops == plan.training_flops_per_token * usual.rows * usual.length * 3 * 7


def test_deeper_models_need_more_and_recomputation_less(tmp_path: Path) -> None:
    plain, deep, recomputed = (
        demand_of(build(RunConfig, text_table(tmp_path, model={"layers": layers}, train={"recompute": recompute})))
        for layers, recompute in ((2, "none"), (8, "none"), (8, "layer"))
    )
    assert plain.memory < recomputed.memory < deep.memory
    assert plain.flops < deep.flops


def test_a_plan_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(RunConfig, table(tmp_path))
    plans: dict[tuple[object, ...], object] = {}
    first = demand_of(config, plans)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(machine, "budget", None)
    assert demand_of(config, plans) == first  # pyright: ignore[reportArgumentType]


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  5000 kB\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 30\ninactive_file 40\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 1000 - 100 + 40
    assert free_memory(tmp_path / "none", tmp_path / "none") is None


def test_gpus_are_named_as_they_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 7")
    monkeypatch.setattr(machine, "MEMORY", "print([100, 200])")
    found = devices_for({"cuda"})
    assert [(each.kind, each.free, each.environment) for each in found] == [
        ("cuda", 100, {"CUDA_VISIBLE_DEVICES": "4"}),
        ("cuda", 200, {"CUDA_VISIBLE_DEVICES": "7"}),
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in devices_for({"cuda"})] == ["0", "1"]
    monkeypatch.setattr(machine, "MEMORY", "print([100])")
    assert [each.environment for each in devices_for({"cuda"})] == [{}]


def test_runs_take_turns_on_a_gpu_without_the_multi_process_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipe"))
    assert not machine.takes_turns()  # there is no such command, so nothing can be done about it
    (tmp_path / machine.MPS).touch(mode=0o755)
    assert machine.takes_turns()
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe/control").touch()
    assert not machine.takes_turns()


def test_cores_are_shared_and_none_gets_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in machine.THREADS:
        monkeypatch.delenv(name, raising=False)
    assert cores() >= 1
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert threads_of(2)["OMP_NUM_THREADS"] == "1"
    assert threads_of(1)["OMP_NUM_THREADS"] == "2"
    assert threads_of(16)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", machine.THREADS)
def test_a_number_of_threads_that_the_user_has_set_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in machine.THREADS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setenv(name, "")
    assert threads_of(2) == dict.fromkeys(machine.THREADS, "4")
    monkeypatch.setenv(name, "3")
    assert threads_of(2) == {}
