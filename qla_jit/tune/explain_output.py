"""An `Explanation` as text and as plain values."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..db.lookup import command, heads_of
from ..db.records import ALL_WORKLOADS
from . import tables
from .explain import Explanation, Runner


def explanation_json(found: Explanation) -> dict:
    """`tables.match_json` with ``why``."""
    return {
        **tables.match_json(found.match),
        "why": {
            "passed_over": [
                {"reason": p.reason, "rows": p.rows, "nearest": tables.match_json(p.nearest)} for p in found.passed_over
            ],
            "others": [tables.match_json(match) for match in found.others],
            "workloads": found.workloads,
            "runners_up": [{**asdict(r), "schedule": r.schedule.as_dict()} for r in found.runners_up],
            "space": {"points": found.points, "rejected": found.rejected},
            "trials": {"statuses": found.statuses, "with_local_memory": found.spilling},
            "static": found.static,
        },
    }


def print_explanation(found: Explanation, console: Console) -> None:
    problem = found.match.problem
    chunk = f", chunk {problem.chunk_size}" if problem.chunk_size != 64 else ""
    title = f"{problem.kernel} {heads_of(problem)}{chunk}"
    console.print(Panel(Group(*_parts(found)), title=title, title_align="left", highlight=False))


def _parts(found: Explanation) -> list[RenderableType]:
    match = found.match
    lines = [f"{match.schedule}", f"{match}"]
    if match.row is not None:
        lines.append(
            f"measured {match.row.created[:19] or 'at an unknown time'}, source {match.row.template_digest[:12]}"
        )
    if match.stale:
        lines.append(f"measure it again: {command(match.problem)}")
    lines += [
        f"passed over: {p.rows} rows, the nearest {p.nearest.schedule}, because {p.reason}" for p in found.passed_over
    ]
    lines += [f"next: {m.schedule} ({m.kind}, {heads_of(m.row.problem)}, {m.row.workload})" for m in found.others]
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if found.runners_up:
        parts.append(_race_table(found))
    elif match.row is not None:
        parts.append(Text("no trials behind this row are here; qla-tune import brings those of a recorded sweep"))
    return [*parts, Text("\n".join(_static_lines(found)))]


def _race_table(found: Explanation) -> Table:
    workload = found.match.row.workload
    over = f"geometric mean over {', '.join(found.workloads)}" if workload == ALL_WORKLOADS else workload
    table = Table(title=f"the race ({over})", title_justify="left", box=None, pad_edge=False)
    for name in ("us", "ratio", "registers", "shared B", "local B", "schedule"):
        table.add_column(name, overflow="fold", justify="left" if name == "schedule" else "right")
    for runner in found.runners_up:
        style = "bold" if runner.schedule == found.match.schedule else None
        table.add_row(*_cells(runner), style=style)
    return table


def _cells(runner: Runner) -> list[str]:
    counts = ["-" if n is None else str(n) for n in (runner.registers, runner.smem_bytes, runner.local_bytes)]
    return [f"{runner.time_us:.1f}", f"{runner.ratio:.3f}", *counts, str(runner.schedule)]


def _static_lines(found: Explanation) -> list[str]:
    rejected = ", ".join(f"{count} {rule}" for rule, count in found.rejected.items()) or "none"
    total = found.points + sum(found.rejected.values())
    lines = [f"space: {found.points} feasible points of {total}; rejected: {rejected}"]
    if found.statuses:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(found.statuses.items()))
        lines.append(f"trials: {counts}; {found.spilling} of them use local memory")
    static = found.static
    roles = ", ".join(f"{name} {r['warps']} warps × {r['registers']}" for name, r in static["roles"].items())
    lines.append(f"declared: {static['threads']} threads, {static['smem_bytes']} B shared, registers {roles}")
    built = static["compiled"]
    if built is None:
        lines.append("compiled: not in the kernel cache")
    else:
        numbers = f"{built['registers']} registers, {built['spill_bytes']} B spilled, {built['smem_bytes']} B shared"
        lines.append(f"compiled: {numbers}")
    return lines
