"""What ``qla-tune`` tunes when nothing is named: the shipped list of operators and workloads, most valuable first.

Value is the order of `OPERATORS`: heads of the largest models first, at the tensor-parallel degrees that they are
served with, then smaller ones, then other head dims.  Each operator brings its kernels, the heaviest first.  What is
untuned or stale goes before what a current row already answers; what this database has measured whole goes last.

A budget takes the head of that list, as far as its estimated time fits: a problem that cannot be searched properly is
better left to the next run than given a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import registry
from ..config import BACKWARD_KERNELS, DEFAULT_CHUNK_SIZE, FORWARD_KERNELS, SPLIT_KERNELS, OpConfig, Problem
from ..db import Database
from ..db.lookup import is_current
from ..db.records import Trial
from ..workload import suited
from .finals import FINALISTS, ROUNDS
from .space import Space, enumerate_space, plan_problems

#: Long and short: a batch that fills the card, one sequence that leaves most of it idle, and both of them short.
SHIPPED_WORKLOADS = ("8192x4", "1x8192", "1024x8", "1x2048")
#: The same for the kernels of a split: long sequences in few and in many segments, on gates of which most heads forget,
#: none does (~0) or all do (~100), several sequences, and ragged ones.
SHIPPED_SPLIT_WORKLOADS = (
    *(f"1x32768/{chunks}" for chunks in (16, 32, 64, 128, 256)),
    *(f"1x8192/{chunks}" for chunks in (8, 16, 32, 64)),
    *(f"{cut}~{percent}" for percent in (0, 100) for cut in ("1x32768/32", "1x32768/64", "1x8192/16")),
    "8192x4/32",
    "16384+8192+1024*8/32",
)
#: Value heads of the operators that those kernels are tuned for: more fill the card without being split.
MOST_SPLIT_HEADS = 32
SHIPPED_BUDGET_S = 7200.0


@dataclass(frozen=True)
class Operator:
    """Heads and head dims of the list, and which models have them."""

    heads: tuple[int, int]
    models: str
    head_dims: tuple[int, int] = (128, 128)


OPERATORS = (
    Operator((16, 64), "Qwen3.5-397B TP 1"),
    Operator((8, 32), "Qwen3.5-397B TP 2"),
    Operator((4, 16), "Qwen3.5-397B TP 4"),
    Operator((2, 8), "Qwen3.5-397B TP 8"),
    Operator((16, 48), "Qwen3.5/3.6-27B TP 1"),
    Operator((16, 32), "Qwen3-Next-80B, Qwen3.5/3.6-35B TP 1"),
    Operator((8, 16), "Qwen3-Next-80B, Qwen3.5/3.6-35B TP 2"),
    Operator((8, 24), "Qwen3.5/3.6-27B TP 2"),
    Operator((4, 8), "Qwen3-Next-80B, Qwen3.5/3.6-35B TP 4"),
    Operator((4, 12), "Qwen3.5/3.6-27B TP 4"),
    Operator((2, 4), "Qwen3-Next-80B, Qwen3.5/3.6-35B TP 8"),
    Operator((2, 6), "Qwen3.5/3.6-27B TP 8"),
    Operator((16, 16), "Qwen3.5-2B TP 1"),
    Operator((32, 32), "as many key heads as value heads"),
    Operator((8, 8), "Qwen3.5-2B TP 2"),
    Operator((4, 4), "Qwen3.5-2B TP 4"),
    Operator((2, 2), "Qwen3.5-2B TP 8"),
    *(
        Operator(heads, "other head dims", dims)
        for dims in ((128, 256), (64, 64), (64, 128), (128, 64), (64, 256))
        for heads in ((16, 32), (4, 16))
    ),
)


@dataclass(frozen=True)
class Pace:
    """Seconds that tuning takes: a kernel to compile, a trial to verify and measure, a finalist in one round."""

    compile_s: float = 15.0
    trial_s: float = 2.0
    race_s: float = 0.3


@dataclass(frozen=True)
class Planned:
    """One problem of a plan.  points: of its space, or fewer under a trial limit.  left: trials still to make, over
    all workloads.  estimate_s: what they take.  state: ``untuned``, ``stale``, ``tuned`` or ``done``.
    fits: whether it is within the budget."""

    problem: Problem
    points: int
    left: int
    estimate_s: float
    state: str
    fits: bool = True


def shipped_problems(
    arch: str,
    dtype: str = "bfloat16",
    state_dtype: str = "float32",
    state_v_first: bool = False,
    gate_dtype: str = "float32",
    beta_dtype: str = "float32",
    kernels: Sequence[str] | None = None,
    chunk_sizes: Iterable[int] | None = None,
) -> list[Problem]:
    """The problems of the list, in its order; left out are those that no template answers, and the kernels of a split
    for more heads than `MOST_SPLIT_HEADS`.  kernels: the forward's, and behind all of these the backward's, if None."""
    configs = [
        OpConfig(*op.heads, *op.head_dims, dtype, state_dtype, state_v_first, arch, False, gate_dtype, beta_dtype)
        for op in OPERATORS
    ]
    found = plan_problems(configs, FORWARD_KERNELS if kernels is None else kernels, chunk_sizes)
    if kernels is None and any(registry.candidates(config.problem("backward_grad")) for config in configs):
        if chunk_sizes is None or DEFAULT_CHUNK_SIZE in chunk_sizes:  # the only one that it knows
            found += plan_problems(configs, BACKWARD_KERNELS, [DEFAULT_CHUNK_SIZE])
    return [p for p in found if p.kernel not in SPLIT_KERNELS or p.num_value_heads <= MOST_SPLIT_HEADS]


def pace_of(trials: Iterable[Trial]) -> Pace:
    """Medians of this database's own trials, where it has some."""
    trials = [t for t in trials if t.status == "ok"]
    times = [t.times for t in trials if t.phase == "search"]
    compiled = [t.compile_s for t in times if t.compile_s > 1.0]  # less is a kernel found in the cache
    return Pace(
        statistics.median(compiled) if compiled else Pace.compile_s,
        statistics.median(t.verify_s + t.measure_s + t.overhead_s for t in times) if times else Pace.trial_s,
    )


