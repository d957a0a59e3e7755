"""Each probe against a computation of its own: autograd in fp64, loops written out, finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kilolayer as kl
from kilolayer.models.model import Model
from kilolayer.probe.accumulated import change_over_checkpoints
from kilolayer.probe.attention_entropy import attention_entropy
from kilolayer.probe.dead_units import dead_units
from kilolayer.probe.gradients import measure_gradients
from kilolayer.probe.hooks import top_states
from kilolayer.probe.norm_inputs import norm_inputs
from kilolayer.probe.rank import effective_rank, mean_cosine, state_rank
from kilolayer.probe.residual import residual_sizes
from kilolayer.probe.updates import update_sizes
from kilolayer.recipes.base import Depths, Part, Rates, Recipe, Side
from kilolayer.recipes.complete_p import CompleteP
from kilolayer.recipes.role import Role

VOCABULARY, DOUBLE = 24, torch.float64
SOURCE = torch.tensor([[3, 7, 5, 9, 4], [8, 6, 0, 0, 0], [0, 0, 0, 0, 0]])  # padding, and a row that only fills up the batch
TARGET = torch.tensor([[2, 5, 7, 11], [2, 13, 6, 0], [0, 0, 0, 0]])
LABELS = torch.tensor([[5, 7, 11, 3], [13, 6, 3, 0], [0, 0, 0, 0]])


def translator(recipe: str | Recipe = "post_ln", **options: object) -> kl.EncoderDecoder:
    torch.manual_seed(1)
    return kl.EncoderDecoder(VOCABULARY, 8, 2, 16, 2, 3, recipe, dtype=DOUBLE, **options).eval()  # pyright: ignore


def loss_of(model: Model) -> Tensor:
    logits = model(SOURCE, TARGET).logits
    return F.cross_entropy(logits.flatten(0, 1), LABELS.flatten(), ignore_index=0)


def rms(x: Tensor) -> float:
    return math.sqrt(sum(value * value for value in x.detach().flatten().tolist()) / x.numel())


def sequences(ids: Tensor) -> Iterator[tuple[int, int]]:
    """Each row that holds something, with its real length."""
    for row, tokens in enumerate(ids):
        if length := int((tokens != 0).sum()):
            yield row, length


def layer_outputs(model: kl.EncoderDecoder) -> dict[str, list[Tensor]]:
    """The embedded input and the output of each layer, at real places: [positions, dim]."""
    out = model(SOURCE, TARGET, hidden_states=True)
    assert out.encoder_hidden_states is not None
    assert out.hidden_states is not None
    return {
        "encoder": [torch.cat([x[row, :n] for row, n in sequences(SOURCE)]) for x in out.encoder_hidden_states],
        "decoder": [torch.cat([x[row, :n] for row, n in sequences(TARGET)]) for x in out.hidden_states],
    }


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    model = kl.EncoderDecoder(VOCABULARY, 4, 1, 4, 1, 1, "rezero", dtype=DOUBLE)  # its branch scale is of no sublayer
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 0 and "blocks" in name:
                weight.fill_(0.3)
    found = measure_gradients(model, loss_of)
    squares: dict[str, float] = {}
    for name, weight in model.named_parameters():
        total, flat = 0.0, weight.data.view(-1)
        if name.startswith(("encoder.blocks.0.", "decoder.blocks.0.cross_attention.")):
            for index in range(len(flat)):
                before = float(flat[index])
                values = []
                for step in (1e-5, -1e-5):
                    flat[index] = before + step
                    with torch.no_grad():
                        values.append(float(loss_of(model)))
                flat[index] = before
                total += ((values[0] - values[1]) / 2e-5) ** 2
            squares[name] = total
    layer = sum(value for name, value in squares.items() if name.startswith("encoder.blocks.0."))
    cross = sum(value for name, value in squares.items() if name.startswith("decoder.blocks.0.cross"))
    attention = sum(value for name, value in squares.items() if name.startswith("encoder.blocks.0.self_attention"))
    assert found.layers["encoder"][0] == pytest.approx(math.sqrt(layer), rel=1e-5)
    assert found.kinds["decoder"]["cross_attention"][0] == pytest.approx(math.sqrt(cross), rel=1e-5)
    assert found.kinds["encoder"]["self_attention"][0] == pytest.approx(math.sqrt(attention), rel=1e-5)
    count = sum(weight.numel() for name, weight in model.named_parameters() if name.startswith("encoder.blocks.0."))
    assert found.per_parameter["encoder"][0] == pytest.approx(math.sqrt(layer / count), rel=1e-5)
    assert found.over_eps(1e-4)["encoder"][0] == pytest.approx(math.sqrt(layer / count) / 1e-4, rel=1e-5)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_gradient_stands_over_the_eps_that_its_weight_has_in_training() -> None:
    class OwnEps(CompleteP):
        """Norms have an eps of 0.1, whatever the others have."""

        def rates(self, weight: Role | Part, side: Side, depths: Depths, width: int) -> Rates:
            return Rates(eps=0.1) if weight is Part.NORM else super().rates(weight, side, depths, width)

    # Times 1 / (m_N m_L): m_N is 8 / 4, m_L 2 / 1.
    model = translator(OwnEps(base_width=4, base_depth=1))
    loss_of(model).backward()
    expected = []
    for block in model.encoder.blocks:
        gradients = {name: weight.grad for name, weight in block.named_parameters() if weight.grad is not None}
        ratios = [gradient / (1e-6 * (0.1 if "norm" in name else 1 / 4)) for name, gradient in gradients.items()]
        expected.append(rms(torch.cat([each.flatten() for each in ratios])))
    assert measure_gradients(model, loss_of).over_eps(1e-6)["encoder"] == pytest.approx(expected, rel=1e-9)


def test_what_enters_a_norm_is_what_the_equation_says() -> None:
    model = translator("post_ln")
    found = norm_inputs(model, loss_of)
    states = layer_outputs(model)
    block = model.decoder.blocks[1]
    out = model(SOURCE, TARGET, hidden_states=True)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    sums = []
    for row, length in sequences(TARGET):  # Post-LN: the norm reads x + f(x), here of one row alone, without padding
        x = out.hidden_states[1][row : row + 1, :length]
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in block.self_attention.f.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=causal[:length, :length])
        sums.append((x + block.self_attention.f.output(mixed.transpose(1, 2).flatten(2)))[0])
    expected = rms(torch.cat(sums))
    assert found["decoder"]["self_attention.out_norm"][1] == pytest.approx(expected, rel=1e-9)
    assert set(found["decoder"]) == {"self_attention.out_norm", "cross_attention.out_norm", "feedforward.out_norm"}

    model = translator("pre_ln")
    found, states = norm_inputs(model, loss_of), layer_outputs(model)
    for layer in range(2):  # Pre-LN: the first norm of a layer reads what the layer below gives
        expected = rms(states["encoder"][layer])
        assert found["encoder"]["self_attention.pre_norm"][layer] == pytest.approx(expected, rel=1e-9)
    assert found["encoder"]["top_norm"] == pytest.approx((rms(states["encoder"][-1]),), rel=1e-9)


def test_the_norms_inside_of_experts_are_measured_without_padding() -> None:
    model = translator("sub_ln", moe=kl.MoE(experts=2, top_k=2, every=1))
    found = norm_inputs(model, loss_of)["encoder"]["feedforward.experts.inner_norm"]
    sparse = model.encoder.blocks[0].feedforward.f
    rows: list[Tensor] = []
    handle = sparse.register_forward_pre_hook(lambda _module, inputs: rows.append(inputs[0].flatten(0, 1)))
    for row, length in sequences(SOURCE):
        model.encode(SOURCE[row : row + 1, :length])
    handle.remove()
    weight, bias = sparse.experts.input.weight, sparse.experts.input.bias
    hidden = [torch.relu(torch.cat(rows) @ weight[expert].mT + bias[expert]) for expert in range(2)]  # each token goes to both
    assert found[0] == pytest.approx(rms(torch.cat(hidden)), rel=1e-9)


def test_the_residual_is_that_of_real_places() -> None:
    model = translator("pre_ln")
    expected = {side: [rms(x) for x in each] for side, each in layer_outputs(model).items()}
    found = residual_sizes(model, loss_of)
    assert {side: list(sizes) for side, sizes in found.items()} == {
        side: pytest.approx(sizes) for side, sizes in expected.items()
    }


def test_the_rank_is_that_of_the_singular_values_and_the_cosine_that_of_all_pairs() -> None:
    model = translator("deepnorm")
    found, states = state_rank(model, loss_of), layer_outputs(model)
    for side, ids in (("encoder", SOURCE), ("decoder", TARGET)):
        for layer, x in enumerate(states[side][1:]):
            x = x.detach()
            values = torch.linalg.svdvals(x)
            shares = [float(value / values.sum()) for value in values]
            expected = math.exp(-sum(share * math.log(share) for share in shares if share > 0))
            assert found.effective[side][layer] == pytest.approx(expected, rel=1e-6)
            cosines, start = [], 0
            for _, length in sequences(ids):
                rows = x[start : start + length]
                start += length
                pairs = [(a, b) for a in range(length) for b in range(length) if a != b]
                cosines.append(sum(float(F.cosine_similarity(rows[a], rows[b], dim=0)) for a, b in pairs) / len(pairs))
            assert found.cosine[side][layer] == pytest.approx(sum(cosines) / len(cosines), rel=1e-9)
    assert effective_rank(torch.ones(5, 4)) == pytest.approx(1.0, abs=1e-6)
    assert effective_rank(torch.eye(4)) == pytest.approx(4.0)
    assert mean_cosine(torch.ones(2, 3, 4), None) == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"positions": "t5", "kv_heads": 1}])
def test_the_entropy_of_attention_is_that_of_its_shares(options: dict[str, object]) -> None:
    model = translator("pre_ln", **options)
    found = attention_entropy(model, loss_of)
    # The shares themselves: attention with one-hot values gives them, for one row without its padding.
    for side, kind, layer in (
        ("encoder", "self_attention", 1),
        ("decoder", "self_attention", 2),
        ("decoder", "cross_attention", 1),
    ):
        attention = model.get_submodule(f"{side}.blocks.{layer}.{kind}.f")
        entropies: list[float] = []
        for row, length in sequences(SOURCE if side == "encoder" else TARGET):
            source = SOURCE[row : row + 1, : int((SOURCE[row] != 0).sum())]
            target = TARGET[row : row + 1, : int((TARGET[row] != 0).sum())]
            shares = shares_of(attention, lambda s=source, t=target: model(s, t)).detach()
            for head in shares[0]:
                for query in range(length):
                    visible = [share for share in head[query].tolist() if share > 0]
                    if len(visible) > 1:
                        entropies.append(-sum(p * math.log(p) for p in visible) / math.log(len(visible)))
        assert found[side][kind][layer] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)


def shares_of(attention: torch.nn.Module, run: Callable[[], object]) -> Tensor:
    """The attention's shares [batch, heads, queries, keys]: what it mixes of one-hot values."""
    found: list[Tensor] = []
    mix = attention.mix

    def noting(query: Tensor, key: Tensor, value: Tensor, mask: object) -> Tensor:
        keys = key.shape[2]
        one_hot = torch.eye(keys, dtype=DOUBLE).expand(*key.shape[:2], keys, keys)
        found.append(mix(query, key, one_hot, mask))
        return mix(query, key, value, mask)

    attention.mix = noting  # pyright: ignore
    try:
        run()
    finally:
        del attention.mix
    return found[0]


