"""The whole offline line: problems → feasible points → compile → verify and measure → trial rows → finals → best rows.

`run_sweep` needs neither typer nor rich and knows nothing of GPUs; an `Evaluator` does.  Every trial is stored before
the next begins.  A deadline, Ctrl-C or a lost worker ends the sweep with everything measured so far in the database,
and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import Problem
from ..db import Database
from ..db.jsonl import Recorder
from ..db.records import BestRow, Trial
from ..errors import ConfigError
from ..registry import digest
from ..schedule import Schedule
from .evaluate import Evaluator, OutOfTimeError
from .finals import ROUNDS, best_row, finalists, overall_row
from .last_sweep import Plan, Setup, remember
from .search import make_strategy
from .space import Space, archs_match, enumerate_space
from .worker import WorkerLostError

FINALS_SHARE = 0.15  # of a problem's time
WEIGHT_POINTS = 64  # a larger space gets no more time for its size


@dataclass
class Unit:
    """One problem on one workload: its space, the trials that count, and how the search went."""

    space: Space
    workload: str
    strategy: str = ""
    trials: list[Trial] = field(default_factory=list)
    resumed: int = 0
    final: list[Trial] = field(default_factory=list)
    row: BestRow | None = None

    @property
    def problem(self) -> Problem:
        return self.space.problem

    @property
    def statuses(self) -> dict[str, int]:
        return dict(Counter(t.status for t in self.trials))

    @property
    def best(self) -> Trial | None:
        return min((t for t in self.trials if t.status == "ok"), key=lambda t: t.median_us, default=None)

    @property
    def default(self) -> Trial | None:
        return next((t for t in self.trials if t.schedule == self.space.default), None)


class Listener:
    """What a sweep reports as it goes; the base class ignores it all."""

    def started(self, units: Sequence[Unit], budget_s: float | None) -> None: ...

    def unit_started(self, unit: Unit, target: int) -> None: ...

    def trial_done(self, unit: Unit, trial: Trial, queued: int) -> None: ...

    def racing(self, unit: Unit, schedules: Sequence[Schedule]) -> None: ...

    def unit_done(self, unit: Unit) -> None: ...


@dataclass
class Report:
    """How a sweep ended.

    stopped: empty when all was tried, else ``budget``, ``interrupted``, or why no worker can be started.
    """

    units: list[Unit]
    overall: list[BestRow] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0

    @property
    def trials(self) -> list[Trial]:
        """Search trials of this run, in order."""
        return [t for unit in self.units for t in unit.trials[unit.resumed :]]


class Sweep:
    """One run of a plan.  Built and consumed by `run_sweep`."""

    def __init__(self, plan: Plan, evaluator: Evaluator, db: Database, listener: Listener, recorder: Recorder | None):
        self.plan = plan
        self.evaluator = evaluator
        self.db = db
        self.listener = listener
        self.recorder = recorder
        self.started = time.monotonic()
        self.end = None if plan.budget_s is None else self.started + plan.budget_s
        self.groups = self._groups()

    def _groups(self) -> list[list[Unit]]:
        groups = []
        for problem in self.plan.problems[:1]:  # compiles while the worker below starts
            self.evaluator.prepare(problem, [enumerate_space(problem).default])
        for problem in self.plan.problems:
            if not archs_match(problem, self.evaluator.environment.arch):
                raise ConfigError(
                    f"`arch == {self.evaluator.environment.arch!r}` must hold to measure on "
                    f"{self.evaluator.environment}, but got {problem.arch!r}; name its arch, or use --compile-only."
                )
            space = enumerate_space(problem)
            groups.append([Unit(self.evaluator.space(space, w), w) for w in self.plan.workloads])
        return groups

    def run(self) -> Report:
        units = [unit for group in self.groups for unit in group]
        report = Report(units)
        self.listener.started(units, self.plan.budget_s)
        try:
            for i, group in enumerate(self.groups):
                for following in self.groups[i + 1 : i + 2]:  # its first trial then need not wait for a compiler
                    self.evaluator.prepare(following[0].problem, [following[0].space.default])
                self._tune(group, self._share(i), report)
                if self._out_of_time(self.end):
                    break
            if any(len(unit.trials) < self._target(unit) for unit in units):
                report.stopped = "budget"
        except KeyboardInterrupt:
            report.stopped = "interrupted"
        except WorkerLostError as error:
            report.stopped = str(error)
        report.seconds = time.monotonic() - self.started
        return report

    def _share(self, first: int) -> float | None:
        """When the group must be done: what is left, split by the points that the remaining groups have."""
        if self.end is None:
            return None
        weights = [sum(min(len(u.space.points), WEIGHT_POINTS) for u in group) for group in self.groups[first:]]
        left = max(0.0, self.end - time.monotonic())
        return time.monotonic() + left * (weights[0] / sum(weights) if sum(weights) else 1.0)

    def _tune(self, group: list[Unit], end: float | None, report: Report) -> None:
        began = time.monotonic()
        for i, unit in enumerate(group):
            unit_end = None
            if end is not None:
                now = time.monotonic()
                search_end = end - FINALS_SHARE * (end - began)
                unit_end = now + max(0.0, search_end - now) / (len(group) - i)
            self._search(unit, unit_end)
        self._finals(group, report)

    def _target(self, unit: Unit) -> int:
        return min(self.plan.max_trials or len(unit.space.points), len(unit.space.points))

    def _search(self, unit: Unit, end: float | None) -> None:
        strategy = self._resume(unit)
        unit.strategy = strategy.name
        target = self._target(unit)
        self.listener.unit_started(unit, target)
        pending: list[Schedule] = []
        while not self._out_of_time(end):
            searching = time.monotonic()
            while len(pending) < self.evaluator.width and len(unit.trials) + len(pending) < target:
                point = strategy.ask()
                if point is None:
                    break
                pending.append(point)
                self.evaluator.prepare(unit.problem, [point])
            if not pending:
                return
            point = next((p for p in pending if self.evaluator.ready(unit.problem, p)), pending[0])
            if unit.space.default in pending:  # first of all: without it there is no gain to report
                point = unit.space.default
            search_s = time.monotonic() - searching
            pending.remove(point)
            try:
                trial = self.evaluator.evaluate(unit.problem, unit.workload, point, end, search_s)
            except OutOfTimeError:
                return
            self._keep(unit, trial)
            strategy.tell(trial)

    def _resume(self, unit: Unit):
        """The strategy, told of what the database knows about this problem as it is now: same source, same card."""
        points, stored = set(unit.space.points), {}
        for trial in self.db.trials(unit.problem, unit.workload):
            known = trial.phase == "search" and trial.schedule in points
            if known and trial.template_digest == digest(trial.schedule.template):
                if trial.environment == self.evaluator.environment:
                    stored[trial.schedule] = trial
        unit.trials = list(stored.values())
        unit.resumed = len(unit.trials)
        near = self.db.near(unit.problem, unit.workload)
        return make_strategy(unit.space.points, unit.trials, self.plan.max_trials, self.plan.seed, near)

    def _keep(self, unit: Unit, trial: Trial) -> None:
        self.db.store.add_trial(trial)
        if self.recorder is not None:
            self.recorder.add(trial)
        if trial.phase == "final":
            unit.final.append(trial)
            return
        unit.trials.append(trial)
        self.listener.trial_done(unit, trial, self.evaluator.queued)

    def _finals(self, group: list[Unit], report: Report) -> None:
        """Race the finalists of all workloads on each, so that one schedule for all of them can be named too."""
        chosen = list(dict.fromkeys(s for unit in group for s in finalists(unit.trials, unit.space.default)))
        for unit in group:
            racers = [s for s in chosen if s in unit.space.points]
            self.listener.racing(unit, racers)
            for trial in self.evaluator.race(unit.problem, unit.workload, racers, ROUNDS):
                self._keep(unit, trial)
            unit.row = best_row(unit.final, unit.space.default, len(unit.trials))
            if unit.row is not None:
                self.db.store.put_best(unit.row)
            self.listener.unit_done(unit)
        races, trials = {unit.workload: unit.final for unit in group}, sum(len(unit.trials) for unit in group)
        overall = overall_row(races, group[0].space.default, trials)
        if overall is not None:
            self.db.store.put_best(overall)
            report.overall.append(overall)

    @staticmethod
    def _out_of_time(end: float | None) -> bool:
        return end is not None and time.monotonic() >= end


def run_sweep(
    plan: Plan,
    evaluator: Evaluator,
    db: Database,
    listener: Listener | None = None,
    recorder: Recorder | None = None,
    setup: Setup | None = None,
) -> Report:
    """Run a plan and store every trial and every best row; ``setup`` is what `recall` gives back beside the plan.

    Raises ConfigError for a plan of another arch than the evaluator's, ReplayMissError for a point that was not
    recorded, DatabaseError when a row cannot be stored; never for what a schedule does wrong.
    """
    sweep = Sweep(plan, evaluator, db, listener or Listener(), recorder)
    remember(db, plan, setup or Setup())  # not before: a plan that cannot start must not replace one that can go on
    return sweep.run()