def planned(
    problems: Sequence[Problem],
    workloads: Sequence[str],
    db: Database,
    budget_s: float | None = None,
    max_trials: int | None = None,
    jobs: int = 1,
    cards: int = 1,
) -> list[Planned]:
    """The problems in the order to tune them, with estimates; those beyond the budget at the end, marked.

    The first always fits, however small the budget.
    """
    by_problem: dict[Problem, list[Trial]] = {}
    trials = db.trials()
    for trial in trials:
        by_problem.setdefault(trial.problem, []).append(trial)
    pace = pace_of(trials)
    found = []
    for problem in problems:
        space = enumerate_space(problem)
        points = min(len(space.points), max_trials or len(space.points))
        chosen = suited(problem.kernel, workloads)
        known = _measured(by_problem.get(problem, ()), space, chosen)
        left = sum(max(0, points - len(schedules)) for schedules in known.values())
        fresh = max(0, points - len(set().union(*known.values())))
        race_s = len(chosen) * (FINALISTS + 1) * ROUNDS * pace.race_s
        estimate_s = max(fresh * pace.compile_s / jobs, left * pace.trial_s / cards) + race_s / cards
        found.append(Planned(problem, points, left, estimate_s, _state(db, problem, left)))
    order = {"untuned": 0, "stale": 0, "tuned": 1, "done": 2}
    return _within(sorted(found, key=lambda p: order[p.state]), budget_s)


def _measured(trials: Iterable[Trial], space: Space, workloads: Sequence[str]) -> dict[str, set]:
    """Points by workload that need no trial: known with the source as it is now."""
    points, known = set(space.points), {workload: set() for workload in workloads}
    for trial in trials:
        if trial.workload in known and trial.phase == "search" and trial.schedule in points:
            if trial.template_digest == registry.digest(trial.schedule.template):
                known[trial.workload].add(trial.schedule)
    return known


def _state(db: Database, problem: Problem, left: int) -> str:
    rows = [match.row for match in db.near(problem) if match.row.problem == problem]
    if not rows:
        return "untuned"
    if not any(map(is_current, rows)):
        return "stale"
    return "tuned" if left else "done"


def _within(found: Sequence[Planned], budget_s: float | None) -> list[Planned]:
    if budget_s is None:
        return list(found)
    kept, taken = [], 0.0
    for i, one in enumerate(found):
        taken += one.estimate_s
        kept.append(one if i == 0 or taken <= budget_s else Planned(**{**vars(one), "fits": False}))
    return kept
