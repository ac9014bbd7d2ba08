"""What a sweep does at one time: searches and races as steps of one thread, which only the trials themselves leave.

An `Activity` starts trials when it is given lanes and takes in those that are done.  `SideBySide` and `InTurn` make one
of several; `run` takes the steps until all is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol

from ..errors import CacheError, QlaError
from .board import Board
from .lanes import Lanes
from .worker import WorkerLostError


class Activity(Protocol):
    """Something that keeps up to so many lanes busy until it is done."""

    def advance(self, lanes: int) -> None:
        """Hear what other hosts did, and start trials until ``lanes`` run."""
        ...

    @property
    def running(self) -> dict[Future, object]:
        """What was started and not taken in."""
        ...

    def finish(self, future: Future) -> None:
        """Take in one of ``running`` that is done."""
        ...

    def stop(self) -> None:
        """Start nothing more."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether `advance` found nothing to start, nothing runs, and no other host has anything."""
        ...

    def close(self) -> None:
        """Once, when it is done."""
        ...


class SideBySide:
    """Activities at once, no more than there are lanes, which they share.  activities: makes each when its turn comes,
    and nothing more once stopped."""

    def __init__(self, activities: Iterator[Activity]):
        self._following = activities
        self._active: list[Activity] = []
        self._exhausted = False

    def advance(self, lanes: int) -> None:
        while True:
            while not self._exhausted and len(self._active) < lanes:
                following = next(self._following, None)
                if following is None:
                    self._exhausted = True
                else:
                    self._active.append(following)
            share, more = divmod(lanes, len(self._active) or 1)
            for i, each in enumerate(self._active):
                each.advance(max(1, share + (i < more)))
            done = [each for each in self._active if each.is_done]
            for each in done:
                self._active.remove(each)
                each.close()
            if not done:
                return

    @property
    def running(self) -> dict[Future, Activity]:
        return {future: each for each in self._active for future in each.running}

    def finish(self, future: Future) -> None:
        self.running[future].finish(future)

    def stop(self) -> None:
        self._exhausted = True
        for each in self._active:
            each.stop()

    @property
    def is_done(self) -> bool:
        return self._exhausted and not self._active

    def close(self) -> None:
        """Nothing is left to close."""


class InTurn:
    """One activity after another, each made when the one before it is done; at last ``ended`` is called, unless it was
    stopped."""

    def __init__(self, makes: Iterator[Callable[[], Activity]], ended: Callable[[], None]):
        self._makes = makes
        self._ended = ended
        self._current: Activity | None = None
        self._stopped = self._done = False

    def advance(self, lanes: int) -> None:
        while not self._done:
            if self._current is None:
                make = None if self._stopped else next(self._makes, None)
                if make is None:
                    self._done = True
                    return
                self._current = make()
            self._current.advance(lanes)
            if not self._current.is_done:
                return
            self._current.close()
            self._current = None

    @property
    def running(self) -> dict[Future, object]:
        return {} if self._current is None else self._current.running

    def finish(self, future: Future) -> None:
        self._current.finish(future)

    def stop(self) -> None:
        self._stopped = True
        if self._current is not None:
            self._current.stop()

    @property
    def is_done(self) -> bool:
        return self._done

    def close(self) -> None:
        if not self._stopped:
            self._ended()


def run(activity: Activity, lanes: Lanes, board: Board) -> None:
    """Take an activity's steps until it is done.

    When no card is left (WorkerLostError) or this host can build nothing (CacheError), all else would fail too: then
    nothing more is started, and the error is raised when whatever ran has ended.
    """
    lost: QlaError | None = None
    while True:
        activity.advance(lanes.count)
        running = activity.running
        if running:
            for future in lanes.finished(running, board.poll_s or None):
                try:
                    activity.finish(future)
                except (WorkerLostError, CacheError) as error:
                    lost = error
                    activity.stop()
        elif activity.is_done:
            break
        else:
            time.sleep(board.poll_s)  # the other hosts are not done yet
    activity.close()
    if lost is not None:
        raise lost
