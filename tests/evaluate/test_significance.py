"""The paired bootstrap against sacreBLEU's, hand cases, and how often it cries wolf."""

from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.significance import PairedTest

from kilolayer.errors import InputError, OptionError
from kilolayer.evaluate.scores import Bleu, Chrf, Metric, SacreScore, Ter
from kilolayer.evaluate.significance import SEED, comparison_matrix, paired_bootstrap, resampled_sums
from tests.evaluate.made_translations import references, spoiled

REFERENCES = references(120)
SYSTEMS = {rate: spoiled(REFERENCES, rate, seed=round(1000 * rate)) for rate in (0.25, 0.27, 0.30, 0.50)}


@pytest.mark.matrix(3)
@pytest.mark.parametrize("metric", [Bleu(), Chrf(), Ter()], ids=str)
@pytest.mark.parametrize("rate", [0.27, 0.30, 0.50])
def test_equal_to_sacrebleus_paired_bootstrap(metric: SacreScore, rate: float) -> None:
    baseline, system = SYSTEMS[0.25], SYSTEMS[rate]
    _, peer = PairedTest(
        [("baseline", baseline), ("system", system)], {"m": metric.sacre()}, [REFERENCES], test_type="bs", n_samples=400
    )()
    key = next(name for name in peer if name != "System")
    ours = paired_bootstrap(baseline, system, REFERENCES, metric, samples=400)
    assert ours.system.value == pytest.approx(peer[key][1].score)  # pyright: ignore
    assert ours.p_value == pytest.approx(peer[key][1].p_value, abs=2 / 401)  # pyright: ignore
    assert (ours.system.high - ours.system.low) / 2 == pytest.approx(peer[key][1].ci, rel=1e-3)  # pyright: ignore


def test_within_noise_of_sacrebleu_under_another_seed() -> None:
    one = paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.27], REFERENCES)
    two = paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.27], REFERENCES, seed=SEED + 1)
    assert one != two
    assert one.p_value == pytest.approx(two.p_value, abs=0.06)
    assert one == paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.27], REFERENCES)


def test_resampling_draws_whole_sentences_with_replacement() -> None:
    statistics = np.eye(3)
    sums = resampled_sums(statistics, samples=500, seed=3)
    assert sums.shape == (500, 3)
    assert (sums.sum(axis=1) == 3).all()
    assert sums.mean(axis=0) == pytest.approx([1, 1, 1], abs=0.15)
    assert sums.max() == 3  # all three draws were the same sentence


def test_a_clear_gain_and_its_mirror() -> None:
    better = paired_bootstrap(SYSTEMS[0.50], SYSTEMS[0.25], REFERENCES)
    worse = paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.50], REFERENCES)
    assert (better.verdict, worse.verdict) == ("+", "-")
    assert better.p_value == worse.p_value == pytest.approx(1 / 1001)
    assert (better.wins, worse.wins) == (1.0, 0.0)
    assert better.difference.low > 0 > worse.difference.high
    assert better.difference.low <= better.difference.value <= better.difference.high
    assert "better" in str(better)
    assert better.signature.endswith(f"|bs:1000|seed:{SEED}")


def test_less_ter_is_better() -> None:
    comparison = paired_bootstrap(SYSTEMS[0.50], SYSTEMS[0.25], REFERENCES, Ter(), samples=200)
    assert comparison.difference.value < 0
    assert (comparison.verdict, comparison.wins) == ("+", 1.0)


def test_a_system_does_not_differ_from_itself() -> None:
    same = paired_bootstrap(SYSTEMS[0.25], list(SYSTEMS[0.25]), REFERENCES)
    assert (same.p_value, same.verdict, same.wins) == (1.0, "=", 0.0)
    assert (same.difference.value, same.difference.low, same.difference.high) == (0, 0, 0)


class Mean(Metric):
    """The mean of numbers written as text: its bootstrap is known exactly."""

    key, name = "mean", "mean"

    def statistics(self, hypotheses, references):
        return np.array([[float(number), 1.0] for number in hypotheses])

    def values(self, sums):
        return sums[..., 0] / sums[..., 1]

    def signature(self) -> str:
        return "mean"


def test_a_mean_has_the_interval_that_theory_gives() -> None:
    numbers = np.random.default_rng(0).normal(10, 3, size=400)
    system = [str(number) for number in numbers]
    comparison = paired_bootstrap(["0"] * 400, system, [""] * 400, Mean(), samples=4000)
    half = 1.96 * numbers.std() / 20
    assert comparison.system.value == pytest.approx(numbers.mean())
    assert comparison.system.low == pytest.approx(numbers.mean() - half, abs=0.03)
    assert comparison.system.high == pytest.approx(numbers.mean() + half, abs=0.03)


@pytest.mark.slow
def test_equal_systems_are_called_different_as_often_as_documented() -> None:
    generator = np.random.default_rng(1)
    verdicts: list[str] = []
    for _ in range(300):
        a, b = ([str(number) for number in generator.normal(size=100)] for _ in range(2))
        verdicts.append(paired_bootstrap(a, b, [""] * 100, Mean(), samples=200).verdict)
    assert 0.02 < verdicts.count("+") / 300 < 0.085
    assert 0.02 < verdicts.count("-") / 300 < 0.085


def test_the_matrix_of_table_3() -> None:
    systems = {"6L-6L": SYSTEMS[0.50], "12L-12L": SYSTEMS[0.25], "12L-12L again": SYSTEMS[0.25]}
    matrix = comparison_matrix(systems, REFERENCES, samples=200)
    assert matrix.verdicts == (("", "-", "-"), ("+", "", "="), ("+", "=", ""))
    rows = matrix.rows()
    assert rows[0] == ["system", "BLEU", "a", "b", "c"]
    assert [row[0] for row in rows[1:]] == ["a:6L-6L", "b:12L-12L", "c:12L-12L again"]
    assert rows[1][1] == f"{Bleu().score(SYSTEMS[0.50], REFERENCES).value:.1f}"


@pytest.mark.slow
def test_the_matrix_holds_the_pairwise_tests() -> None:
    systems = {str(rate): lines for rate, lines in SYSTEMS.items()}
    matrix = comparison_matrix(systems, REFERENCES, Ter(), samples=200)
    mirror = {"+": "-", "-": "+", "=": "=", "": ""}
    for i, (a, lines_a) in enumerate(systems.items()):
        for j, (b, lines_b) in enumerate(systems.items()):
            assert matrix.verdicts[i][j] == mirror[matrix.verdicts[j][i]]
            if a != b:
                pair = paired_bootstrap(lines_b, lines_a, REFERENCES, Ter(), samples=200)
                assert (pair.verdict, pair.p_value) == (matrix.verdicts[i][j], matrix.p_values[i][j])


def test_bad_comparisons_are_refused() -> None:
    with pytest.raises(InputError, match="differ in number: 119 and 120"):
        paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.27][1:], REFERENCES)
    with pytest.raises(OptionError, match="at least two"):
        comparison_matrix({"alone": SYSTEMS[0.25]}, REFERENCES)
    with pytest.raises(OptionError, match="samples is 0"):
        paired_bootstrap(SYSTEMS[0.25], SYSTEMS[0.27], REFERENCES, samples=0)
