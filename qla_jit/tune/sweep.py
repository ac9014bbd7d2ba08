"""The whole offline line: problems → feasible points → compile, filter → verify, measure → trials → finals → best rows.

`run_sweep` needs neither typer nor rich and knows nothing of GPUs; an `Evaluator` does, and says how many trials may
run side by side.  Every trial is stored as it ends.  Where several hosts share a `Board`, each measures the points that
it claimed there and stores those of the others too, so every database ends up with all.  A deadline, Ctrl-C or a lost
worker ends the sweep with everything measured so far in the database, and the same command goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ..db import Database
from ..db.jsonl import Recorder
from ..db.records import Trial
from ..errors import CacheError, ConfigError
from ..registry import digest
from ..schedule import Schedule
from ..workload import suited, workload_of
from .activities import InTurn, SideBySide, run
from .board import Alone, Board, BoardLostError, race_of, topic_of
from .evaluate import Evaluator
from .finals import best_row, finalists, overall_row
from .lanes import Lanes
from .last_sweep import Plan, Setup, remember
from .races import Race
from .search import Strategy, make_strategy
from .search_round import SearchRound
from .space import archs_match, enumerate_space
from .unit import Listener, Report, Unit
from .worker import WorkerLostError

FINALS_SHARE = 0.15  # of a problem's time
WEIGHT_POINTS = 64  # a larger space gets no more time for its size


class Sweep:
    """One run of a plan.  Built and consumed by `run_sweep`."""

    def __init__(
        self,
        plan: Plan,
        evaluator: Evaluator,
        db: Database,
        listener: Listener,
        recorder: Recorder | None,
        board: Board | None = None,
    ):
        self.plan = plan
        self.evaluator = evaluator
        self.db = db
        self.listener = listener
        self.recorder = recorder
        self.board = board or Alone()
        self.lanes = Lanes(evaluator.lanes)
        self.started = time.monotonic()
        self.end = None if plan.budget_s is None else self.started + plan.budget_s
        self.groups = self._groups()
        self.startup_s = time.monotonic() - self.started

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
            workloads = suited(problem.kernel, self.plan.workloads)
            if not workloads:
                workload_of(problem.kernel, self.plan.workloads[0])
            groups.append([Unit(self.evaluator.space(space, w), w) for w in workloads])
        return groups

    def run(self) -> Report:
        units = [unit for group in self.groups for unit in group]
        report = Report(units, startup_s=self.startup_s, cards=self.lanes.count)
        self.listener.started(units, self.plan.budget_s)
        try:
            run(SideBySide(self._problems(report)), self.lanes, self.board)
            if any(len(unit.trials) < self._target(unit) for unit in units):
                report.stopped = "budget"
        except KeyboardInterrupt:
            report.stopped = "interrupted"
        except (WorkerLostError, BoardLostError, CacheError) as error:
            report.stopped = str(error)
        finally:
            self.lanes.close()
            self.board.close()
        report.lost = list(getattr(self.evaluator, "lost", ()))
        report.seconds = time.monotonic() - self.started
        return report

    def _problems(self, report: Report) -> Iterator[InTurn]:
        """The searches of each problem's workloads, then their races; each begins when a lane is free for it."""
        for i, group in enumerate(self.groups):
            if self._out_of_time(self.end):
                return
            for following in self.groups[i + 1 : i + 2]:  # its first trial then need not wait for a compiler
                self.evaluator.prepare(following[0].problem, [following[0].space.default])
            end = self._share(i)
            search_end = None if end is None else end - FINALS_SHARE * (end - time.monotonic())
            searches = lambda group=group, end=search_end: SideBySide(self._searches(group, end))
            races = lambda group=group: SideBySide(iter(self._races(group)))
            yield InTurn(iter((searches, races)), lambda group=group: self._ended(group, report))

    def _share(self, first: int) -> float | None:
        """When the group must be done: what is left, split by the points that the remaining groups have, so many of
        which are searched side by side."""
        if self.end is None:
            return None
        weights = [sum(min(len(u.space.points), WEIGHT_POINTS) for u in group) for group in self.groups[first:]]
        left, side_by_side = max(0.0, self.end - time.monotonic()), min(self.lanes.count, len(weights))
        return time.monotonic() + left * min(1.0, side_by_side * weights[0] / sum(weights) if sum(weights) else 1.0)

    def _searches(self, group: list[Unit], end: float | None) -> Iterator[SearchRound]:
        """The searches of a group, each made when it begins; until ``end``, they have equal times."""
        lanes = max(1, self.lanes.count // len(self.groups))  # that a group has at least
        for i, unit in enumerate(group):
            unit_end = None
            if end is not None:
                now, side_by_side = time.monotonic(), min(lanes, len(group))
                unit_end = now + max(0.0, end - now) / -(-(len(group) - i) // side_by_side)
            yield self._search(unit, unit_end)

    def _target(self, unit: Unit) -> int:
        return min(self.plan.max_trials or len(unit.space.points), len(unit.space.points))

    def _search(self, unit: Unit, end: float | None) -> SearchRound:
        strategy = self._resume(unit)
        unit.strategy = strategy.name
        target = self._target(unit)
        self.listener.unit_started(unit, target)
        topic = self._topic(unit)
        return SearchRound(
            unit, strategy, target, topic, self.evaluator, self.lanes, self.board, self._keep, end
        )  # fmt: skip

    def _topic(self, unit: Unit) -> str:
        return topic_of(unit.space, unit.workload, self.evaluator.environment, self.plan.static_filter)

    def _resume(self, unit: Unit) -> Strategy:
        """The strategy, told of what the database knows about this problem as it is now: same source, same card."""
        points, stored = set(unit.space.points), {}
        for trial in self.db.trials(unit.problem, unit.workload):
            known = trial.phase == "search" and trial.schedule in points
            if trial.status == "filtered" and not self.plan.static_filter:  # nothing was measured yet
                continue
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

    def _races(self, group: list[Unit]) -> list[Race]:
        """The finalists of all workloads on each, so that one schedule for all of them can be named too."""
        chosen = list(dict.fromkeys(s for unit in group for s in finalists(unit.trials, unit.space.default)))
        return [self._race(unit, [s for s in chosen if s in unit.space.points]) for unit in group]

    def _race(self, unit: Unit, racers: list[Schedule]) -> Race:
        topic = race_of(self._topic(unit), racers)
        return Race(
            unit, racers, topic, self.evaluator, self.lanes, self.board, self.end, self.listener.racing, self._raced
        )  # fmt: skip

    def _ended(self, group: list[Unit], report: Report) -> None:
        self.evaluator.ended(group[0].problem)
        finals, trials = {unit.workload: unit.final for unit in group}, sum(len(unit.trials) for unit in group)
        overall = overall_row(finals, group[0].space.default, trials)
        if overall is not None:
            self.db.store.put_best(overall)
            report.overall.append(overall)

    def _raced(self, unit: Unit, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._keep(unit, trial)
        unit.row = best_row(unit.final, unit.space.default, len(unit.trials))
        if unit.row is not None:
            self.db.store.put_best(unit.row)
        self.listener.unit_done(unit)

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
    board: Board | None = None,
) -> Report:
    """Run a plan and store every trial and every best row; ``setup`` is what `recall` gives back beside the plan;
    ``board`` is where other hosts that run the same plan are met.

    Raises ConfigError for a plan of another arch than the evaluator's or without a workload for one of its kernels,
    ReplayMissError for a point that was not
    recorded, DatabaseError when a row cannot be stored; never for what a schedule does wrong.
    """
    sweep = Sweep(plan, evaluator, db, listener or Listener(), recorder, board)
    remember(db, plan, setup or Setup())  # not before: a plan that cannot start must not replace one that can go on
    return sweep.run()
