"""The least time that a launch can take, from its declared work and the card's ceilings.

A measured time below it is no record but a mistake: an event read too early, a graph that did not run, work that was
left out.  The ceilings are of all SMs at the highest clock, which nothing reaches, so that a right
time is never doubted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import Problem
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


def floor_us(problem: Problem, schedule: Schedule, lengths: Sequence[int]) -> float:
    """Time in µs below which a launch cannot be; 0 where the arch has no ceiling here."""
    ceiling = CEILINGS.get(problem.arch)
    if ceiling is None:
        return 0.0
    work = get_template(schedule.template).work(problem, schedule)
    tokens_of_chunks = sum(lengths) / problem.chunk_size  # partial chunks count as what they hold
    heads = tokens_of_chunks * problem.num_value_heads
    written = heads * work.bytes_written
    compute = heads * work.flops / (ceiling.tflops * 1e6)
    memory = max(0.0, written - CACHED_BYTES) / (ceiling.tbps * 1e6)
    return max(compute, memory)
