"""Compiles the points of a plan where no GPU is: the artifacts wait in the cache for a machine that can measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from ..config import Problem
from ..spec import KernelSpec
from .compile_pool import Compiled, CompilePool
from .search import Exhaustive
from .space import enumerate_space


@dataclass
class CompileReport:
    """What was compiled, in order of finishing; ``left`` kernels were not when the budget ended."""

    compiled: list[tuple[KernelSpec, Compiled]] = field(default_factory=list)
    left: int = 0
    stopped: str = ""


def compile_points(
    problems: Sequence[Problem],
    pool: CompilePool,
    budget_s: float | None = None,
    max_points: int | None = None,
    seed: int = 0,
    on_done: Callable[[KernelSpec, Compiled, int], None] = lambda spec, compiled, left: None,
) -> CompileReport:
    """Compile the defaults of all problems first, then the other feasible points in seeded order.

    max_points: per problem.  CompilerMissingError when there is no nvcc.
    """
    orders = []
    for problem in problems:
        strategy = Exhaustive(enumerate_space(problem).points, seed)
        points = iter(strategy.ask, None)
        orders.append([KernelSpec(problem, point) for _, point in zip(range(max_points or 1 << 30), points)])
    specs = [spec for order in orders for spec in order[:1]] + [spec for order in orders for spec in order[1:]]
    end = None if budget_s is None else time.monotonic() + budget_s
    report = CompileReport()
    waiting: dict[Future, KernelSpec] = {pool.submit(spec): spec for spec in specs}
    try:
        while waiting and (end is None or time.monotonic() < end):
            left_s = None if end is None else max(0.0, end - time.monotonic())
            for future in wait(waiting, timeout=left_s, return_when=FIRST_COMPLETED).done:
                spec = waiting.pop(future)
                report.compiled.append((spec, future.result()))
                on_done(spec, future.result(), len(waiting))
    except KeyboardInterrupt:
        report.stopped = "interrupted"
    report.left = len(waiting)
    if waiting and not report.stopped:
        report.stopped = "budget"
    return report
