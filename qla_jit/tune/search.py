"""In which order points are tried: all of them where they are few, else what Optuna's TPE proposes.

Both begin with the template's default and then with what won on the nearest tuned problems (``first``).

Only feasible points are ever returned.  A strategy holds no state that the database does not: it is rebuilt from the
trials stored so far, so resuming is reading them again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Protocol

from ..db.lookup import Match
from ..db.records import Trial
from ..schedule import Schedule

EXHAUSTIVE_POINTS = 64
#: Winners of other problems that are tried before the search proposes its own.
NEIGHBOURS = 3
#: Points taken before the model proposes any.
STARTUP = 5
#: Proposals answered from memory before the nearest point that is still unknown is taken instead.
MEMORY_ANSWERS = 8


class Strategy(Protocol):
    """Proposes points until none is left."""

    name: str

    def ask(self) -> Schedule | None:
        """A point neither asked nor told before, or None."""
        ...

    def tell(self, trial: Trial) -> None:
        """What became of a point."""
        ...


def first_points(points: Sequence[Schedule], near: Iterable[Match], count: int = NEIGHBOURS) -> list[Schedule]:
    """The default, then the ``count`` best answers of ``near`` (in order of preference) that are points here."""
    known = set(points[1:])
    winners = [s for s in dict.fromkeys(match.schedule for match in near) if s in known]
    return [*points[:1], *winners[:count]]


def make_strategy(
    points: Sequence[Schedule],
    history: Iterable[Trial],
    budget_trials: int | None = None,
    seed: int = 0,
    near: Iterable[Match] = (),
) -> Strategy:
    """Exhaustive for at most 64 points (and at most ``budget_trials``), else Optuna; told of ``history``.

    near: tuned rows of this and other problems, the nearest first; their schedules are tried right after the default.
    """
    few = len(points) <= min(EXHAUSTIVE_POINTS, budget_trials or EXHAUSTIVE_POINTS)
    strategy = (Exhaustive if few else OptunaSearch)(points, seed, first_points(points, near))
    for trial in history:
        strategy.tell(trial)
    return strategy


class Exhaustive:
    """Every point once: ``first`` (by default points[0], the template's default), then a seeded shuffle, so that a
    short budget sees no mere corner."""

    name = "exhaustive"

    def __init__(self, points: Sequence[Schedule], seed: int = 0, first: Sequence[Schedule] = ()):
        rest = list(points[1:])
        random.Random(seed).shuffle(rest)
        self._waiting = dict.fromkeys([*(first or points[:1]), *rest])

    def ask(self) -> Schedule | None:
        point = next(iter(self._waiting), None)
        self._waiting.pop(point, None)
        return point

    def tell(self, trial: Trial) -> None:
        self._waiting.pop(trial.schedule, None)


class OptunaSearch:
    """TPE over enumerated points, by ask and tell.

    Each parameter is a categorical of its template; the template itself is one where there are several.  A proposal
    outside the feasible points is told PRUNED (TPE ranks those last; FAIL would teach it nothing), a known one is told
    its value again, and after a few of these the unknown point that differs in the fewest parameters is taken.
    first: points to take before any proposal; by default points[0], the template's default.  Random points bring them
    to five, drawn from the feasible ones: Optuna would draw each template as often as the other, however few points
    it has.  Parameters are modelled together, because stages, registers and splits are only good in combination.
    """

    name = "tpe"

    def __init__(self, points: Sequence[Schedule], seed: int = 0, first: Sequence[Schedule] = ()):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `group`
            # group: each template has parameters of its own.
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True, group=True)
        self._study = optuna.create_study(sampler=sampler)
        self._unknown = dict.fromkeys(points)
        drawn = list(points[1:])
        random.Random(seed).shuffle(drawn)
        first = first or points[:1]
        self._first = tuple(dict.fromkeys([*first, *drawn]))[: max(STARTUP, len(first))]
        self._points = frozenset(points)
        self._values: dict[Schedule, float | None] = {}  # None: failed
        self._asked: dict[Schedule, object | None] = {}
        self._templates = tuple(dict.fromkeys(p.template for p in points))
        self._choices: dict[str, dict[str, list]] = {name: {} for name in self._templates}
        for point in points:
            for name, value in point.items:
                seen = self._choices[point.template].setdefault(name, [])
                if value not in seen:
                    seen.append(value)

    def ask(self) -> Schedule | None:
        for point in self._first:
            if point in self._unknown:
                return self._take(point, None)
        for _ in range(MEMORY_ANSWERS):
            if not self._unknown:
                return None
            trial = self._study.ask()
            point = self._suggest(trial)
            if point in self._unknown:
                return self._take(point, trial)
            if point in self._asked:  # still being measured: nothing to teach
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            else:
                self._answer(trial, self._values.get(point))
        return self._take(self._nearest_unknown(point), None)

    def tell(self, trial: Trial) -> None:
        schedule = trial.schedule
        if schedule not in self._points:
            return
        value = trial.median_us
        self._unknown.pop(schedule, None)
        self._values[schedule] = value
        asked = self._asked.pop(schedule, None)
        if asked is not None:
            self._answer(asked, value)
        else:
            self._study.add_trial(self._frozen(schedule, value))

    def _take(self, point: Schedule, trial) -> Schedule:
        del self._unknown[point]
        self._asked[point] = trial
        return point

    def _answer(self, trial, value: float | None) -> None:
        if value is None:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _suggest(self, trial) -> Schedule:
        template = self._templates[0]
        if len(self._templates) > 1:
            template = trial.suggest_categorical("template", self._templates)
        params = {
            name: choices[0] if len(choices) == 1 else trial.suggest_categorical(f"{template}.{name}", choices)
            for name, choices in self._choices[template].items()
        }
        return Schedule.of(template, params)

    def _frozen(self, schedule: Schedule, value: float | None):
        categorical, state = self._optuna.distributions.CategoricalDistribution, self._optuna.trial.TrialState
        params = {
            f"{schedule.template}.{name}": (chosen, categorical(self._choices[schedule.template][name]))
            for name, chosen in schedule.items
            if len(self._choices[schedule.template][name]) > 1
        }
        if len(self._templates) > 1:
            params["template"] = (schedule.template, categorical(self._templates))
        return self._optuna.trial.create_trial(
            state=state.PRUNED if value is None else state.COMPLETE,
            value=value,
            params={name: chosen for name, (chosen, _) in params.items()},
            distributions={name: distribution for name, (_, distribution) in params.items()},
        )

    def _nearest_unknown(self, point: Schedule) -> Schedule:
        def apart(other: Schedule) -> int:
            if other.template != point.template:
                return len(point.items) + len(other.items)
            return sum(a != b for a, b in zip(point.items, other.items))

        return min(self._unknown, key=apart)
