"""The final races of one problem, one per workload: each on one card, side by side where there are several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ..db.records import Trial
from ..schedule import Schedule
from .board import Board
from .evaluate import Evaluator
from .finals import ROUNDS
from .lanes import Lanes
from .unit import Unit

KEY = "race"


@dataclass(frozen=True)
class Race:
    """Finalists of a unit, and the name under which hosts agree who races them."""

    unit: Unit
    racers: list[Schedule]
    topic: str


def run_races(
    races: Sequence[Race],
    evaluator: Evaluator,
    lanes: Lanes,
    board: Board,
    end: float | None,
    begun: Callable[[Unit, Sequence[Schedule]], None],
    raced: Callable[[Unit, Sequence[Trial]], None],
) -> None:
    """Run the races that no other host runs, wait for those that one does (until ``end``), report all to ``raced``."""
    waiting, racing = list(races), {}
    for race in races:
        board.enter(race.topic, ())
    while waiting or racing:
        for race in list(waiting):
            if heard := board.news(race.topic):
                raced(race.unit, heard[-1])
            elif len(racing) < lanes.count and board.claim(race.topic, KEY):
                begun(race.unit, race.racers)
                racing[_submit(race, evaluator, lanes)] = race
            else:
                continue
            waiting.remove(race)
        if racing:
            for future in lanes.finished(racing, board.poll_s or None):
                race, trials = racing.pop(future), future.result()
                try:
                    board.publish(race.topic, KEY, trials)
                finally:  # a race that two hosts ran is no harm
                    raced(race.unit, trials)
        elif waiting:
            if end is not None and time.monotonic() >= end:
                return
            time.sleep(board.poll_s)


def _submit(race: Race, evaluator: Evaluator, lanes: Lanes) -> Future:
    return lanes.submit(evaluator.race, race.unit.problem, race.unit.workload, race.racers, ROUNDS)
