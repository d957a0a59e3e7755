"""The rules that turn measurements into findings, each with its limit and the options to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from kilolayer import hints, recipes
from kilolayer.evaluate.source_use import SOURCE_READ, in_words
from kilolayer.evaluate.stack_label import DEAD, MOVED, as_fraction, first_layers, level_of
from kilolayer.probe.diagnosis import Diagnosis, Finding, Measurements, first_share
from kilolayer.probe.record import DEAD_ENCODERS, UNREAD, faded, record_of

VANISHED, EXPLODED = 1 / 5, 100.0
"""Of a stack's largest gradient of a layer, before training. Of the series in benchmarks/diagnose/errors.json, three of Post-LN
with 50 and 100 layers are below 0.1, where 16 of 18 runs are dead, and no other is below 0.36. Chosen on all of them.
The first layers over the last: no run began above; the most that any recipe has, at up to 1,000 layers, is 18
(benchmarks/propagation/table.md)."""
SOFT = 1e-5
"""A larger train.eps is proposed below this one."""
GROWN = 100.0
"""Limit for the size of the last layer's output relative to the first layer's input."""
ALIKE, FLAT = 0.99, 0.13
"""Mean cosine of the positions of a sequence after the last layer of a stack, and the effective rank of all states there, as a
share of the width. The second was chosen on one set of series and tested on the others (benchmarks/diagnose/errors.md)."""
NARROW = 0.05
"""Limit for the entropy of a layer's attention, relative to uniform attention."""
IDLE = 0.5
"""Limit for the share of a layer's ReLUs that are 0 for all tokens of the batch."""

Rule = Callable[[Measurements], Iterator[Finding]]


def judge(measured: Measurements) -> Diagnosis:
    """Apply all rules; those that identify a cause come first."""
    found = [finding for rule in RULES for finding in rule(measured)]
    if any(finding.kind == "not finite" for finding in found):
        found = found[:1]  # other measurements are then meaningless
    elif found and not measured.dead:
        found = [*short_run(measured), *found]
    return Diagnosis(measured, tuple(found))


def not_finite(measured: Measurements) -> Iterator[Finding]:
    """The loss or the gradient is not finite."""
    if not (math.isfinite(measured.loss) and math.isfinite(measured.gradients.total)):
        text = f"The loss is {measured.loss:g} and the norm of its gradient {measured.gradients.total:g}."
        # Before the first step, no option of training is the cause.
        options = (
            (*_slower_start(measured), hints.option("train.clip_norm", 1.0), hints.option("train.precision", "fp32"))
            if measured.settings.step
            else ()
        )
        yield Finding("not finite", "", text, measured.loss, math.inf, options)


def short_run(measured: Measurements) -> Iterator[Finding]:
    """A trained run that has not read its text once: what else is found may be only that, so it comes first."""
    settings, epochs = measured.settings, measured.epochs
    if settings.step and epochs is not None and epochs < 1:
        text = f"The run is short: it has read only {epochs:.2g} of its text. Train longer before you judge it."
        yield Finding("short run", "", text, epochs, 1.0, (hints.option("train.steps", _rounded(settings.steps * 4)),))


def dead_stack(measured: Measurements) -> Iterator[Finding]:
    """Stacks that are dead at the end of a run; before its end, those whose first layers get little gradient from a batch."""
    dead = {each.side: each for each in measured.dead}
    for side, norms in measured.gradients.trained.items():
        first, largest = first_layers(norms), measured.gradients.largest
        reached = first / largest if largest else 0.0
        if side in dead:
            text = f"{dead[side].text[:1].upper()}{dead[side].text[1:]}."
            if _read(measured, side) and not dead[side].hidden:
                text += _use_of_dead_encoder(measured.source_gain)
            yield Finding("dead", side, text, dead[side].reached, DEAD, _slower_start(measured))
        elif 0 < measured.settings.step < measured.settings.steps and (level := level_of(reached)) is not None:
            part, record = faded(measured.settings.step, measured.settings.steps, level.share)
            seen = record.sentence(f"were below {as_fraction(level.share)} after {part:.0%} of their steps")
            text = (
                f"The gradient of the {side}'s first layers is {as_fraction(reached)} of the largest layer's ({first:.1e} of "
                f"{largest:.1e}). {seen}"
            )
            yield Finding("fading", side, text, reached, level.share, _slower_start(measured))


