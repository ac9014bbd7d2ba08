"""Why a schedule answers a problem: the row and its rivals, what the rules rejected, and what the compiler said.

`explain` measures and compiles nothing.  Times come from the trials behind the row: the user's, or for a shipped row
those of the shipped recordings.
"""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..artifacts import ArtifactStore
from ..build import flags
from ..config import Problem
from ..db import Database
from ..db.lookup import Match, TuningWarning
from ..db.records import ALL_WORKLOADS, BestRow, Trial
from ..errors import CacheError, ConfigError
from ..resources import estimate, is_feasible
from ..schedule import Schedule
from ..spec import KernelSpec
from .replay import shipped_trials
from .space import enumerate_space

RUNNERS_UP = 5
OTHER_ROWS = 3


@dataclass(frozen=True)
class Runner:
    """A schedule of the sweep behind a row: its time (geometric mean over the row's workloads), and what ptxas said."""

    schedule: Schedule
    time_us: float
    ratio: float
    registers: int | None
    smem_bytes: int | None
    local_bytes: int | None


@dataclass(frozen=True)
class PassedOver:
    """Rows that rank before the answer but cannot run there, for one reason: the nearest, and how many there are."""

    reason: str
    nearest: Match
    rows: int


@dataclass
class Explanation:
    """A `Match` and why it is the answer.

    passed_over: better ranked, but infeasible.  others: the next answers, had this row not been there.  runners_up: of
    the sweep behind the row, the fastest first, the answer among them.  points, rejected: this version's space, and
    what its named rules reject.  statuses: of the row's search trials.  spilling: how many of them use local memory.
    static: what is declared for the schedule, and the compiler's report of it where one is in the kernel cache.
    """

    match: Match
    passed_over: list[PassedOver] = field(default_factory=list)
    others: list[Match] = field(default_factory=list)
    runners_up: list[Runner] = field(default_factory=list)
    workloads: list[str] = field(default_factory=list)
    points: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    spilling: int = 0
    static: dict = field(default_factory=dict)


def explain(
    db: Database,
    problem: Problem,
    workload: str | None = None,
    store: ArtifactStore | None = None,
    recorded: Callable[[str], Sequence[Trial]] = shipped_trials,
) -> Explanation:
    """Everything known about a lookup.  recorded: trials behind the shipped rows of an arch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)  # the explanation says it
        found = Explanation(db.lookup(problem, workload))
    space = enumerate_space(problem)
    found.points, found.rejected = len(space.points), dict(sorted(space.rejected.items(), key=lambda i: (-i[1], i[0])))
    _rank(found, db.near(problem, workload))
    found.static = _static(problem, found.match.schedule, store or ArtifactStore())
    row = found.match.row
    if row is not None:
        trials = db.trials(row.problem) if found.match.layer == "user" else recorded(row.problem.arch)
        trials = [t for t in trials if t.problem == row.problem and t.environment == row.environment]
        found.workloads = _workloads(row, db.siblings(found.match))
        _race(found, [t for t in trials if t.workload in found.workloads])
    return found


def _rank(found: Explanation, near: Sequence[Match]) -> None:
    """Rows before the answer were passed over; of those after it, the first with schedules of their own."""
    answer = found.match
    place = next((i for i, match in enumerate(near) if match.row == answer.row), len(near))
    groups: dict[str, list[Match]] = {}
    for match in near[:place]:
        groups.setdefault(str(is_feasible(answer.problem, match.schedule)), []).append(match)
    found.passed_over = [PassedOver(reason, group[0], len(group)) for reason, group in groups.items()]
    seen = {answer.schedule}
    for match in near[place + 1 :]:
        if (
            match.schedule not in seen
            and len(found.others) < OTHER_ROWS
            and is_feasible(answer.problem, match.schedule)
        ):
            seen.add(match.schedule)
            found.others.append(match)


def _workloads(row: BestRow, siblings: Sequence[BestRow]) -> list[str]:
    if row.workload != ALL_WORKLOADS:
        return [row.workload]
    return [s.workload for s in siblings if s.workload != ALL_WORKLOADS]


def _race(found: Explanation, trials: Sequence[Trial]) -> None:
    digests = {found.match.row.schedule.template: found.match.row.template_digest}
    for trial in trials:  # other templates: their newest source
        if trial.schedule.template != found.match.row.schedule.template:
            digests[trial.schedule.template] = trial.template_digest
    trials = [t for t in trials if t.template_digest == digests[t.schedule.template]]
    search = {(t.schedule, t.workload): t for t in trials if t.phase == "search"}
    found.statuses = dict(Counter(t.status for t in search.values()))
    found.spilling = sum(bool(t.local_bytes) for t in search.values())
    # A race says more than the search: its medians were taken in turns.
    last = {**search, **{(t.schedule, t.workload): t for t in trials if t.phase == "final"}}
    runners = []
    for schedule in dict.fromkeys(s for s, _ in last):
        ran = [last.get((schedule, workload)) for workload in found.workloads]
        if ran and all(t is not None and t.status == "ok" for t in ran):
            runners.append((_mean([t.median_us for t in ran]), ran[0]))
    runners.sort(key=lambda r: (r[0], str(r[1].schedule)))
    won = next((time_us for time_us, t in runners if t.schedule == found.match.row.schedule), None)
    base = won or found.match.row.median_us
    found.runners_up = [
        Runner(t.schedule, time_us, time_us / base, t.registers, t.smem_bytes, t.local_bytes)
        for i, (time_us, t) in enumerate(runners)
        if i < RUNNERS_UP or t.schedule == found.match.row.schedule
    ]


def _mean(times_us: Sequence[float]) -> float:
    return times_us[0] if len(times_us) == 1 else statistics.geometric_mean(times_us)


def _static(problem: Problem, schedule: Schedule, store: ArtifactStore) -> dict:
    cost = estimate(problem, schedule)
    static = {
        "smem_bytes": cost.padded_smem_bytes,
        "threads": cost.threads,
        "roles": {r.name: {"warps": r.warps, "registers": r.registers} for r in cost.roles},
        "compiled": None,
    }
    try:
        spec = KernelSpec(problem, schedule)
        artifact = store.get(spec, flags(spec))
    except (CacheError, ConfigError, OSError):  # a cache that cannot be used tells nothing; doctor says why
        return static
    if artifact is not None:
        names = ("registers", "spill_bytes", "local_bytes", "smem_bytes", "role_registers")
        static["compiled"] = {name: artifact.report.get(name) for name in names}
    return static
