"""``qla-tune verify``: the rows of the database checked again on this card."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..db.jsonl import Recorder
from ..db.layers import open_db
from ..db.lookup import heads_of
from ..db.records import BestRow
from ..errors import ConfigError, UnsupportedError
from . import json_output, tables
from .compile_pool import CompilePool
from .environment import has_gpu
from .evaluate import Evaluator, LiveEvaluator
from .finals import ROUNDS
from .options import AsJson, DbPath, names_in
from .verify_rows import TOLERANCE, Check, Verification, verify_rows
from .worker import Worker

LAYERS = ("all", "user", "shipped")
EXIT_INTERRUPTED = 130


def make_evaluator(jobs: int | None, device: int, seed: int) -> Evaluator:
    """What measures; replaced in tests."""
    if not has_gpu():
        raise UnsupportedError(
            "a CUDA GPU must be present to check rows, but PyTorch sees none; `qla-tune doctor` and `qla-tune show` "
            "say without one which rows are stale or cannot run."
        )
    return LiveEvaluator(CompilePool(jobs), Worker(device), seed)


def verify(
    layer: Annotated[
        str, typer.Option(help=f"Whose rows: {', '.join(LAYERS)}.", autocompletion=lambda: list(LAYERS))
    ] = "all",
    kernels: Annotated[str, typer.Option(help="Only these kernels, separated by commas.")] = "",
    heads: Annotated[str, typer.Option(help="Only these H:HV, separated by commas.")] = "",
    workload: Annotated[str, typer.Option(help="Only rows of these workloads; * is the row over all.")] = "",
    tolerance: Annotated[float, typer.Option(min=0, help="How far a time may be off: 0.1 is 10 %.")] = TOLERANCE,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of 20 samples per row and workload.")] = ROUNDS,
    budget: Annotated[float | None, typer.Option(help="Wall seconds; what is left then is unchecked.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append every trial to this JSONL file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiler processes; one per core by default.")] = None,
    device: Annotated[int, typer.Option(min=0, help="CUDA device to check on.")] = 0,
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Check stored rows on this card: results against float64, times against the rows.  Exit code 1 for any problem."""
    if layer not in LAYERS:
        raise ConfigError(f"`--layer` must be of {', '.join(LAYERS)}, but got {layer!r}; name one of them.")
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(contextlib.closing(make_evaluator(jobs, device, seed)))
        database = stack.enter_context(open_db(db))
        recorder = stack.enter_context(contextlib.closing(Recorder(record))) if record else None
        rows = database.best_rows(evaluator.environment.arch)
        chosen = _chosen(rows, layer, names_in(kernels), names_in(heads), names_in(workload))
        if not chosen:
            raise ConfigError(
                f"a row to check must be stored, but none of {len(rows)} rows for {evaluator.environment.arch} is of "
                f"that kernel, those heads, that workload and that layer; leave options out, or tune first."
            )

        def done(check: Check, left: int) -> None:
            if recorder is not None:
                for trial in check.trials:
                    recorder.add(trial)
            text = f"{left} left; {check.status}: {_name(check.row)} {check.reason}"
            console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

        found = verify_rows(chosen, rows, evaluator, tolerance, rounds, budget, done)
    _print(found, console, as_json)
    if found.stopped == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if not found.ok:
        raise typer.Exit(1)


def _chosen(rows, layer: str, kernels: list[str], heads: list[str], workloads: list[str]) -> list[tuple[str, BestRow]]:
    chosen = [
        (where, row)
        for where, row in rows
        if layer in ("all", where)
        and (not kernels or row.problem.kernel in kernels)
        and (not heads or heads_of(row.problem) in heads)
        and (not workloads or row.workload in workloads)
    ]
    return sorted(chosen, key=lambda item: (str(item[1].problem), item[1].workload, item[0]))


def _name(row: BestRow) -> str:
    return f"{row.problem.kernel} {heads_of(row.problem)} {row.workload}"


def check_json(check: Check) -> dict:
    return {
        "layer": check.layer,
        "row": tables.row_json(check.row),
        "status": check.status,
        "reason": check.reason,
        "stale": check.stale,
        "median_us": check.median_us,
        "ratio": check.ratio,
        "error": check.error,
        "trials": [{"workload": t.workload, "status": t.status, "median_us": t.median_us} for t in check.trials],
    }


def _print(found: Verification, console: Console, as_json: bool) -> None:
    counts = dict(Counter(check.status for check in found.checks))
    if as_json:
        rows = [check_json(check) for check in found.checks]
        json_output.write("verify", found.ok, stopped=found.stopped, statuses=counts, rows=rows)
    else:
        Console().print(_table(found))
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    stopped = f"; stopped early: {found.stopped}" if found.stopped else ""
    console.print(f"{len(found.checks)} rows: {told}{stopped}", highlight=False, markup=False, soft_wrap=True)


def _table(found: Verification) -> Table:
    table = Table(title="rows checked on this card")
    for name in ("row", "from", "status", "row us", "now us", "ratio", "error", "why"):
        table.add_column(name, overflow="fold")
    for check in found.checks:
        cells = (
            _name(check.row),
            check.layer + (", stale" if check.stale else ""),
            check.status,
            f"{check.row.median_us:.1f}",
            "-" if check.median_us is None else f"{check.median_us:.1f}",
            "-" if check.ratio is None else f"{check.ratio:.3f}",
            "-" if check.error is None else f"{check.error:.2e}",
            check.reason,
        )
        table.add_row(*map(Text, cells), style="red" if check.is_problem else None)
    return table
