"""Which tuned schedule of the fused forward answers a call: the one that the database's measurements predict fastest.

A kernel that walks sequences chunk by chunk takes `rate · steps`: steps is the length, in chunks, of the longest chain
of work that an SM is given, and the rate comes from the rows of the tuning database.  A schedule that gives a head to
two CTAs has a lower rate and, on a full card, more steps; where that pays follows from the rows, not from a constant.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .config import Problem
from .db.records import ALL_WORKLOADS, BestRow
from .registry import select
from .resources import is_feasible
from .schedule import Schedule
from .workload import lengths_of


@dataclass(frozen=True)
class Option:
    """A schedule and the measured time of one of its steps in microseconds."""

    schedule: Schedule
    us_per_step: float

    def predict_us(self, problem: Problem, lengths: Sequence[int], sm_count: int) -> float:
        """Time of the kernel on sequences of ``lengths`` tokens."""
        return self.us_per_step * steps(problem, self.schedule, lengths, sm_count)


def ctas_per_head(schedule: Schedule) -> int:
    """CTAs that share one (sequence, value head)."""
    return schedule.params().get("dv_split", 1)


def steps(problem: Problem, schedule: Schedule, lengths: Sequence[int], sm_count: int) -> float:
    """Chunks on the busiest SM: whole waves where all sequences are equally long, else the larger of the longest
    sequence and an even share of all work."""
    chunks = [-(-length // problem.chunk_size) for length in lengths if length > 0]
    if not chunks:
        return 0.0
    ctas = problem.num_value_heads * ctas_per_head(schedule)
    longest = max(chunks)
    if min(chunks) == longest:
        return float(longest * -(-len(chunks) * ctas // sm_count))
    return max(float(longest), sum(chunks) * ctas / sm_count)


def options(problem: Problem, rows: Iterable[BestRow]) -> tuple[Option, ...]:
    """The schedules that won a workload, and the default they were raced against, each with its mean rate.

    rows: of one sweep, of this problem or of its nearest neighbour.  Schedules infeasible for ``problem`` are left out.
    """
    rates: dict[Schedule, list[float]] = {}
    for row in rows:
        if row.workload == ALL_WORKLOADS:
            continue
        lengths = lengths_of(row.workload)
        default = select(row.problem).default(row.problem)
        for schedule, median_us in ((row.schedule, row.median_us), (default, row.default_median_us)):
            if median_us is not None:
                depth = steps(row.problem, schedule, lengths, row.environment.sm_count)
                rates.setdefault(schedule, []).append(median_us / depth)
    return tuple(
        Option(schedule, statistics.fmean(found))
        for schedule, found in rates.items()
        if is_feasible(problem, schedule)
    )


def choose(
    problem: Problem, candidates: Sequence[Option], lengths: Sequence[int], sm_count: int, fallback: Schedule
) -> Schedule:
    """The candidate predicted fastest on ``lengths``; ``fallback`` where there is none or nothing to predict."""
    best = min(candidates, key=lambda o: o.predict_us(problem, lengths, sm_count), default=None)
    return fallback if best is None or not any(lengths) else best.schedule
