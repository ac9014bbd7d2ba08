"""Which schedule answers a problem, and how it is known: `choose` returns a `Match` and never searches or measures.

Order: an exact row, an exact row of an older template (``stale``), the nearest row by heads, the template's default.
Everything but the head counts must match: kernel, arch, chunk size, dtypes, head dims, state layout.  A row is used
only if its schedule is feasible for what is asked, so a row of another shape cannot select a kernel that cannot run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .. import registry
from ..config import Problem
from ..errors import ConfigError
from ..resources import is_feasible
from ..schedule import Schedule
from .records import ALL_WORKLOADS, BestRow, CostModel

#: Rows farther than this are not used: 4 is, for example, a sixteenth of both head counts.
MAX_DISTANCE = 4.0
#: What a factor in the value heads per key head counts beside one in the value heads: twice where a CTA has the value
#: heads of a key head together, half where each has its own; by the recorded sweeps of seventeen head configurations
#: (`tools/nearest_study.py`).
KEY_HEAD_WEIGHT, VALUE_HEAD_WEIGHT = 2.0, 0.5
KEY_HEAD_KERNELS = ("kkt_inverse", "backward_grad")
KINDS = ("exact", "stale", "nearest", "default")


class TuningWarning(UserWarning):
    """A tuned row was used although a better answer can be had by tuning."""


@dataclass(frozen=True)
class Match:
    """A schedule and where it came from.

    kind: one of `KINDS`.  layer: ``user``, ``shipped``, or None for the default.  distance: see `distance`.
    stale: the row was measured with an older source of its template.  passed_over: rows that would have been preferred,
    but whose schedule breaks a rule for this problem.
    """

    problem: Problem
    schedule: Schedule
    kind: str
    layer: str | None = None
    row: BestRow | None = None
    distance: float = 0.0
    stale: bool = False
    passed_over: int = 0

    def __str__(self) -> str:
        if self.row is None:
            why = f"nothing tuned within distance {MAX_DISTANCE:g}"
            if self.passed_over:
                why = f"{_rows(self.passed_over)} within distance {MAX_DISTANCE:g}, but none may run for this problem"
            return f"default of {self.schedule.template} ({why})"
        parts = [f"{self.kind} row of the {self.layer} database"]
        if self.distance:
            parts.append(f"distance {self.distance:.2f} ({heads_of(self.row.problem)} for {heads_of(self.problem)})")
        if self.stale and self.kind != "stale":
            parts.append("template changed since")
        parts.append(f"workload {self.row.workload}, {self.row.median_us:.1f} us over {self.row.trials} trials")
        if self.row.gain is not None:
            parts.append(f"{self.row.gain:.2f}x the default")
        if self.passed_over:
            parts.append(f"{_rows(self.passed_over)} passed over that may not run for this problem")
        return ", ".join([*parts, str(self.row.environment)])


def _rows(count: int) -> str:
    return f"{count} tuned row{'s' * (count > 1)}"


def heads_of(problem: Problem) -> str:
    """``H:HV``; ``HV:HV`` of a kernel that knows nothing of key heads."""
    return f"{problem.num_heads or problem.num_value_heads}:{problem.num_value_heads}"


def family(problem: Problem) -> Problem:
    """The part of a problem that must match exactly."""
    return replace(problem, num_heads=None, num_value_heads=None)


def distance(a: Problem, b: Problem) -> float:
    """|Δ log2| of the value heads, and that of the value heads per key head by its weight (`KEY_HEAD_WEIGHT`); infinite
    where one problem has a count that the other lacks."""
    if (a.num_heads is None, a.num_value_heads is None) != (b.num_heads is None, b.num_value_heads is None):
        return math.inf
    total = 0.0
    if a.num_value_heads is not None:
        total += abs(math.log2(a.num_value_heads / b.num_value_heads))
    if a.num_heads is not None:
        weight = KEY_HEAD_WEIGHT if a.kernel in KEY_HEAD_KERNELS else VALUE_HEAD_WEIGHT
        total += weight * abs(math.log2(a.group_size / b.group_size))
    return total


def choose(problem: Problem, rows: Iterable[tuple[str, BestRow]], workload: str | None = None) -> Match:
    """The best answer for a problem among (layer, row), the user's layer first.

    workload: prefer rows measured on it; otherwise rows over all workloads come first, then those of most trials.
    Raises UnsupportedError when no template answers the problem at all.
    """
    near = ranked(problem, rows, workload)
    for passed_over, match in enumerate(near):
        if is_feasible(problem, match.schedule):
            return replace(match, passed_over=passed_over)
    return Match(problem, registry.select(problem).default(problem), "default", passed_over=len(near))


def ranked(problem: Problem, rows: Iterable[tuple[str, BestRow]], workload: str | None = None) -> list[Match]:
    """Every row near enough to answer a problem, best answer first; whether it can run there is not asked."""
    found = [_match(problem, layer, row) for layer, row in rows if family(row.problem) == family(problem)]
    found = [m for m in found if m is not None and m.distance <= MAX_DISTANCE]
    return sorted(found, key=lambda m: _preference(m, workload))


def is_current(row: BestRow | CostModel) -> bool | None:
    """Whether a row was measured with its template's source as it is now; None where there is no such template."""
    try:
        return registry.digest(row.schedule.template) == row.template_digest
    except ConfigError:
        return None


