"""Measured times, one per problem, schedule, workload, template source and environment, from the rows of a database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import Problem
from ..db.lookup import is_current
from ..db.records import ALL_WORKLOADS, BestRow, Environment, Trial, problem_body
from ..registry import select
from ..schedule import Schedule


@dataclass(frozen=True)
class Observation:
    """A measured time: of which problem, schedule and workload, and with what."""

    problem: Problem
    schedule: Schedule
    workload: str
    time_us: float
    template_digest: str
    environment: Environment

    @property
    def key(self) -> tuple:
        return self.problem, self.schedule, self.workload, self.template_digest, self.environment

    def as_dict(self) -> dict:
        return {
            "problem": problem_body(self.problem),
            "schedule": self.schedule.as_dict(),
            "workload": self.workload,
            "time_us": self.time_us,
            "template_digest": self.template_digest,
            "environment": self.environment.id,
        }


def observations(trials: Iterable[Trial], best: Iterable[BestRow] = ()) -> list[Observation]:
    """One time per (problem, schedule, workload, source, environment): of its last race, else of its last search
    trial, else of a best row, which also tells the time of the default."""
    found: dict[tuple, Observation] = {}
    for row in best:
        if row.workload == ALL_WORKLOADS:
            continue
        pairs = [(row.schedule, row.median_us)]
        if row.default_median_us is not None and is_current(row):  # an older source may have had another default
            default = select(row.problem).default(row.problem)
            if default.template == row.schedule.template:
                pairs.append((default, row.default_median_us))
        for schedule, time_us in pairs:
            o = Observation(row.problem, schedule, row.workload, time_us, row.template_digest, row.environment)
            found[o.key] = o
    for phase in ("search", "final"):
        for t in trials:
            if t.phase == phase and t.status == "ok":
                o = Observation(t.problem, t.schedule, t.workload, t.median_us, t.template_digest, t.environment)
                found[o.key] = o
    return list(found.values())
