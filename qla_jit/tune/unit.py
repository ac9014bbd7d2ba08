"""What a sweep is made of and what comes of it: `Unit`, `Report`, and the `Listener` that hears of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import Problem
from ..db.records import BestRow, Trial
from ..schedule import Schedule
from .space import Space


@dataclass
class Unit:
    """One problem on one workload: its space, the trials that count, and how the search went."""

    space: Space
    workload: str
    strategy: str = ""
    trials: list[Trial] = field(default_factory=list)
    resumed: int = 0
    elsewhere: int = 0  # trials that another host measured in this run
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
    seconds: of wall time, startup_s of them until the cards were ready.  cards: that measured side by side.
    lost: why each card that was given up on the way was; the others went on.
    """

    units: list[Unit]
    overall: list[BestRow] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0
    startup_s: float = 0.0
    cards: int = 1
    lost: list[str] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        """Search trials of this run, in order."""
        return [t for unit in self.units for t in unit.trials[unit.resumed :]]

    @property
    def measuring_share(self) -> float | None:
        """Of the cards' time since they were ready, what trials of the search took to verify and measure."""
        working_s = self.cards * (self.seconds - self.startup_s)
        busy_s = sum(t.times.verify_s + t.times.measure_s for t in self.trials)
        return busy_s / working_s if working_s > 0 else None

    @property
    def trials_per_minute(self) -> float | None:
        """Since the cards were ready; None for a sweep that took no time."""
        working_s = self.seconds - self.startup_s
        return 60 * len(self.trials) / working_s if working_s > 0 else None
