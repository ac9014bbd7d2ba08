"""The final race of a unit: on one card, in rounds, by one of the hosts that share a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ..db.records import Trial
from ..schedule import Schedule
from .board import Board
from .evaluate import Evaluator
from .finals import ROUNDS
from .lanes import Lanes
from .unit import Unit

KEY = "race"


class Race:
    """An `Activity`: runs the race unless another host does, whose results it then waits for, until ``end``.

    racers: finalists of the unit.  topic: the name under which hosts agree who races them.  begun: told when this host
    starts.  raced: told of the trials, whoever ran them.
    """

    def __init__(
        self,
        unit: Unit,
        racers: list[Schedule],
        topic: str,
        evaluator: Evaluator,
        lanes: Lanes,
        board: Board,
        end: float | None,
        begun: Callable[[Unit, Sequence[Schedule]], None],
        raced: Callable[[Unit, Sequence[Trial]], None],
    ):
        self._unit = unit
        self._racers = racers
        self._topic = topic
        self._evaluator = evaluator
        self._lanes = lanes
        self._board = board
        self._end = end
        self._begun = begun
        self._raced = raced
        self.running: dict[Future, list[Schedule]] = {}
        self._stopping = self._known = False
        board.enter(topic, ())

    def advance(self, lanes: int) -> None:
        if self.is_done or self.running:
            return
        if heard := self._board.news(self._topic):
            self._known = True
            self._raced(self._unit, heard[-1])
        elif self._board.claim(self._topic, KEY):
            self._begun(self._unit, self._racers)
            race = self._evaluator.race, self._unit.problem, self._unit.workload, self._racers, ROUNDS
            self.running[self._lanes.submit(*race)] = self._racers
        elif self._end is not None and time.monotonic() >= self._end:
            self._stopping = True

    def finish(self, future: Future) -> None:
        del self.running[future]
        trials = future.result()
        self._known = True
        try:
            self._board.publish(self._topic, KEY, trials)
        finally:  # a race that two hosts ran is no harm
            self._raced(self._unit, trials)

    def stop(self) -> None:
        self._stopping = True

    @property
    def is_done(self) -> bool:
        return not self.running and (self._stopping or self._known)

    def close(self) -> None:
        """What was claimed was run."""