def test_units_are_dead_that_no_real_token_opens() -> None:
    model = translator("post_ln")
    feedforward = model.encoder.blocks[1].feedforward.f
    with torch.no_grad():
        feedforward.input.bias[:5] = -100.0
        feedforward.input.bias[5:] = 100.0
    found = dead_units(model, loss_of)
    assert found["encoder"][1] == 5 / 16
    x = layer_inputs(model, "decoder.blocks.0.feedforward.f", TARGET)
    expected = sum(bool((model.decoder.blocks[0].feedforward.f.input(x)[:, unit] <= 0).all()) for unit in range(16)) / 16
    assert found["decoder"][0] == expected
    assert dead_units(translator(activation="gelu"), loss_of) == {}


def layer_inputs(model: kl.EncoderDecoder, name: str, ids: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _module, inputs: found.append(inputs[0]))
    model(SOURCE, TARGET)
    handle.remove()
    return torch.cat([found[0][row, :length] for row, length in sequences(ids)])


def test_an_expert_that_no_token_is_sent_to_has_no_dead_units() -> None:
    model = translator("post_ln", moe=kl.MoE(experts=3, top_k=1, every=1, router="linear"))
    with torch.no_grad():
        for block in model.encoder.blocks:
            experts = block.feedforward.f.experts
            experts.input.weight.zero_()
            experts.input.bias[:] = -1.0  # all are dead
            experts.input.bias[:, :4] = 1.0
    assert dead_units(model, loss_of)["encoder"] == (12 / 16, 12 / 16)


