"""Times of whole splits: the three kernels of one cut added up, as rows of the one-wave form.

The form T = λ₁ L + λ₂ N/L + λ₀ describes sequences of N chunks in segments of L as long as all CTAs run at once, so
only such rows are made, and only of gates with the default share of windows, because λ₂ is mostly the scan of the heads
that have none.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..config import KERNEL_FIELDS, SPLIT_KERNELS, Problem
from ..db.lookup import is_current
from ..schedule import Schedule
from ..segments import least_segment_chunks
from ..workload import DECAYING_PERCENT, parse, workload_of
from .features import Split, longest_segment, num_busy_ctas
from .observation import Observation


@dataclass(frozen=True)
class SplitTime:
    """A whole split on one workload: chunks of its longest segment and of a sequence, and the rows of its kernels."""

    segment_chunks: int
    chunks: int
    parts: tuple[Observation, ...]

    @property
    def time_us(self) -> float:
        return sum(part.time_us for part in self.parts)

    @property
    def forward(self) -> Observation:
        """The row of `segment_forward`, whose problem and schedule name the split."""
        return self.parts[-1]


def split_times(found: Iterable[Observation]) -> dict[tuple[Problem, Schedule], list[SplitTime]]:
    """The one-wave rows of every operator, by problem and schedule of its `segment_forward`.

    Each kernel counts with one schedule and source: of the source as it is now, that measured on most workloads and
    then the fastest.  An operator with no row of one of the kernels has no entry.
    """
    rows: dict[Problem, list[Observation]] = {}
    for o in found:
        if o.problem.kernel in SPLIT_KERNELS:
            rows.setdefault(o.problem, []).append(o)
    times = {}
    for problem in rows:
        of_kernels = [rows.get(problem_as(problem, kernel), []) for kernel in SPLIT_KERNELS]
        if problem.kernel == "segment_forward" and all(of_kernels):
            environment = _one_environment(of_kernels[-1])
            chosen = [_one_schedule([o for o in of if o.environment == environment]) for of in of_kernels]
            if all(chosen):
                times[problem, next(iter(chosen[-1].values())).schedule] = _one_wave(chosen)
    return times


def problem_as(problem: Problem, kernel: str) -> Problem:
    """The problem of another kernel of the same operator, one that depends on nothing that ``problem`` lacks."""
    kept = {name: getattr(problem, name) for name in KERNEL_FIELDS[kernel]}
    return Problem(kernel=kernel, arch=problem.arch, chunk_size=problem.chunk_size, **kept)


def _one_environment(rows: Sequence[Observation]):
    return max((o.environment for o in rows), key=lambda e: (sum(o.environment == e for o in rows), e.id))


def _one_schedule(rows: Sequence[Observation]) -> dict[str, Observation]:
    """Rows by workload of one schedule and source."""
    groups: dict[tuple[Schedule, str], dict[str, Observation]] = {}
    for o in rows:
        groups.setdefault((o.schedule, o.template_digest), {})[o.workload] = o

    def preference(key: tuple[Schedule, str]) -> tuple:
        of_key = list(groups[key].values())
        mean_us = statistics.geometric_mean(o.time_us for o in of_key)
        return bool(is_current(of_key[0])), len(of_key), -mean_us, str(key)

    return groups[max(groups, key=preference)] if groups else {}


def _one_wave(chosen: Sequence[Mapping[str, Observation]]) -> list[SplitTime]:
    found = []
    for workload in chosen[-1]:
        parts = tuple(of[workload] for of in chosen if workload in of)
        asked, problem = parse(workload), parts[-1].problem
        chunks = {-(-length // problem.chunk_size) for length in asked.lengths}
        if len(parts) == len(chosen) and len(chunks) == 1 and asked.decaying_percent == DECAYING_PERCENT:
            if all(_runs_at_once(o) for o in parts):
                longest = longest_segment(max(chunks), asked.segment_chunks, least_segment_chunks(problem))
                found.append(SplitTime(longest, max(chunks), parts))
    return found


def _runs_at_once(o: Observation) -> bool:
    asked = workload_of(o.problem.kernel, o.workload)
    return num_busy_ctas(o.problem, o.schedule, asked.lengths, Split.of(asked)) <= o.environment.sm_count
