"""When work is run as it is, recorded and replayed; a pool without CUDA stands for the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kilolayer.runtime.recorder import Recorder, WorkItem
from kilolayer.speed.graph_recorder import GraphRecorder
from tests.speed.stand_in_pool import StandInPool

CPU = torch.device("cpu")


class Sum:
    """A total to which pieces add; the first runs of which may find no memory."""

    def __init__(self) -> None:
        self.total, self.restarts, self.failures = 0.0, 0, 0

    def add(self, numbers: Tensor) -> Tensor:
        self.total += float(numbers.sum())
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("no memory")
        return numbers.sum()

    def restart(self) -> bool:
        self.total, self.restarts = 0.0, self.restarts + 1
        return True


def make_recorder(said: list[str] | None = None) -> tuple[GraphRecorder, StandInPool]:
    pool = StandInPool()
    return GraphRecorder(CPU, "steps run", pytest.fail if said is None else said.append, pool), pool


def test_each_shape_is_warmed_up_then_recorded_then_replayed() -> None:
    recorder, pool = make_recorder()
    for numbers in (torch.ones(3), torch.ones(3) * 2, torch.ones(3) * 3, torch.ones(2), torch.ones(2) * 5):
        before = len(pool.events)
        assert float(recorder.run([WorkItem("sum", torch.sum, (numbers,))])) == float(numbers.sum())
        pool.events.insert(before, str(len(numbers)))
    assert pool.events == ["3", "3", "record", "replay", "3", "replay", "2", "2", "record", "replay"]
    assert set(recorder.recordings) == {("sum", (3,)), ("sum", (2,))}


def test_work_with_gradients_is_warmed_up_on_the_stream_of_the_capture() -> None:
    recorder, pool = make_recorder()
    for _ in range(3):
        recorder.run([WorkItem("sum", torch.sum, (torch.ones(3),))], gradients=True)
    assert pool.events == ["stream", "record", "replay", "replay"]


def test_a_piece_without_a_name_is_run_between_the_others() -> None:
    recorder, pool = make_recorder()
    done: list[str] = []
    pieces = [
        WorkItem("a", lambda: done.append("a")),
        WorkItem(None, lambda: done.append("sum")),
        WorkItem("b", lambda: done.append("b")),
    ]
    for _ in range(3):
        recorder.run(pieces)
    assert done == ["a", "sum", "b"] * 3
    assert pool.events == ["record", "record", *["replay"] * 4]


def test_one_new_shape_makes_all_pieces_run_as_they_are() -> None:
    recorder, pool = make_recorder()
    short, long = (WorkItem("add", lambda _: None, (torch.ones(size),)) for size in (2, 3))
    recorder.run([short, short])
    recorder.run([short, long])
    assert pool.events == []
    recorder.run([short, long])
    assert pool.events == ["record", "record", "replay", "replay"]


def test_inputs_of_the_caller_are_not_written_to() -> None:
    recorder, _ = make_recorder()
    given = [torch.full((2,), float(number)) for number in range(4)]
    for each in given:
        recorder.run([WorkItem("sum", torch.sum, (each,))])
    assert [float(each[0]) for each in given] == [0, 1, 2, 3]


def test_where_recording_fails_work_runs_as_it_is_for_good_and_that_is_said_once() -> None:
    said: list[str] = []
    recorder, pool = make_recorder(said)
    work = Sum()
    pool.failure = RuntimeError("operation not permitted\nand more")
    for expected in (3, 6, 9, 12):
        recorder.run([WorkItem("add", work.add, (torch.ones(3),))], restart=lambda: True)
        assert work.total == expected
    assert said == ["steps run in eager mode, because recording failed: operation not permitted"]
    assert pool.events == ["record"]


def test_one_recorder_falls_back_without_the_other() -> None:
    said: list[str] = []
    steps, pool = make_recorder(said)
    validation = steps.sharing_pool("validation runs")
    piece = WorkItem("sum", torch.sum, (torch.ones(3),))
    steps.run([piece])
    steps.run([piece])
    pool.failure = RuntimeError("not today")
    for _ in range(3):
        validation.run([piece])
    assert said == ["validation runs in eager mode, because recording failed: not today"]
    steps.run([piece])
    assert pool.events == ["record", "replay", "record", "replay"]


@pytest.mark.parametrize("at_capture", [False, True])
def test_where_memory_is_short_all_recordings_of_the_pool_go_and_the_work_is_done_once(at_capture: bool) -> None:
    steps, pool = make_recorder()
    validation = steps.sharing_pool("validation runs")
    for _ in range(2):
        validation.run([WorkItem("sum", torch.sum, (torch.ones(5),))])
    work = Sum()
    piece = WorkItem("add", work.add, (torch.ones(3),))
    if at_capture:
        steps.run([piece], restart=work.restart)
        work.total, pool.failure = 0.0, torch.OutOfMemoryError("no memory")
    else:
        work.failures = 1
    steps.run([piece], restart=work.restart)
    assert (work.total, work.restarts) == (3, 1)
    assert not pool.is_used
    pool.failure = None
    steps.run([piece], restart=work.restart)
    assert (work.total, work.restarts) == (6, 1)
    assert len(steps.recordings) == 1


def test_work_that_finds_no_memory_is_not_done_again_without_need() -> None:
    recorder, pool = make_recorder()
    work = Sum()
    work.failures = 1
    piece = WorkItem("add", work.add, (torch.ones(3),))
    with pytest.raises(torch.OutOfMemoryError):  # there is no recording whose memory could serve
        recorder.run([piece], restart=work.restart)
    for _ in range(2):
        recorder.run([WorkItem("sum", torch.sum, (torch.ones(5),))])
    for too_late in (None, lambda: False):
        work.failures = 1
        with pytest.raises(torch.OutOfMemoryError):
            recorder.run([piece], restart=too_late)
    assert pool.is_used
    assert work.restarts == 0


def test_recordings_are_dropped_when_weights_move_and_not_before() -> None:
    recorder, pool = make_recorder()
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)

    def run() -> None:
        recorder.run([WorkItem("forward", model, (torch.ones(2, 3),))])

    recorder.drop_if_moved(model)
    run()
    run()
    with torch.no_grad():
        model.weight += 1
    recorder.drop_if_moved(model)
    run()
    assert pool.events == ["record", "replay", "replay"]
    model.weight.data = model.weight.data.clone()
    recorder.drop_if_moved(model)
    assert not recorder.recordings
    run()
    run()
    recorder.drop_if_moved(other)
    assert not recorder.recordings


def test_what_is_forgotten_is_warmed_up_again() -> None:
    recorder, pool = make_recorder()
    piece = WorkItem("sum", torch.sum, (torch.ones(3),))
    for _ in range(2):
        recorder.run([piece])
        recorder.run([piece])
        recorder.drop([piece])
    assert not recorder.recordings
    assert pool.events == ["record", "replay"] * 2


@pytest.mark.parametrize("recorder", [Recorder(CPU), GraphRecorder(CPU, "steps run", pytest.fail, None)])
def test_without_a_pool_work_is_run_as_it_is(recorder: Recorder) -> None:
    recorder.drop_if_moved(torch.nn.Linear(1, 1))
    assert [float(recorder.run([WorkItem("sum", torch.sum, (torch.ones(3),))])) for _ in range(3)] == [3, 3, 3]
    assert recorder.replaying is None
