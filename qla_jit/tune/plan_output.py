"""A plan before it is run: as a table, as plain values, and in one line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..db.lookup import heads_of
from ..db.records import problem_body
from . import json_output
from .shipped_plan import Planned


def minutes(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{max(1, round(seconds / 60))} min"


def summary(plan: Sequence[Planned], workloads: Sequence[str], budget_s: float | None) -> str:
    """What is going to be tuned, in how long, and what is left for another run."""
    now = [p for p in plan if p.fits]
    text = (
        f"plan: {len(now)} of {len(plan)} problems on {', '.join(workloads)}, about "
        f"{minutes(sum(p.estimate_s for p in now))}"
    )
    text += ", no budget" if budget_s is None else f", budget {minutes(budget_s)}"
    later = len(plan) - len(now)
    return text + (f"; {later} problems are left for the next run of the same command" if later else "")


def print_plan(
    plan: Sequence[Planned], workloads: Sequence[str], budget_s: float | None, as_json: bool, arch: str
) -> None:
    """The plan alone, for ``--dry-run``."""
    if as_json:
        problems = [
            {
                "problem": problem_body(p.problem),
                "state": p.state,
                "points": p.points,
                "trials_left": p.left,
                "estimate_s": round(p.estimate_s, 1),
                "within_budget": p.fits,
            }
            for p in plan
        ]
        told = {"dry_run": True, "arch": arch, "workloads": list(workloads), "budget_s": budget_s}
        json_output.write("run", True, **told, problems=problems)
        return
    table = Table(title="plan")
    for name in ("problem", "dims", "chunk", "state", "trials", "about", "when"):
        table.add_column(name, no_wrap=True)
    for p in plan:
        problem = p.problem
        dims = str(problem.head_dim_k) + (f":{problem.head_dim_v}" if problem.head_dim_v else "")
        cells = (f"{problem.kernel} {heads_of(problem)}", dims, str(problem.chunk_size), p.state, str(p.left))
        table.add_row(*cells, minutes(p.estimate_s), "now" if p.fits else "next run", style=None if p.fits else "dim")
    Console().print(table)
    Console(stderr=True).print(summary(plan, workloads, budget_s), highlight=False, soft_wrap=True)
