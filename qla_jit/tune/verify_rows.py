"""Best rows checked again on the card at hand: still right, and still as fast as the row says?

Each schedule is built (or found in the kernel cache), compared with the float64 reference on fresh data and the edge
cases, timed as a finalist is, and its timed graph checked once more, all in the process that can be killed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..config import Problem
from ..db.lookup import is_current
from ..db.records import ALL_WORKLOADS, BestRow, Trial
from ..resources import is_feasible
from ..schedule import Schedule
from .evaluate import Evaluator
from .finals import ROUNDS
from .worker import WorkerLostError

TOLERANCE = 0.10
#: ok: right, and within the tolerance where it could be compared.  slower, faster: right, but outside of it.  failed: a
#: trial failed.  unusable: no kernel of this version, or a rule rejects it.  unchecked: the time ended before.
STATUSES = ("ok", "faster", "slower", "failed", "unusable", "unchecked")
PROBLEMS = ("slower", "failed", "unusable", "unchecked")


@dataclass(frozen=True)
class Check:
    """One row and what became of it.

    median_us: measured now, as the row's (geometric mean over its workloads); ratio: to the row's median, None where
    they cannot be compared.  error: largest relative error against the reference.  stale: the template's source is
    another one now, so the time is of another kernel than the row's.
    """

    layer: str
    row: BestRow
    stale: bool
    status: str = "unchecked"
    reason: str = ""
    median_us: float | None = None
    ratio: float | None = None
    error: float | None = None
    trials: tuple[Trial, ...] = ()

    @property
    def is_problem(self) -> bool:
        return self.status in PROBLEMS


@dataclass
class Verification:
    """All rows in the order of checking; stopped: empty, ``budget``, ``interrupted``, or why no worker can start."""

    checks: list[Check] = field(default_factory=list)
    stopped: str = ""

    @property
    def ok(self) -> bool:
        return not any(check.is_problem for check in self.checks)


def workloads_of(row: BestRow, layer: str, rows: Iterable[tuple[str, BestRow]]) -> list[str]:
    """What a row was measured on: its workload, or for a row over all those of the sweep that it came from."""
    if row.workload != ALL_WORKLOADS:
        return [row.workload]
    same = (layer, row.problem, row.template_digest)
    found = {r.workload for other, r in rows if (other, r.problem, r.template_digest) == same}
    return sorted(found - {ALL_WORKLOADS})


def verify_rows(
    chosen: Sequence[tuple[str, BestRow]],
    rows: Sequence[tuple[str, BestRow]],
    evaluator: Evaluator,
    tolerance: float = TOLERANCE,
    rounds: int = ROUNDS,
    budget_s: float | None = None,
    on_done: Callable[[Check, int], None] = lambda check, left: None,
) -> Verification:
    """Check (layer, row) pairs.  rows: all rows, among which the workloads of rows over all are found.

    Never raises for what a kernel does; Ctrl-C and a lost card leave the rest unchecked.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    found = Verification([_begin(layer, row) for layer, row in chosen])
    for check in found.checks:
        if check.status == "unchecked":
            evaluator.prepare(check.row.problem, [check.row.schedule])
    measured: dict[tuple[Problem, str, Schedule], Trial] = {}
    try:
        for i, check in enumerate(found.checks):
            if check.status == "unchecked":
                if end is not None and time.monotonic() >= end:
                    found.stopped = "budget"
                    break
                workloads = workloads_of(check.row, check.layer, rows)
                trials = _measure(check.row, workloads, evaluator, rounds, measured)
                found.checks[i] = _judged(check, trials, tolerance, evaluator)
            on_done(found.checks[i], len(found.checks) - i - 1)
    except KeyboardInterrupt:
        found.stopped = "interrupted"
    except WorkerLostError as error:
        found.stopped = str(error)
    return found


def _begin(layer: str, row: BestRow) -> Check:
    current = is_current(row)
    check = Check(layer, row, current is not True)
    if current is None:
        return replace(check, status="unusable", reason=f"this version has no template {row.schedule.template}")
    feasible = is_feasible(row.problem, row.schedule)
    return check if feasible else replace(check, status="unusable", reason=str(feasible))


def _measure(row: BestRow, workloads: Sequence[str], evaluator: Evaluator, rounds: int, measured: dict) -> list[Trial]:
    """One verified trial per workload; rows that share a schedule share its trials."""
    for workload in workloads:
        key = (row.problem, workload, row.schedule)
        if key not in measured:
            (measured[key],) = evaluator.race(row.problem, workload, [row.schedule], rounds)
    return [measured[row.problem, workload, row.schedule] for workload in workloads]


def _judged(check: Check, trials: list[Trial], tolerance: float, evaluator: Evaluator) -> Check:
    row = check.row
    errors = [t.error for t in trials if t.error is not None]
    check = replace(check, trials=tuple(trials), error=max(errors, default=None))
    failed = next((t for t in trials if t.status != "ok"), None)
    if failed is not None:
        return replace(check, status="failed", reason=f"{failed.status} on {failed.workload}: {failed.reason}")
    if not trials:
        return replace(check, status="unusable", reason="no row says on which workloads it was measured")
    median_us = trials[0].median_us
    if len(trials) > 1:
        median_us = statistics.geometric_mean(t.median_us for t in trials)
    check = replace(check, median_us=median_us, status="ok")
    here, there = evaluator.environment, row.environment
    if (here.gpu, here.sm_count) != (there.gpu, there.sm_count):
        return replace(check, reason=f"right; times are not compared, because the row is of {there.gpu}")
    ratio = median_us / row.median_us
    told = f"{median_us:.1f} us against {row.median_us:.1f} us"
    status = "slower" if ratio > 1 + tolerance else "faster" if ratio < 1 / (1 + tolerance) else "ok"
    return replace(check, status=status, ratio=ratio, reason="" if status == "ok" else told)
