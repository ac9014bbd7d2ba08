"""The search of a unit: claim points, keep lanes busy, store what comes out and what other hosts publish."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from ..db.records import Trial
from ..errors import CacheError
from ..schedule import Schedule
from .board import Board, BoardLostError, key_of
from .evaluate import Evaluator, OutOfTimeError
from .lanes import Lanes
from .search import Strategy
from .unit import Unit
from .worker import WorkerLostError


class SearchRound:
    """One run of the search of a unit, an `Activity`.

    keep: stores a trial.  end: when to start no more (monotonic), or None.
    """

    def __init__(
        self,
        unit: Unit,
        strategy: Strategy,
        target: int,
        topic: str,
        evaluator: Evaluator,
        lanes: Lanes,
        board: Board,
        keep: Callable[[Unit, Trial], None],
        end: float | None,
    ):
        self._unit = unit
        self._strategy = strategy
        self._target = target
        self._topic = topic
        self._evaluator = evaluator
        self._lanes = lanes
        self._board = board
        self._keep = keep
        self._end = end
        self._pending: list[Schedule] = []  # claimed and not begun
        self.running: dict[Future, Schedule] = {}
        self._elsewhere: dict[Schedule, None] = {}  # points that another host has
        self._stopping = False
        board.enter(topic, unit.trials)

    def advance(self, lanes: int) -> None:
        self._hear()
        if not self._ended:
            self._start_trials(lanes)

    def finish(self, future: Future) -> None:
        try:
            self._finish(self.running.pop(future), future)
        except OutOfTimeError:
            self._stopping = True

    def stop(self) -> None:
        self._stopping = True

    @property
    def is_done(self) -> bool:
        return not self.running and (self._ended or not self._elsewhere)

    def close(self) -> None:
        """Leave what was claimed and not begun to others."""
        for point in self._pending:
            self._board.release(self._topic, key_of(point))

    @property
    def _ended(self) -> bool:
        return self._stopping or (self._end is not None and time.monotonic() >= self._end)

    def _start_trials(self, lanes: int) -> None:
        searching = time.monotonic()
        self._claim_points()
        while self._pending and len(self.running) < lanes:
            unit = self._unit
            point = next((p for p in self._pending if self._evaluator.ready(unit.problem, p)), self._pending[0])
            if unit.space.default in self._pending:  # first of all: without it there is no gain to report
                point = unit.space.default
            search_s = time.monotonic() - searching
            self._pending.remove(point)
            future = self._lanes.submit(
                self._evaluator.evaluate, unit.problem, unit.workload, point, self._end, search_s
            )
            self.running[future] = point
            searching = time.monotonic()

    def _claim_points(self) -> None:
        """Claim what another host gave up, then what the search proposes, and announce it to the compilers."""
        for point in list(self._elsewhere):
            if len(self._pending) < self._evaluator.width and self._claim(point):
                del self._elsewhere[point]
        while len(self._pending) < self._evaluator.width and self._taken < self._target:
            point = self._strategy.ask()
            if point is None:
                return
            if not self._claim(point):
                self._elsewhere[point] = None

    def _claim(self, point: Schedule) -> bool:
        if not self._board.claim(self._topic, key_of(point)):
            return False
        self._pending.append(point)
        self._evaluator.prepare(self._unit.problem, [point])
        return True

    @property
    def _taken(self) -> int:
        return len(self._unit.trials) + len(self._pending) + len(self.running) + len(self._elsewhere)

    def _finish(self, point: Schedule, future: Future) -> None:
        try:
            trial = future.result()
        except (OutOfTimeError, WorkerLostError, CacheError):
            self._board.release(self._topic, key_of(point))
            raise
        try:
            accepted = self._board.publish(self._topic, key_of(point), [trial])
        except BoardLostError:
            self._keep(self._unit, trial)
            raise
        if accepted:
            self._keep(self._unit, trial)
            self._strategy.tell(trial)
        else:  # this host was silent for so long that another took the point; its trial will be heard of
            self._elsewhere[point] = None

    def _hear(self) -> None:
        known = {t.schedule for t in self._unit.trials}
        for trial in (t for trials in self._board.news(self._topic) for t in trials):
            self._elsewhere.pop(trial.schedule, None)
            if trial.schedule not in known:
                known.add(trial.schedule)
                self._unit.elsewhere += 1
                self._keep(self._unit, trial)
                self._strategy.tell(trial)
            if trial.schedule in self._pending:
                self._pending.remove(trial.schedule)