def source_not_read(measured: Measurements) -> Iterator[Finding]:
    """The model has about the same loss with the source of another sentence, although gradients reach its encoder."""
    gain = measured.source_gain
    if gain is None or not gain < SOURCE_READ or any(each.side == "encoder" for each in measured.dead):
        return
    text = (
        f"The decoder does not read the encoder: the right source {in_words(gain)}, compared with the source of another "
        "sentence."
    )
    yield Finding("source not read", "encoder", text, gain, SOURCE_READ, _slower_start(measured))


def uneven_gradient(measured: Measurements) -> Iterator[Finding]:
    """Before training, the first layers of a stack get far less gradient than others, or far more; or no layer gets any."""
    if measured.settings.step:
        return
    trained = measured.gradients.trained
    waiting = measured.output_at_zero and measured.gradients.total > 0  # for the first step of the output table
    if trained and not measured.gradients.largest and not waiting:
        text = "No layer receives a gradient: the loss does not depend on the layers, or everything after them is 0."
        yield Finding("no gradient", "", text, 0.0, 0.0)
    for side, norms in trained.items():
        share, least = first_share(norms), min(norms)
        largest = max(norms)
        if share < VANISHED:
            text = (
                f"The gradient vanishes in the {side}: that of its first layers is {as_fraction(share)} of the largest layer's "
                f"({largest:.1e}). {_record(measured, 'vanishing gradient')}"
            )
            yield Finding("vanishing gradient", side, text, share, VANISHED, _other_recipe(measured))
        elif least > 0 and share > 0.5 and norms[-1] < largest / EXPLODED:
            text = (
                f"The gradient grows towards the input of the {side}: its last layer has {as_fraction(norms[-1] / largest)} of "
                f"the largest ({largest:.1e}). {_record(measured, 'exploding gradient')}"
            )
            yield Finding("exploding gradient", side, text, largest / norms[-1], EXPLODED, _other_recipe(measured))


def hidden_by_eps(measured: Measurements) -> Iterator[Finding]:
    """The gradient per parameter is so small relative to the optimizer's eps that nothing moves."""
    typed = measured.settings.eps
    if not measured.settings.uses_eps:
        return
    for side, ratios in measured.gradients.over_eps(typed).items():
        ratio = min(_numbers(ratios), default=math.nan)
        if 0 < ratio < MOVED:
            smaller = 10.0 ** math.floor(math.log10(ratio * typed / 10))
            gradient = measured.gradients.per_parameter[side][ratios.index(ratio)]
            text = (
                f"{measured.settings.optimizer}'s eps hides the gradient of the {side}: at its smallest it is "
                f"{gradient:.1e} per parameter, where eps is {gradient / ratio:.2g}. {_record(measured, 'eps')}"
            )
            yield Finding("eps", side, text, ratio, MOVED, (hints.option("train.eps", smaller),))


def grown_residual(measured: Measurements) -> Iterator[Finding]:
    """The residual stream is so large at the top that its last layers hardly change it."""
    for side, sizes in measured.residual.items():
        growth = sizes[-1] / sizes[0] if sizes[0] else math.nan
        if growth > GROWN:
            text = (
                f"The residual stream of the {side} grows {growth:,.0f} times: its last layers add little to it. "
                f"{_record(measured, 'residual growth')}"
            )
            yield Finding("residual growth", side, text, growth, GROWN, _other_recipe(measured))


