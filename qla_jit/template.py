"""The interface every kernel template implements.

A template is a module of ``qla_jit.templates`` with one `Template` object named ``TEMPLATE``.  Its declarations
(parameters, rules, roles, buffers, work) are readable without TileLang; only ``prim_func`` imports it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .config import Problem
from .schedule import Parameter, Role, Rule, Schedule


@dataclass(frozen=True)
class SharedBuffer:
    """One shared-memory allocation: name, elements over all stages, bytes per element."""

    name: str
    elements: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(frozen=True)
class Work:
    """What one chunk of one value head costs: tensor FLOPs, and bytes to and from device memory."""

    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Template:
    """One kernel for a family of archs.

    kernel: which step it computes (a key of KERNEL_FIELDS).  name: unique among all templates.
    archs: names it may be built for; preferred: archs on which it is the first choice.
    parameters, rules: the space.  roles, buffers, work: declared costs of (problem, schedule).
    prim_func: (problem, schedule) → TileLang PrimFunc.  pass_configs: TileLang pass options by name.
    sources: template files (names relative to ``templates/``) whose bytes make up the digest.
    unsupported: says why a problem cannot be answered at all, or None.
    """

    kernel: str
    name: str
    archs: tuple[str, ...]
    preferred: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    rules: tuple[Rule, ...]
    roles: Callable[[Problem, Schedule], tuple[Role, ...]]
    buffers: Callable[[Problem, Schedule], tuple[SharedBuffer, ...]]
    work: Callable[[Problem, Schedule], Work]
    prim_func: Callable[[Problem, Schedule], object]
    sources: tuple[str, ...]
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    adapt: Callable[[Problem, Schedule], Schedule] = lambda problem, schedule: schedule
    barriers: Callable[[Problem, Schedule], int] = lambda problem, schedule: 0
    pass_configs: dict = field(default_factory=dict, hash=False, compare=False)

    def default(self, problem: Problem) -> Schedule:
        """The schedule used when nothing was tuned: declared defaults, adapted to the problem's dims."""
        return self.adapt(problem, Schedule.of(self.name, {p.name: p.default for p in self.parameters}))

    def points(self) -> Iterator[Schedule]:
        """Every combination of choices, feasible or not, in declaration order."""
        names = [p.name for p in self.parameters]
        for values in itertools.product(*(p.choices for p in self.parameters)):
            yield Schedule.of(self.name, dict(zip(names, values)))