def _match(problem: Problem, layer: str, row: BestRow) -> Match | None:
    current = is_current(row)
    if current is None:  # the row's template is not part of this version: no answer for us
        return None
    stale = not current
    apart = distance(problem, row.problem)
    kind = "nearest" if apart else "stale" if stale else "exact"
    return Match(problem, row.schedule, kind, layer, row, apart, stale)


def _preference(match: Match, workload: str | None) -> tuple:
    row = match.row
    return (
        match.distance,
        match.stale,
        match.layer != "user",
        row.workload != workload if workload else row.workload != ALL_WORKLOADS,
        row.workload != ALL_WORKLOADS,
        -row.trials,
        row.workload,
        heads_of(row.problem),
    )


def command(problem: Problem, *others: Problem) -> str:
    """The qla-tune command that measures a problem here, and others of its family with it."""
    heads = ",".join(dict.fromkeys(heads_of(p) for p in (problem, *others)))
    parts = ["qla-tune", "--arch", problem.arch, "--kernels", problem.kernel, "--heads", heads]
    if problem.head_dim_k:
        key, value = problem.head_dim_k, problem.head_dim_v or problem.head_dim_k
        parts += ["--head-dim", str(key) if key == value else f"{key}:{value}"]
    if problem.dtype not in (None, "bfloat16"):
        parts += ["--dtype", problem.dtype]
    if problem.state_dtype not in (None, "float32"):
        parts += ["--state-dtype", problem.state_dtype]
    if problem.state_v_first:
        parts.append("--state-v-first")
    for option, gate_dtype in (("--gate-dtype", problem.gate_dtype), ("--beta-dtype", problem.beta_dtype)):
        if gate_dtype not in (None, "float32"):
            parts += [option, gate_dtype]
    if problem.chunk_size != 64:
        parts += ["--chunk-size", str(problem.chunk_size)]
    return " ".join(parts)


_warned: set[tuple] = set()


def warn_if_stale(match: Match) -> None:
    """One warning per (problem, row digest): what was used, and the command that measures it again."""
    key = (match.problem, match.row and match.row.template_digest)
    if match.stale and key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"the tuned schedule {match.schedule} for {match.problem.kernel}, heads {heads_of(match.problem)} was "
            f"measured with an older source of its template and is used anyway; measure it again: "
            f"{command(match.problem)}",
            TuningWarning,
            stacklevel=3,
        )