def collapsed(measured: Measurements) -> Iterator[Finding]:
    """All positions of a sequence have nearly the same state."""
    for side, cosines in measured.rank.cosine.items():
        rank = measured.rank.effective[side][-1]
        if cosines[-1] > ALIKE and rank < FLAT * measured.width:
            text = (
                f"The states of the {side} have collapsed: the mean cosine of two positions is {cosines[-1]:.3f} after the "
                f"last layer, their effective rank {rank:.1f} of {measured.width}. {_record(measured, 'collapsed states')}"
            )
            options = _slower_start(measured) if measured.settings.step else _other_recipe(measured)
            yield Finding("collapsed states", side, text, cosines[-1], ALIKE, options)


def narrow_attention(measured: Measurements) -> Iterator[Finding]:
    """Attention that attends to a single position."""
    for side, kinds in measured.entropy.items():
        for kind, values in kinds.items():
            known = _numbers(values)
            narrow = [value for value in known if value < NARROW]
            if len(narrow) > len(known) / 2:
                text = (
                    f"{_title(kind)} of the {side} attends to single positions in {len(narrow)} of {len(known)} layers: "
                    f"entropy below {NARROW:g} of that of uniform attention. {_record(measured, 'narrow attention')}"
                )
                yield Finding("narrow attention", side, text, min(narrow), NARROW, _slower_start(measured))


def idle_units(measured: Measurements) -> Iterator[Finding]:
    """ReLUs that are 0 for all tokens."""
    for side, shares in measured.dead_units.items():
        known = _numbers(shares)
        idle = [share for share in known if share > IDLE]
        if idle:
            worst = max(idle)
            layer = shares.index(worst) + 1
            text = (
                f"Most ReLUs are dead in {len(idle)} of {len(known)} layers of the {side}: {worst:.0%} in layer {layer}. "
                f"{_record(measured, 'dead ReLUs')}"
            )
            options = (*_slower_start(measured)[:1], hints.option("model.activation", "gelu"))
            yield Finding("dead ReLUs", side, text, worst, IDLE, options)


RULES: tuple[Rule, ...] = (
    not_finite,
    hidden_by_eps,
    dead_stack,
    source_not_read,
    uneven_gradient,
    collapsed,
    grown_residual,
    narrow_attention,
    idle_units,
)


def _record(measured: Measurements, kind: str) -> str:
    return record_of(kind, measured.settings.step, measured.settings.steps)


def _use_of_dead_encoder(gain: float | None) -> str:
    if gain is None:
        return f" Of {DEAD_ENCODERS} translators with a dead encoder, {UNREAD} did not read their source."
    return f" The decoder does not read it: the right source {in_words(gain)}." if gain < SOURCE_READ else ""


def _read(measured: Measurements, side: str) -> bool:
    return side == "encoder" and "decoder" in measured.gradients.layers


def _other_recipe(measured: Measurements) -> tuple[str, ...]:
    """Suggest a recipe made for depth, or a slower start if the model already has one."""
    return (hints.option("model.recipe", recipes.DEFAULT),) if measured.recipe != recipes.DEFAULT else _slower_start(measured)


def _slower_start(measured: Measurements) -> tuple[str, ...]:
    """Suggest a slower start: of 44 dead runs of benchmarks/dead, 34 are not dead at a quarter of the rate, and 12 learn there.

    A larger eps is not suggested if eps already hides the gradient.
    """
    settings = measured.settings
    hidden = any(0 < ratio < MOVED for ratios in measured.gradients.over_eps(settings.eps).values() for ratio in ratios)
    rate, warmup = float(f"{settings.lr / 4:.1e}"), _rounded(max(settings.warmup_steps, 100) * 4)
    found = [hints.option("train.lr", rate), hints.option("train.warmup_steps", warmup)]
    if settings.uses_eps and settings.eps < SOFT and not hidden:
        found.append(hints.option("train.eps", 1e-4))
    return tuple(found)


def _numbers(values: Sequence[float]) -> list[float]:
    """The measured numbers, without the NaN of layers that have no such part."""
    return [value for value in values if not math.isnan(value)]


def _rounded(value: float) -> int:
    return int(float(f"{value:.2g}"))


def _title(kind: str) -> str:
    return kind.replace("_", "-").capitalize()
