"""A recorded step trains as the step that it was made from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import kilolayer as kl
from kilolayer.errors import InputError, OptionError
from kilolayer.speed.recorded_step import RecordedStep
from tests.speed.stand_in_pool import StandInPool

LENGTHS = (4, 4, 5, 4, 5, 5, 4, 5)


def make_model(device: str = "cpu", dropout: float = 0.0) -> kl.Decoder:
    torch.manual_seed(1)
    return kl.Decoder(vocab_size=20, dim=32, heads=2, ffn_dim=64, layers=2, dropout=dropout, pad_id=None, device=device)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, zero: str = "end") -> Callable[[Tensor], Tensor]:
    """As people write it; gradients become None at its end, None at its beginning, or 0 at its end."""

    def step(tokens: Tensor) -> Tensor:
        if zero == "beginning":
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        if zero != "beginning":
            optimizer.zero_grad(set_to_none=zero == "end")
        return loss

    return step


def tokens_of(number: int) -> Tensor:
    return torch.randint(20, (3, LENGTHS[number]), generator=torch.Generator().manual_seed(number))


def make_step(lr: float = 1e-2) -> tuple[RecordedStep, StandInPool]:
    pool, model = StandInPool(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return RecordedStep(step_of(model, optimizer), model, optimizer, pool), pool


def test_arguments_in_another_order_are_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step: Any = step_of(model, optimizer)
    for given, what in (
        ((model, step, optimizer), "model"),
        ((step, optimizer, model), "model"),
        ((3, model, optimizer), "step"),
    ):
        with pytest.raises(InputError, match=f"given as {what} is not one"):
            kl.record(*given)


def test_on_the_cpu_a_step_runs_as_it_is() -> None:
    losses = []
    for recorded in (False, True):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = step_of(model, optimizer)
        step = kl.record(step, model, optimizer) if recorded else step
        losses.append([step(tokens_of(number)).item() for number in range(6)])
    assert losses[0] == losses[1]


def test_each_shape_and_mode_has_a_recording_of_its_own() -> None:
    step, pool = make_step()
    for number in range(4):
        step(tokens_of(number))
    assert pool.events == ["stream", "record", "replay", "stream", "replay"]
    step.model.eval()
    step(tokens_of(0))
    assert pool.events[5:] == ["stream"]


def test_an_option_of_the_optimizer_that_changes_is_used_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    step, pool = make_step()
    for _ in range(2):
        step(tokens_of(0))
    step.optimizer.param_groups[0]["lr"] = 0.0
    before = [weight.clone() for weight in step.weights]
    for _ in range(2):
        step(tokens_of(0))
    assert all(map(torch.equal, before, step.weights))
    assert pool.events == ["stream", "record", "replay", "stream", "record", "replay"]
    assert caplog.messages == ["steps are recorded again, because weights moved or an option of the optimizer changed"]


def test_weights_that_move_and_a_state_that_is_loaded_end_all_recordings() -> None:
    step, _ = make_step()
    for disturb in (
        lambda: setattr(step.weights[0], "data", step.weights[0].data.clone()),
        lambda: step.optimizer.load_state_dict(step.optimizer.state_dict()),
    ):
        for _ in range(2):
            step(tokens_of(0))
        (recording,) = step.recorder.recordings.values()
        disturb()
        step(tokens_of(0))
        assert recording not in step.recorder.recordings.values()


def test_a_step_without_an_update_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = RecordedStep(lambda tokens: model(tokens).logits.sum().backward(), model, optimizer, StandInPool())
    with pytest.raises(InputError, match="makes no update"):
        step(tokens_of(0))


def test_numbers_are_no_inputs() -> None:
    step, _ = make_step()
    with pytest.raises(InputError, match="only tensors"):
        step(tokens_of(0), 1e-3)  # pyright: ignore[reportArgumentType]


def test_memory_that_is_short_after_the_update_does_not_lead_to_a_second_one() -> None:
    pool, model = StandInPool(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    fails = False

    def plain(tokens: Tensor) -> None:
        step_of(model, optimizer)(tokens)
        if fails:
            raise torch.OutOfMemoryError("no memory")

    step = RecordedStep(plain, model, optimizer, pool)
    for _ in range(2):
        step(tokens_of(0))
    fails, before = True, [weight.clone() for weight in step.weights]
    with pytest.raises(torch.OutOfMemoryError):
        step(tokens_of(2))
    once = step.weights[0].detach().clone()
    with torch.no_grad():
        for weight, old in zip(step.weights, before, strict=True):
            weight.copy_(old)
    step_of(model, optimizer)(tokens_of(2))
    assert torch.equal(step.weights[0], once)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # autograd warns about streams where a loss of the plain loop is kept
@pytest.mark.parametrize("zero", ["end", "beginning", "zeros"])
def test_a_recorded_loop_is_the_loop_on_a_gpu(zero: str) -> None:
    found: list[Any] = []
    for recorded in (False, True):
        model = make_model("cuda").train()
        model.cast_weights(torch.bfloat16)
        form = kl.fast(model, compile=False)
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
        schedule = LambdaLR(optimizer, lambda count: 1 / (1 + count))
        step = step_of(form, optimizer, zero)
        step = kl.record(step, form, optimizer) if recorded else step
        losses = []
        for number in range(len(LENGTHS)):
            losses.append(step(tokens_of(number).cuda()))
            schedule.step()
        found.append(
            (torch.stack([loss.detach() for loss in losses]), [weight.detach().clone() for weight in model.parameters()])
        )
        if isinstance(step, RecordedStep):
            assert len(step.recorder.recordings) == 2
    torch.testing.assert_close(*found)


@pytest.mark.gpu
def test_each_replay_drops_anew_on_a_gpu() -> None:
    model = make_model("cuda", dropout=0.5).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.0, device="cuda"), fused=True, capturable=True)
    step = kl.record(step_of(model, optimizer), model, optimizer)
    losses = [step(tokens_of(0)) for _ in range(6)]
    assert len(step.recorder.recordings) == 1
    assert len({loss.item() for loss in losses}) == 6


@pytest.mark.gpu
def test_a_step_that_reads_back_runs_as_it_is_and_that_is_logged_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("cuda").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = step_of(model, optimizer)
    step = kl.record(lambda tokens: plain(tokens).item(), model, optimizer)
    with caplog.at_level(logging.WARNING):
        losses = [step(tokens_of(0)) for _ in range(4)]
    assert [message for message in caplog.messages if "because recording failed" in message] == caplog.messages[:1]
    assert sorted(losses, reverse=True) == losses
    assert len(set(losses)) == 4


@pytest.mark.gpu
def test_an_optimizer_that_cannot_be_recorded_is_refused_on_a_gpu() -> None:
    model = make_model("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptionError, match="capturable=True"):
        kl.record(step_of(model, optimizer), model, optimizer)
