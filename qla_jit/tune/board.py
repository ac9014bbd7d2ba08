"""Which point is whose, where several hosts run one sweep: `Board`, and `Alone` for the host that shares with nobody.

A sweep claims a point before it compiles it, publishes what became of it, and takes from the board what the other hosts
published.  `shared_board.SharedBoard` is the one that hosts meet at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..db.records import Environment, Trial, problem_body
from ..errors import QlaError
from ..registry import digest
from ..schedule import Schedule
from ..spec import canonical_json, sha256
from .space import Space


class BoardLostError(QlaError, RuntimeError):
    """The storage that hosts share cannot be reached any more."""


class Board(Protocol):
    """Claims and results by topic (what hosts must agree on) and key (a point of it)."""

    poll_s: float  # between two looks at a board that has nothing new

    def enter(self, topic: str, known: Sequence[Trial]) -> None:
        """Begin a topic, with the trials of it that this host has already."""
        ...

    def claim(self, topic: str, key: str) -> bool:
        """Whether the key is this host's now; False while it is another's, or done."""
        ...

    def publish(self, topic: str, key: str, trials: Sequence[Trial]) -> bool:
        """What became of a claimed key.  False where the claim was given to another host meanwhile."""
        ...

    def release(self, topic: str, key: str) -> None:
        """Give a claim back."""
        ...

    def news(self, topic: str) -> list[list[Trial]]:
        """What other hosts published since the last call."""
        ...

    def close(self) -> None:
        """Give all claims back."""
        ...


class Alone:
    """No other host: every claim holds and there is never news."""

    poll_s = 0.0

    def enter(self, topic: str, known: Sequence[Trial]) -> None: ...

    def claim(self, topic: str, key: str) -> bool:
        return True

    def publish(self, topic: str, key: str, trials: Sequence[Trial]) -> bool:
        return True

    def release(self, topic: str, key: str) -> None: ...

    def news(self, topic: str) -> list[list[Trial]]:
        return []

    def close(self) -> None: ...


def topic_of(space: Space, workload: str, environment: Environment, static_filter: bool = True) -> str:
    """Name of what hosts share: equal for equal problems, workloads, template sources, cards and software; hosts that
    measure everything, whatever the static filter says, are among themselves."""
    templates = {name: digest(name) for name in sorted({p.template for p in (*space.points, space.default)})}
    what = {
        "problem": problem_body(space.problem),
        "workload": workload,
        "templates": templates,
        "environment": environment.as_dict(),
    }
    if not static_filter:
        what["static_filter"] = False
    return f"qla-jit {space.problem.kernel} {workload} {sha256(what)[:16]}"


def race_of(topic: str, racers: Sequence[Schedule]) -> str:
    """Name of the final race of a topic between these schedules."""
    return f"{topic} race {sha256(sorted(map(key_of, racers)))[:8]}"


def key_of(schedule: Schedule) -> str:
    return canonical_json(schedule.as_dict())