def test_a_step_of_sgd_is_the_gradient_times_the_rate() -> None:
    model = translator("deepnorm")
    found = update_sizes(model, loss_of, lr=1e-3, sgd_lr=1e-2, eps=1e-6)
    weights = dict(model.named_parameters())
    gradients = dict(zip(weights, torch.autograd.grad(loss_of(model), list(weights.values())), strict=True))
    matrices = [name for name in weights if ".blocks." in name and name.endswith(".weight") and "norm" not in name]

    def moved(change: Callable[[Tensor], Tensor], names: list[str]) -> float:
        later = {name: weight - change(gradients[name]) if name in names else weight for name, weight in weights.items()}
        before = model(SOURCE, TARGET).states
        after = torch.func.functional_call(model, later, (SOURCE, TARGET)).states
        before, after = (torch.cat([x[row, :length] for row, length in sequences(TARGET)]) for x in (before, after))
        return float((after - before).detach().norm() / before.detach().norm())

    assert found.sgd_matrices == pytest.approx(moved(lambda g: 1e-2 * g, matrices), rel=1e-9)
    assert found.sgd_all == pytest.approx(moved(lambda g: 1e-2 * g, list(weights)), rel=1e-9)
    # Adam's first step: mean / (1 - beta1) is g, and sqrt(square / (1 - beta2)) is |g|.
    assert found.adam_matrices == pytest.approx(moved(lambda g: 1e-3 * g / (g.abs() + 1e-6), matrices), rel=1e-6)
    assert found.adam_all == pytest.approx(moved(lambda g: 1e-3 * g / (g.abs() + 1e-6), list(weights)), rel=1e-6)


