"""The points a sweep may try: every feasible schedule of every template that answers a problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .. import registry
from ..arch import get_arch
from ..config import CHUNK_SIZES, DEFAULT_CHUNK_SIZE, FORWARD_KERNELS, KERNELS, OpConfig, Problem
from ..resources import is_feasible
from ..schedule import Schedule


@dataclass(frozen=True)
class Space:
    """Feasible points, the default first, and how many of the others each named rule rejects.

    rejected: points by the first rule that they break, so that the counts add up to ``total - len(points)``.
    """

    problem: Problem
    default: Schedule
    points: tuple[Schedule, ...]
    rejected: dict[str, int]

    @property
    def total(self) -> int:
        return len(self.points) + sum(self.rejected.values())

    def restricted(self, points: Iterable[Schedule]) -> Space:
        """The same space with only the given points, for a recorded sweep."""
        kept = set(points)
        return replace(self, points=tuple(p for p in self.points if p in kept))


def enumerate_space(problem: Problem) -> Space:
    """All points of ``registry.candidates(problem)``; UnsupportedError when no template answers the problem."""
    default = registry.select(problem).default(problem)
    feasible, rejected = [default], Counter()
    for template in registry.candidates(problem):
        for point in template.points():
            if point == default:
                continue
            verdict = is_feasible(problem, point)
            if verdict:
                feasible.append(point)
            else:
                rejected[verdict.violations[0].rule] += 1
    verdict = is_feasible(problem, default)
    if not verdict:
        feasible.remove(default)
        rejected[verdict.violations[0].rule] += 1
    return Space(problem, default, tuple(feasible), dict(rejected))


def _chunk_sizes(config: OpConfig) -> list[int]:
    """64, and 32 where it is more than a fallback: every kernel has a template made for this arch that offers it."""

    def made_for(chunk_size: int) -> bool:
        found = [registry.candidates(config.problem(kernel, chunk_size)) for kernel in FORWARD_KERNELS]
        return all(any(config.arch in t.preferred for t in templates) for templates in found)

    return [c for c in sorted(CHUNK_SIZES, reverse=True) if c == DEFAULT_CHUNK_SIZE or made_for(c)]


def plan_problems(
    configs: Iterable[OpConfig], kernels: Iterable[str] = FORWARD_KERNELS, chunk_sizes: Iterable[int] | None = None
) -> list[Problem]:
    """The distinct problems of some operators in the order to tune them: heaviest kernel and default chunk first.

    Problems that no template answers are left out, unless that leaves nothing: then `registry.select` says why.
    """
    configs, kernels = list(configs), list(kernels)
    wanted = [
        config.problem(kernel, chunk_size)
        for config in configs
        for chunk_size in (chunk_sizes or _chunk_sizes(config))
        for kernel in sorted(kernels, key=KERNELS.index, reverse=True)
    ]
    wanted = sorted(dict.fromkeys(wanted), key=lambda p: p.chunk_size != DEFAULT_CHUNK_SIZE)
    answered = [p for p in wanted if registry.candidates(p)]
    if wanted and not answered:
        registry.select(wanted[0])
    return answered


def archs_match(problem: Problem, arch: str) -> bool:
    """Whether a card of ``arch`` can run kernels built for the problem."""
    return get_arch(problem.arch) == get_arch(arch)
