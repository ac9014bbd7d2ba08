"""What the time of a launch depends on: chunks on the busiest SM (depth), and CTAs.

A kernel that walks sequences chunk by chunk (`fused_forward`) has a chain of work per (sequence, value head); the
others do every chunk by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Problem
from ..schedule import Schedule

SEQUENTIAL_KERNELS = ("fused_forward",)


def ctas_per_head(schedule: Schedule) -> int:
    """CTAs that share one (sequence, value head)."""
    return schedule.params().get("dv_split", 1)


def steps(problem: Problem, schedule: Schedule, lengths: Sequence[int], sm_count: int) -> float:
    """Chunks on the busiest SM: whole waves where all sequences are equally long, else the larger of the longest
    sequence and an even share of all work."""
    chunks = _chunks(problem, lengths)
    if not chunks:
        return 0.0
    if problem.kernel not in SEQUENTIAL_KERNELS:
        return float(_heads_per_cta(schedule) * -(-num_ctas(problem, schedule, lengths) // sm_count))
    ctas = problem.num_value_heads * ctas_per_head(schedule)
    longest = max(chunks)
    if min(chunks) == longest:
        return float(longest * -(-len(chunks) * ctas // sm_count))
    return max(float(longest), sum(chunks) * ctas / sm_count)


def num_ctas(problem: Problem, schedule: Schedule, lengths: Sequence[int]) -> int:
    """CTAs that have work to do."""
    chunks = _chunks(problem, lengths)
    if problem.kernel in SEQUENTIAL_KERNELS:
        return len(chunks) * problem.num_value_heads * ctas_per_head(schedule)
    return -(-sum(chunks) * problem.num_value_heads // _heads_per_cta(schedule))


def _chunks(problem: Problem, lengths: Sequence[int]) -> list[int]:
    return [-(-length // problem.chunk_size) for length in lengths if length > 0]


def _heads_per_cta(schedule: Schedule) -> int:
    return schedule.params().get("value_heads_per_cta", 1)