def test_the_accumulated_change_is_against_the_start_which_stays() -> None:
    start, later = translator("deepnorm"), translator("deepnorm")
    with torch.no_grad():
        for weight in later.parameters():
            weight.mul_(1.1)
    own = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    found = change_over_checkpoints(start, loss_of, [(3, own), (7, later.state_dict())])
    before, after = (
        torch.cat([model(SOURCE, TARGET).states[row, :length].detach() for row, length in sequences(TARGET)])
        for model in (start, later)
    )
    assert [change.step for change in found] == [3, 7]
    assert found[0].size == 0.0
    assert found[1].size == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-9)
    assert all(torch.equal(tensor, own[name]) for name, tensor in start.state_dict().items())


QUICK = ("dlcl", "sub_ln")  # a stream of their own, norms inside


@pytest.mark.parametrize(
    "recipe", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in kl.recipes.names()]
)
def test_padding_changes_no_measurement(recipe: str) -> None:
    model = translator(recipe)
    wider = F.pad(SOURCE, (0, 3)), F.pad(TARGET, (0, 2)), F.pad(LABELS, (0, 2))

    def padded(model: Model) -> Tensor:
        return F.cross_entropy(model(*wider[:2]).logits.flatten(0, 1), wider[2].flatten(), ignore_index=0)

    for probe in (residual_sizes, norm_inputs, attention_entropy, dead_units):
        found, expected = probe(model, padded), probe(model, loss_of)
        assert flat(found) == pytest.approx(flat(expected), rel=1e-5, nan_ok=True)
    assert flat(vars(state_rank(model, padded))) == pytest.approx(flat(vars(state_rank(model, loss_of))), rel=1e-6)
    torch.testing.assert_close(top_states(padded)(model), top_states(loss_of)(model))


def flat(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in flat(each)]
    return list(value) if isinstance(value, tuple) else [float(value)]  # pyright: ignore
