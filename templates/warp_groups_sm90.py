"""Registers of warp-specialised Hopper kernels: what the launch reserves, and how the warp groups share it."""

from collections.abc import Callable

from qla_jit.config import Problem
from qla_jit.schedule import Role, Rule, Schedule


def launch_registers(table: tuple[Role, ...]) -> int:
    """Registers per thread that the launch reserves for every role: the register file over all threads, by eights."""
    return 65536 // sum(r.threads for r in table) // 8 * 8


def register_rules(roles: Callable[[Problem, Schedule], tuple[Role, ...]]) -> tuple[Rule, Rule]:
    """The warp groups of a kernel get no more registers than its launch reserves, and leave few of them unused."""

    def counts(problem: Problem, schedule: Schedule) -> tuple[int, int]:
        table = roles(problem, schedule)
        return sum(r.registers for r in table), len(table) * launch_registers(table)

    def fit(problem: Problem, schedule: Schedule, arch) -> str | None:
        asked, pool = counts(problem, schedule)
        return f"warp groups ask for {asked} registers per lane, the launch reserves {pool}" if asked > pool else None

    def used(problem: Problem, schedule: Schedule, arch) -> str | None:
        asked, pool = counts(problem, schedule)
        return (
            f"warp groups use {asked} of {pool} registers per lane; other splits use more"
            if asked < pool - 64
            else None
        )

    return Rule("warp_groups_fit_the_launch", fit), Rule("warp_groups_use_the_launch", used)
