"""Which tuned schedule of the fused forward answers a call: the one that the database's measurements predict fastest.

A kernel that walks sequences chunk by chunk takes `max(a · steps, m · share) + b · CTAs + c`: steps is the length, in
chunks, of the longest chain of work that an SM is given, share what each would have if all had as much, which counts
where device memory is the limit.  The four come from a fit of the tuning database (`qla-tune fit`) where it
has one of every candidate; else the plain rate `a` comes from its best rows and the others are 0.  A schedule that
gives a head to two CTAs has a lower rate and, on a full card, more steps; where that pays follows from the rows, not
from a constant.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .config import Problem
from .db.records import ALL_WORKLOADS, BestRow, CostModel
from .model.features import even_share, num_ctas, steps
from .registry import select
from .resources import is_feasible
from .schedule import Schedule
from .workload import lengths_of


@dataclass(frozen=True)
class Option:
    """A schedule and its time in microseconds: of one step, of one CTA, of a launch whatever it does, and of one step
    where every SM has as many and they share the device memory."""

    schedule: Schedule
    us_per_step: float
    us_per_cta: float = 0.0
    us_constant: float = 0.0
    us_per_share: float = 0.0

    def predict_us(self, problem: Problem, lengths: Sequence[int], sm_count: int) -> float:
        """Time of the kernel on sequences of ``lengths`` tokens."""
        depth = steps(problem, self.schedule, lengths, sm_count)
        ctas = num_ctas(problem, self.schedule, lengths) if self.us_per_cta else 0
        share = even_share(problem, self.schedule, lengths, sm_count) if self.us_per_share else 0.0
        return self.time_us(depth, ctas, share)

    def time_us(self, depth: float, ctas: int, share: float = 0.0) -> float:
        """Time at so many steps on the busiest SM, so many CTAs, and so many steps an SM on average."""
        return self.chained_us(depth, ctas, share) + self.us_constant

    def chained_us(self, depth: float, ctas: int, share: float = 0.0) -> float:
        """The same behind another kernel, during whose end it is launched and fills its pipeline."""
        alone, shared = self.us_per_step * depth, self.us_per_share * share
        return (alone if alone > shared else shared) + self.us_per_cta * ctas


def options(problem: Problem, rows: Iterable[BestRow], fits: Iterable[CostModel] = ()) -> tuple[Option, ...]:
    """The schedules that won a workload, and the default they were raced against, each with its fit or its mean rate.

    rows: of one sweep, of this problem or of its nearest neighbour.  fits: of `Database.fits`, the preferred first;
    used only where every schedule has one of the rows' own template source, because a fit and a plain rate do not
    compare.  Schedules infeasible for ``problem`` are left out.
    """
    rates: dict[Schedule, list[float]] = {}
    digests: dict[str, str] = {}
    for row in rows:
        if row.workload == ALL_WORKLOADS:
            continue
        lengths = lengths_of(row.workload)
        default = select(row.problem).default(row.problem)
        digests[row.schedule.template] = row.template_digest
        for schedule, median_us in ((row.schedule, row.median_us), (default, row.default_median_us)):
            if median_us is not None:
                depth = steps(row.problem, schedule, lengths, row.environment.sm_count)
                rates.setdefault(schedule, []).append(median_us / depth)
    feasible = [schedule for schedule in rates if is_feasible(problem, schedule)]
    fitted: dict[Schedule, CostModel] = {}
    for fit in fits:
        if fit.form == "work" and digests.get(fit.schedule.template) == fit.template_digest:
            fitted.setdefault(fit.schedule, fit)
    if all(schedule in fitted for schedule in feasible):
        return tuple(Option(schedule, *fitted[schedule].coefficients) for schedule in feasible)
    return tuple(Option(schedule, statistics.fmean(rates[schedule])) for schedule in feasible)


def choose(
    problem: Problem, candidates: Sequence[Option], lengths: Sequence[int], sm_count: int, fallback: Schedule
) -> Schedule:
    """The candidate predicted fastest on ``lengths``; ``fallback`` where there is none or nothing to predict."""
    best = min(candidates, key=lambda o: o.predict_us(problem, lengths, sm_count), default=None)
    return fallback if best is None or not any(lengths) else best.schedule
