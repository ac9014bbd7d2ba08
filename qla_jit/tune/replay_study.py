"""A search strategy against a recorded sweep: what it finds within a budget, against the best that was recorded.

Every answer comes through the measuring interface (`ReplayEvaluator`), so a point that was not recorded is a
ReplayMissError.  The same recording, strategy, seed and budget give the same answer on every machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..config import Problem
from ..db.lookup import Match
from ..db.records import Trial
from ..errors import ConfigError, ReplayMissError
from ..schedule import Schedule
from .replay import ReplayEvaluator
from .search import Exhaustive, OptunaSearch, Strategy, first_points, make_strategy
from .space import enumerate_space

#: auto: what a sweep would run; random: seeded order; tpe: Optuna's, also where there are few points.
STRATEGIES = ("auto", "random", "tpe")
NEAR = 0.02


@dataclass(frozen=True)
class SeedRun:
    """One run.  found: the best trial, None where nothing ran.

    losses: after each trial, the best time so far over the recorded best, minus 1; inf while nothing ran.
    """

    seed: int
    found: Trial | None
    losses: tuple[float, ...]

    @property
    def trials(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float | None:
        """What the whole run found; None where nothing ran."""
        return None if self.found is None else self.losses[-1]

    @property
    def trials_to_near(self) -> int | None:
        """Trials until a point within 2 % of the best was found; None where none was."""
        return next((count for count, loss in enumerate(self.losses, start=1) if loss <= NEAR), None)


@dataclass(frozen=True)
class Replayed:
    """All seeds on one problem and workload.

    best: the recorded best.  default: the first point of every run.  points: what the search chose from.
    unrecorded: feasible points of this version that the recording lacks; gone: recorded ones that are none today.
    """

    problem: Problem
    workload: str
    strategy: str
    points: int
    budget: int
    best: Trial
    default: Trial
    runs: list[SeedRun]
    unrecorded: int
    gone: int

    @property
    def hits(self) -> float:
        """Share of the seeds that found a point within 2 % of the best."""
        return statistics.mean(run.trials_to_near is not None for run in self.runs)

    @property
    def median_loss(self) -> float | None:
        losses = [float("inf") if run.loss is None else run.loss for run in self.runs]
        median = statistics.median(losses)
        return None if median == float("inf") else median

    @property
    def worst_loss(self) -> float | None:
        return None if any(run.loss is None for run in self.runs) else max(run.loss for run in self.runs)


def trials_of(budget: str, points: int) -> int:
    """``25%`` of the points (rounded down, at least the default) or a number of trials; ConfigError otherwise."""
    text = budget.removesuffix("%")
    try:
        value = float(text) if budget.endswith("%") else int(text)
    except ValueError:
        value = 0
    if not value > 0 or (budget.endswith("%") and value > 100):  # `not >`: NaN is neither
        raise ConfigError(f"`--budget` must be a number of trials, or 1% to 100% of the points, but got {budget!r}.")
    count = int(points * value / 100 + 1e-9) if budget.endswith("%") else int(value)
    return max(1, min(points, count))


def replay(
    evaluator: ReplayEvaluator,
    problem: Problem,
    workload: str,
    strategy: str = "auto",
    seeds: Sequence[int] = (0,),
    budget: str = "25%",
    near: Iterable[Match] = (),
    current: bool = False,
) -> Replayed:
    """Run a strategy on one recorded space, once per seed.

    near: rows whose schedules are tried after the default.  current: search the feasible points of this version, not
    the recorded ones, whether or not all were recorded.  Raises ReplayMissError for a point without a trial.
    """
    recorded = evaluator.points(problem, workload)
    space = enumerate_space(problem)
    points = space.points if current else _default_first(recorded, space.default)
    trials = [evaluator.evaluate(problem, workload, point) for point in recorded]
    best = min((t for t in trials if t.status == "ok"), key=lambda t: t.median_us, default=None)
    if best is None:
        raise ReplayMissError(
            f"a point of {problem.kernel} on {workload} must have run to compare with, but none of {len(trials)} did; "
            f"ask for another workload."
        )
    count = trials_of(budget, len(points))
    near = list(near)
    runs = [
        run_seed(_make(strategy, points, seed, count, near), evaluator, problem, workload, best.median_us, count, seed)
        for seed in seeds
    ]
    return Replayed(
        problem=problem,
        workload=workload,
        strategy=_make(strategy, points, 0, count, near).name if strategy == "auto" else strategy,
        points=len(points),
        budget=count,
        best=best,
        default=evaluator.evaluate(problem, workload, points[0]),
        runs=runs,
        unrecorded=len(set(space.points) - set(recorded)),
        gone=len(set(recorded) - set(space.points)),
    )


def _default_first(recorded: Sequence[Schedule], default: Schedule) -> tuple[Schedule, ...]:
    """Every sweep begins with the default of its day, so that is the first one recorded where it is not today's."""
    first = default if default in recorded else recorded[0]
    return (first, *(point for point in recorded if point != first))


def _make(name: str, points: Sequence[Schedule], seed: int, budget: int, near: Sequence[Match]) -> Strategy:
    if name == "auto":
        return make_strategy(points, (), budget, seed, near)
    kinds: dict[str, Callable[..., Strategy]] = {"random": Exhaustive, "tpe": OptunaSearch}
    if name not in kinds:
        raise ConfigError(f"`--strategy` must be of {', '.join(STRATEGIES)}, but got {name!r}; name one of them.")
    return kinds[name](points, seed, first_points(points, near))


def run_seed(
    strategy: Strategy,
    evaluator: ReplayEvaluator,
    problem: Problem,
    workload: str,
    best_us: float,
    budget: int,
    seed: int = 0,
) -> SeedRun:
    """Ask, evaluate and tell until the budget or the points end.  best_us: what losses are relative to."""
    found, losses = None, []
    while len(losses) < budget and (point := strategy.ask()) is not None:
        trial = evaluator.evaluate(problem, workload, point)
        strategy.tell(trial)
        if trial.status == "ok" and (found is None or trial.median_us < found.median_us):
            found = trial
        losses.append(float("inf") if found is None else found.median_us / best_us - 1)
    return SeedRun(seed, found, tuple(losses))
