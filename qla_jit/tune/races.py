"""The final race of a unit: on one card, in rounds, by one of the hosts that share a sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..db.records import Trial
from ..schedule import Schedule
from .board import Board
from .evaluate import Evaluator
from .finals import ROUNDS
from .lanes import Lanes
from .unit import Unit

KEY = "race"


@dataclass
class Race:
    """An `Activity`: runs the race unless another host does, whose results it then waits for, until ``end``.

    racers: finalists of the unit.  topic: the name under which hosts agree who races them.  begun: told when this host
    starts.  raced: told of the trials, whoever ran them.
    """

    unit: Unit
    racers: list[Schedule]
    topic: str
    evaluator: Evaluator
    lanes: Lanes
    board: Board
    end: float | None
    begun: Callable[[Unit, Sequence[Schedule]], None]
    raced: Callable[[Unit, Sequence[Trial]], None]
    running: dict[Future, list[Schedule]] = field(default_factory=dict, init=False)
    _is_over: bool = field(default=False, init=False)  # its trials are known, or nobody waits for them any more

    def __post_init__(self):
        self.board.enter(self.topic, ())

    def advance(self, lanes: int) -> None:
        if self.is_done or self.running:
            return
        if heard := self.board.news(self.topic):
            self._is_over = True
            self.raced(self.unit, heard[-1])
        elif self.board.claim(self.topic, KEY):
            self.begun(self.unit, self.racers)
            race = self.evaluator.race, self.unit.problem, self.unit.workload, self.racers, ROUNDS
            self.running[self.lanes.submit(*race)] = self.racers
        elif self.end is not None and time.monotonic() >= self.end:
            self._is_over = True

    def finish(self, future: Future) -> None:
        del self.running[future]
        trials = future.result()
        self._is_over = True
        try:
            self.board.publish(self.topic, KEY, trials)
        finally:  # a race that two hosts ran is no harm
            self.raced(self.unit, trials)

    def stop(self) -> None:
        self._is_over = True

    @property
    def is_done(self) -> bool:
        return self._is_over and not self.running

    def close(self) -> None:
        """What was claimed was run."""
