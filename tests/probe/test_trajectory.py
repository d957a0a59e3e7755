"""The plane of a training's path, beside a singular value decomposition of all of its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.errors import InputError
from kilolayer.models.model import Model
from kilolayer.probe import trajectory as module
from kilolayer.probe.trajectory import Plane, Recorded, Saved, around, principal_plane, trajectory_surface
from kilolayer.runs import checkpoint
from kilolayer.runs.checkpoint import Checkpoint

TOKENS = torch.arange(1, 11).view(2, 5)


def loss(model: Model) -> Tensor:
    return F.cross_entropy(model(TOKENS).logits.flatten(0, 1), TOKENS.flatten())


@pytest.fixture
def trained() -> tuple[Model, Recorded]:
    """A small model, and its weights at the start and after each of six steps."""
    model = kl.Decoder(11, 8, 2, 16, 1, recipe="rezero")  # it has parameters without axes
    path = Recorded()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(7):
        path.note(step, model)
        optimizer.zero_grad()
        loss(model).backward()
        if step < 6:
            optimizer.step()
    return model, path


def flattened(weights: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([each.detach().double().flatten() for each in weights.values()]).numpy()


def test_it_is_the_plane_of_the_singular_value_decomposition(
    trained: tuple[Model, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = trained
    monkeypatch.setattr(module, "AT_ONCE", 50)  # so that parameters come in several stretches
    plane = principal_plane(path, list(path.weights[0]))
    points = np.stack([flattened(weights) for weights in path.weights])
    centred = points - points.mean(axis=0)
    _, sizes, components = np.linalg.svd(centred, full_matrices=False)
    for index, direction in enumerate(plane.directions):
        found = flattened(direction)
        assert np.linalg.norm(found) == pytest.approx(1.0, abs=1e-6)
        assert abs(found @ components[index]) == pytest.approx(1.0, abs=1e-6)
        assert plane.path[:, index] == pytest.approx((points - points[-1]) @ found, abs=1e-6)
        assert plane.explained[index] == pytest.approx(sizes[index] ** 2 / (sizes**2).sum())
    assert (plane.path[0] <= 0).all()
    assert (plane.path[-1] == 0).all()
    assert plane.steps == tuple(range(7))


def test_parameters_keep_their_names_and_shapes(trained: tuple[Model, Recorded]) -> None:
    model, path = trained
    plane = principal_plane(path, list(path.weights[0]))
    for direction in plane.directions:
        assert {name: each.shape for name, each in direction.items()} == {n: p.shape for n, p in model.named_parameters()}


def test_checkpoints_give_the_plane_that_a_recording_gives(trained: tuple[Model, Recorded], tmp_path: Path) -> None:
    model, path = trained
    for step, weights in zip(path.steps[1:], path.weights[1:], strict=True):
        checkpoint.save(tmp_path, Checkpoint(step, {**model.state_dict(), **weights}, {}, {}))
    names = list(path.weights[0])
    expected, found = principal_plane(path, names), principal_plane(Saved.of(tmp_path, path.weights[0]), names)
    assert np.array_equal(found.path, expected.path)
    assert found.explained == expected.explained
    assert all(torch.equal(found.directions[1][name], expected.directions[1][name]) for name in names)
    assert Saved.of(tmp_path).steps == [1, 2, 3, 4, 5, 6]
    (tmp_path / "step-00000003" / "state.json").write_text("[]")  # damaged
    assert Saved.of(tmp_path, path.weights[0]).steps == [0, 1, 2, 4, 5, 6]
    with pytest.raises(InputError, match="to another model"):
        Saved.of(tmp_path).read("nothing")


def test_the_surface_at_a_point_of_a_plane_is_the_loss_there(trained: tuple[Model, Recorded]) -> None:
    model, path = trained
    # Three points lie in their plane exactly.
    three = Recorded(path.steps[-3:], path.weights[-3:])
    plane = principal_plane(three, list(path.weights[0]))
    expected = []
    for weights in three.weights:
        model.load_state_dict(weights, strict=False)
        expected.append(loss(model).item())
    for (right, up), value in zip(plane.path, expected, strict=True):
        found = kl_surface(model, plane, right, up)
        assert found == pytest.approx(value, abs=1e-5)
    whole = trajectory_surface(model, loss, plane, 3)
    assert whole.loss[1, 2] == pytest.approx(kl_surface(model, plane, whole.x[2], whole.y[1]))
    assert whole.x[0] < plane.path[:, 0].min()
    assert whole.x[-1] > plane.path[:, 0].max()


def kl_surface(model: Model, plane: Plane, right: float, up: float) -> float:
    """The loss of the last weights, moved by hand."""
    last = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(plane.directions[0][name], alpha=float(right)).add_(plane.directions[1][name], alpha=float(up))
        found = loss(model).item()
        for name, parameter in model.named_parameters():
            parameter.copy_(last[name])
    return found


def test_a_grid_around_a_path_has_room_on_all_sides() -> None:
    across, upwards = around(np.array([[-4.0, 1.0], [0.0, 0.0], [-1.0, 3.0]]), 5, margin=0.5)
    assert across.tolist() == [-6.0, -4.0, -2.0, 0.0, 2.0]
    assert upwards.tolist() == [-1.5, 0.0, 1.5, 3.0, 4.5]


def test_a_recording_does_not_change_with_the_model(trained: tuple[Model, Recorded]) -> None:
    model, path = trained
    before = flattened(path.weights[-1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert np.array_equal(flattened(path.weights[-1]), before)


def test_too_few_points_and_points_on_a_line_are_refused(trained: tuple[Model, Recorded]) -> None:
    _, path = trained
    names = list(path.weights[0])
    with pytest.raises(InputError, match="at least 3"):
        principal_plane(Recorded(path.steps[:2], path.weights[:2]), names)
    line = [{name: each * share for name, each in path.weights[0].items()} for share in (1.0, 2.0, 4.0)]
    with pytest.raises(InputError, match="one line"):
        principal_plane(Recorded([1, 2, 3], line), names)
    with pytest.raises(InputError, match="not finite"):
        principal_plane(Recorded([1, 2, 3], [*line[:2], {name: each / 0 for name, each in line[0].items()}]), names)
