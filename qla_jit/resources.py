"""What a schedule costs before anything is compiled, and the one place that says whether it can run.

The counts come from the template's own declarations; tests compare them with the lowered IR and with the cubin.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arch import Arch, get_arch
from .config import Problem
from .registry import get_template
from .schedule import Role, Schedule, Violation, check_params
from .template import Work

SMEM_ALIGNMENT = 1024  # TMA and swizzled WGMMA tiles start on 1 KB, so static data before them is padded to it
BARRIER_BYTES = 8


@dataclass(frozen=True)
class Resources:
    """Declared cost of one CTA (shared memory, threads, registers, barriers) and of one chunk of one head (work).

    smem_bytes: buffers and mbarriers, without padding.  registers: Σ threads × registers over the roles.
    """

    smem_bytes: int
    threads: int
    registers: int
    barriers: int
    roles: tuple[Role, ...]
    work: Work

    @property
    def padded_smem_bytes(self) -> int:
        """The most shared memory the CTA can take: `smem_bytes` rounded up to SMEM_ALIGNMENT."""
        return -(-self.smem_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


@dataclass(frozen=True)
class Feasibility:
    """Whether a schedule can run, with every reason why not."""

    violations: tuple[Violation, ...]

    def __bool__(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        return "feasible" if self else "; ".join(map(str, self.violations))


def estimate(problem: Problem, schedule: Schedule) -> Resources:
    """Resources of a schedule from its template's declarations (bytes; registers over the whole CTA)."""
    template = get_template(schedule.template)
    roles = template.roles(problem, schedule)
    barriers = template.barriers(problem, schedule)
    return Resources(
        smem_bytes=sum(b.nbytes for b in template.buffers(problem, schedule)) + BARRIER_BYTES * barriers,
        threads=sum(r.threads for r in roles),
        registers=sum(r.threads * r.registers for r in roles),
        barriers=barriers,
        roles=roles,
        work=template.work(problem, schedule),
    )


def is_feasible(problem: Problem, schedule: Schedule, arch: str | Arch | None = None) -> Feasibility:
    """Check parameters, the template's named rules and the card's limits; never compiles anything."""
    arch = get_arch(arch or problem.arch)
    template = get_template(schedule.template)
    found = check_params(template.name, template.parameters, schedule)
    if template.kernel != problem.kernel:
        found.append(Violation("kernel_matches", f"{template.name} computes {template.kernel}, asked {problem.kernel}"))
    if arch.name not in template.archs:
        found.append(Violation("arch_is_supported", f"{template.name} is for {template.archs}, not {arch.name}"))
    if found:
        return Feasibility(tuple(found))
    reason = template.unsupported(problem)
    if reason:
        return Feasibility((Violation("problem_is_supported", reason),))
    for rule in template.rules:
        detail = rule.broken(problem, schedule, arch)
        if detail:
            found.append(Violation(rule.name, detail))
    if not found:
        found.extend(_card_limits(estimate(problem, schedule), arch))
    return Feasibility(tuple(found))


def _card_limits(cost: Resources, arch: Arch) -> list[Violation]:
    found = []
    smem_bytes = cost.padded_smem_bytes
    if smem_bytes > arch.smem_bytes_per_cta:
        detail = f"{smem_bytes} B asked, {arch.smem_bytes_per_cta} B on {arch}"
        found.append(Violation("shared_memory_fits_the_cta", detail))
    if cost.threads > arch.max_threads_per_cta:
        found.append(Violation("threads_fit_the_cta", f"{cost.threads} asked, {arch.max_threads_per_cta} on {arch}"))
    if cost.registers > arch.registers_per_sm:
        detail = f"roles ask for {cost.registers}, an SM of {arch} has {arch.registers_per_sm}"
        found.append(Violation("registers_fit_the_sm", detail))
    return found
