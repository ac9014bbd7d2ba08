"""What the demo prints as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from ..db.lookup import heads_of
from ..op import CompiledOp
from ..tune.sweep import Report
from .layer import Row


def sweep_table(report: Report) -> Table:
    """One line per kernel and workload; narrow, because the schedules follow with their kernels."""
    table = Table(title="sweep")
    for name in ("kernel", "heads", "workload", "trials", "default µs", "best µs", "gain"):
        table.add_column(name)
    for unit in report.units:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(unit.statuses.items()))
        row, times = unit.row, ("-", "-", "-")
        if row is not None:
            default = "-" if row.default_median_us is None else f"{row.default_median_us:.1f}"
            times = default, f"{row.median_us:.1f}", "-" if row.gain is None else f"{row.gain:.2f}×"
        trials = f"{len(unit.trials)}/{len(unit.space.points)} ({counts or 'not begun'})"
        table.add_row(unit.problem.kernel, heads_of(unit.problem), unit.workload, trials, *times)
    return table


def kernel_table(op: CompiledOp) -> Table:
    """One line per kernel: registers of each role (limit, most in use) and at launch, spills, shared memory."""
    table = Table(title=f"kernels, {op.config.arch}, heads {op.config.num_heads}:{op.config.num_value_heads}")
    for name in ("kernel", "roles: warps × registers (in use)", "at launch", "spills B", "shared B"):
        table.add_column(name, overflow="fold")
    for report in op.report():
        roles = []
        for name, role in report["roles"].items():
            used = report.get("role_registers", {}).get(name, {}).get("live")  # None where no disassembler is
            roles.append(f"{name}: {role['warps']} × {role['registers']}" + ("" if used is None else f" ({used})"))
        numbers = [str(report[name]) for name in ("registers", "spill_bytes", "smem_bytes")]
        table.add_row(report["kernel"], "\n".join(roles), *numbers)
    return table


def layer_table(title: str, shapes: Sequence[str], results: Mapping[str, tuple[Sequence[Row], str]]) -> Table:
    """One line per implementation: time on every batch, the largest error, and what is special."""
    table = Table(title=title)
    table.add_column("implementation")
    for shape in shapes:
        table.add_column(f"{shape}, µs", justify="right")
    table.add_column("largest error", justify="right")
    table.add_column("note", overflow="fold")
    for name, (rows, reason) in results.items():
        times = {row.shape: f"{row.time_us:.1f}" for row in rows}
        error = f"{max(row.error for row in rows):.1e}" if rows else "-"
        notes = [*dict.fromkeys(row.note for row in rows if row.note), *([reason] if reason else [])]
        table.add_row(name, *(times.get(shape, "-") for shape in shapes), error, "; ".join(notes))
    return table
