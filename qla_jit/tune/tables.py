"""What the commands print: tables for people, plain values for --json."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..cubin import registers_text
from ..db.layers import Database
from ..db.lookup import Match, heads_of
from ..db.records import BestRow, problem_body
from .compile_only import CompileReport
from .doctor import Finding
from .sweep import Report


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _gain(row: BestRow | None) -> str:
    return "-" if row is None or row.gain is None else f"{row.gain:.2f}x"


def _params(schedule) -> str:
    return f"{schedule.template}({', '.join(f'{name}={value}' for name, value in schedule.items)})"


def sweep_table(report: Report) -> Table:
    table = Table(title="sweep")
    for name in "kernel,heads,chunk,workload,search,trials,default us,best us,gain,schedule".split(","):
        table.add_column(name, overflow="fold")
    for unit in report.units:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(unit.statuses.items()))
        row = unit.row
        table.add_row(
            unit.problem.kernel,
            heads_of(unit.problem),
            str(unit.problem.chunk_size),
            unit.workload,
            unit.strategy or "not begun",
            f"{len(unit.trials)}/{len(unit.space.points)} ({counts})" if unit.trials else f"0/{len(unit.space.points)}",
            _us(row and row.default_median_us),
            _us(row and row.median_us),
            _gain(row),
            _params(row.schedule) if row else "-",
        )
    return table


def sweep_json(report: Report) -> dict:
    return {
        "seconds": round(report.seconds, 3),
        "startup_s": round(report.startup_s, 3),
        "stopped": report.stopped,
        "lost_cards": report.lost,
        "trials": len(report.trials),
        "trials_per_minute": report.trials_per_minute and round(report.trials_per_minute, 2),
        "measuring_share": report.measuring_share and round(report.measuring_share, 4),
        "units": [
            {
                "problem": problem_body(unit.problem),
                "workload": unit.workload,
                "strategy": unit.strategy,
                "points": len(unit.space.points),
                "infeasible": unit.space.rejected,
                "trials": len(unit.trials),
                "resumed": unit.resumed,
                "elsewhere": unit.elsewhere,
                "statuses": unit.statuses,
                "best": row_json(unit.row) if unit.row else None,
            }
            for unit in report.units
        ],
        "overall": [row_json(row) for row in report.overall],
    }


def row_json(row: BestRow) -> dict:
    return {**row.as_dict(), "environment": row.environment.as_dict(), "gain": row.gain}


def match_json(match: Match) -> dict:
    return {
        "problem": problem_body(match.problem),
        "schedule": match.schedule.as_dict(),
        "kind": match.kind,
        "layer": match.layer,
        "distance": match.distance,
        "stale": match.stale,
        "row": row_json(match.row) if match.row else None,
    }


def match_table(matches: Sequence[Match], db: Database) -> Table:
    table = Table(title=f"schedules in use ({db.path} over the shipped rows)")
    for name in ("kernel", "heads", "chunk", "schedule", "where it came from"):
        table.add_column(name, overflow="fold")
    for match in matches:
        problem = match.problem
        chunk = str(problem.chunk_size)
        table.add_row(problem.kernel, heads_of(problem), chunk, _params(match.schedule), str(match))
    return table


def compile_json(report: CompileReport) -> dict:
    return {
        "stopped": report.stopped,
        "left": report.left,
        "kernels": [
            {
                "problem": problem_body(spec.problem),
                "schedule": spec.schedule.as_dict(),
                "status": result.status,
                "reason": result.reason,
                "path": result.path,
                "seconds": round(result.seconds, 3),
                "report": result.report,
            }
            for spec, result in report.compiled
        ],
    }


def compile_table(report: CompileReport) -> Table:
    table = Table(title="compiled kernels")
    for name in ("kernel", "heads", "status", "registers", "spills B", "shared B", "seconds", "schedule"):
        table.add_column(name, overflow="fold")
    for spec, result in report.compiled:
        numbers = [str(result.report.get(name, "-")) for name in ("spill_bytes", "smem_bytes")]
        registers = registers_text(result.report)
        problem, end = spec.problem, (f"{result.seconds:.1f}", _params(spec.schedule))
        table.add_row(problem.kernel, heads_of(problem), result.status, registers, *numbers, *end)
    return table


def doctor_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="doctor")
    for name in ("what", "verdict", "found", "what mends it"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        style = "red" if finding.is_problem else None
        cells = (finding.name, finding.verdict, finding.found, finding.fix if finding.is_problem else "")
        table.add_row(*map(Text, cells), style=style)  # Text, because paths and errors may look like markup
    return table
