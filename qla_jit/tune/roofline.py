"""The least time that a launch can take, from its declared work and the card's ceilings.

A measured time below it is no record but a mistake: an event read too early, a graph that did not run, work that was
left out.  The ceilings are of all SMs at the highest clock, which nothing reaches, so that a right
time is never doubted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Problem
from ..model.features import Split, kernel_groups
from ..registry import get_template
from ..schedule import Schedule

#: Bytes that may be in the L2 cache although it was overwritten before; the largest L2 of our cards is smaller.
CACHED_BYTES = 128 << 20


@dataclass(frozen=True)
class Ceiling:
    """Dense 16-bit tensor TFLOP/s and memory TB/s of the fastest card of an architecture."""

    tflops: float
    tbps: float


CEILINGS = {
    "sm90": Ceiling(1100.0, 4.9),
    "sm100": Ceiling(2700.0, 8.1),
    "sm103": Ceiling(2700.0, 8.1),
    "sm120": Ceiling(600.0, 1.9),
    "sm121": Ceiling(250.0, 0.3),
}


def floor_us(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None = None) -> float:
    """Time in µs below which a launch cannot be; 0 where the arch has no ceiling here.

    split: of the kernels of a split, which need it; more work than it expects only makes them slower.
    """
    ceiling = CEILINGS.get(problem.arch)
    if ceiling is None:
        return 0.0
    work = get_template(schedule.template).work(problem, schedule)
    units = _units(problem, schedule, lengths, split)
    written = units * work.bytes_written
    compute = units * work.flops / (ceiling.tflops * 1e6)
    memory = max(0.0, written - CACHED_BYTES) / (ceiling.tbps * 1e6)
    return max(compute, memory)


def _units(problem: Problem, schedule: Schedule, lengths: Sequence[int], split: Split | None) -> float:
    """How often the work that a template declares is done."""
    if problem.kernel in ("segment_state", "segment_correct"):
        groups = kernel_groups(problem, schedule, lengths, split)
        ctas = problem.head_dim_v // 64  # that share a unit of the declared work
        if problem.kernel == "segment_state":
            ctas = (problem.head_dim_k + problem.head_dim_v) // schedule.params().get("columns", problem.head_dim_v)
        return sum(length * number for length, number in groups) / ctas
    return sum(lengths) / problem.chunk_size * problem.num_value_heads  # partial chunks count as what they hold
