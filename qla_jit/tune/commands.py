"""``qla-tune``: the program, and its verbs that tune: run, resume.  `qla_jit.cli` is the entry point."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..db.jsonl import Recorder
from ..db.layers import Database, open_db
from ..errors import UnsupportedError
from ..workload import DEFAULT_SPLIT_WORKLOADS, DEFAULT_WORKLOADS
from . import json_output, tables
from .compile_only import compile_points
from .compile_pool import CompilePool
from .environment import has_gpu
from .evaluate import Evaluator, LiveEvaluator
from .fit_commands import fit
from .inspect_commands import doctor, show
from .last_sweep import Plan, Setup, recall
from .options import (
    DEFAULT_HEADS,
    Arch,
    AsJson,
    BetaDtype,
    ChunkSize,
    DbPath,
    Dtype,
    GateDtype,
    HeadDim,
    Heads,
    Kernels,
    StateDtype,
    StateVFirst,
    chunk_sizes_of,
    devices_of,
    kernels_of,
    problems_of,
    workloads_of,
)
from .picture import draw
from .plan_output import print_plan, summary
from .progress import ProgressListener
from .record_commands import export_rows, import_rows, merge_rows
from .replay import ReplayEvaluator
from .replay_commands import replay_sweeps
from .report_commands import write_report
from .shared_board import SharedBoard, without_password
from .shipped_plan import SHIPPED_BUDGET_S, SHIPPED_SPLIT_WORKLOADS, SHIPPED_WORKLOADS, planned, shipped_problems
from .sweep import Report, run_sweep
from .verify_commands import verify
from .worker import Worker

EXIT_INTERRUPTED = 130

app = typer.Typer(help="Tune Gated DeltaNet kernels and look at what was found.", no_args_is_help=True)


@app.command()
def run(
    arch: Arch = "sm90",
    heads: Heads = "",
    head_dim: HeadDim = "",
    budget: Annotated[
        float | None,
        typer.Option(help=f"Wall seconds; without it all is tried, of the shipped list {SHIPPED_BUDGET_S:.0f} s."),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="Workloads separated by commas: 8192x4, 1x8192, a+b+L*N; of a split 1x32768/16, 1x32768/16~50."
        ),
    ] = "",
    kernels: Kernels = "",
    dtype: Dtype = "bfloat16",
    state_dtype: StateDtype = "float32",
    state_v_first: StateVFirst = False,
    gate_dtype: GateDtype = "float32",
    beta_dtype: BetaDtype = "float32",
    chunk_size: ChunkSize = "",
    max_trials: Annotated[int | None, typer.Option(min=1, help="Most trials per kernel and workload.")] = None,
    db: DbPath = None,
    replay: Annotated[Path | None, typer.Option(help="Take measurements from a recorded sweep; needs no GPU.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append every trial to this JSONL file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the sweep into this PNG.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and its estimated time.")] = False,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Fill the kernel cache; needs no GPU.")] = False,
    seed: Annotated[int, typer.Option(help="Of the search and of the data.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiler processes; one per core by default.")] = None,
    devices: Annotated[
        str, typer.Option("--devices", "--device", help="CUDA devices to measure on, separated by commas.")
    ] = "0",
    storage: Annotated[
        str | None, typer.Option(help="Database where hosts share this sweep: postgresql+psycopg://USER@HOST/NAME.")
    ] = None,
    no_filter: Annotated[
        bool, typer.Option("--no-filter", help="Also measure what the compiler says against: spills, serial products.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tune: enumerate, compile, filter, verify, measure, store.  Ctrl-C stops; resume, or the same command, goes on.

    With neither heads nor head dims, the shipped list of operators, most valuable first, as far as the budget goes;
    with no kernels either, the forward of all, then their backward.
    """
    shipped = not heads and not head_dim and replay is None
    chosen = (dtype, state_dtype, state_v_first)
    if shipped:
        names = (kernels_of(kernels) if kernels else None, chunk_sizes_of(chunk_size))
        problems = shipped_problems(arch, *chosen, gate_dtype, beta_dtype, *names)
        budget = SHIPPED_BUDGET_S if budget is None else budget
    else:
        names = (heads or DEFAULT_HEADS, head_dim or "128", kernels)
        problems = problems_of(arch, *names, *chosen, chunk_size, gate_dtype, beta_dtype)
    defaults = (SHIPPED_WORKLOADS, SHIPPED_SPLIT_WORKLOADS) if shipped else (DEFAULT_WORKLOADS, DEFAULT_SPLIT_WORKLOADS)
    workloads = workloads_of(workload, (problem.kernel for problem in problems), *defaults)
    if shipped or dry_run:
        with open_db(db) as database:
            cards, processes = len(devices_of(devices)), jobs or os.cpu_count() or 1
            planning = planned(problems, workloads, database, budget, max_trials, processes, cards)
        if dry_run:
            print_plan(planning, workloads, budget, as_json, arch)
            return
        problems = [one.problem for one in planning if one.fits]
        Console(stderr=True).print(summary(planning, workloads, budget), highlight=False, soft_wrap=True)
    if compile_only:
        _compile_only(problems, jobs, budget, max_trials, seed, Console(stderr=True), as_json)
        return
    plan = Plan(tuple(problems), workloads, budget, max_trials, seed, not no_filter)
    setup = Setup(
        jobs, devices_of(devices), _absolute(replay), _absolute(record), _absolute(picture),
        None if storage is None else without_password(storage),
    )  # fmt: skip
    with open_db(db) as database:
        _tune(plan, setup, database, as_json, "run", storage)


@app.command()
def resume(db: DbPath = None, as_json: AsJson = False) -> None:
    """Go on with the last sweep of the database, with the options that it was started with."""
    with open_db(db) as database:
        _tune(*recall(database), database, as_json, "resume")


def _absolute(path: Path | None) -> str | None:
    """A sweep may be resumed from another folder."""
    return None if path is None else str(path.absolute())


def _tune(plan: Plan, setup: Setup, database: Database, as_json: bool, verb: str, storage: str | None = None) -> None:
    """storage: the URL with its password, where the command gave one."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        made = _evaluator(setup.replay, setup.jobs, setup.devices, plan.seed, plan.static_filter)
        evaluator = stack.enter_context(contextlib.closing(made))
        recorder = stack.enter_context(contextlib.closing(Recorder(setup.record))) if setup.record else None
        listener = stack.enter_context(ProgressListener(console))
        url = storage or setup.storage
        board = None if url is None else SharedBoard(url)
        report = run_sweep(plan, evaluator, database, listener, recorder, setup, board)
    _finish(report, database, setup.picture, console, as_json, verb)


def _evaluator(
    replay: str | None, jobs: int | None, devices: Sequence[int], seed: int, static_filter: bool
) -> Evaluator:
    if replay is not None:
        return ReplayEvaluator.from_file(replay)
    if not has_gpu():
        raise UnsupportedError(
            "a CUDA GPU must be present to measure, but PyTorch sees none; two things work without one: "
            "`--replay FILE` searches a recorded sweep, `--compile-only` fills the kernel cache."
        )
    workers = [Worker(device) for device in devices]
    return LiveEvaluator(CompilePool(jobs), workers, seed, static_filter=static_filter)


def _finish(report: Report, db: Database, picture: str | None, console: Console, as_json: bool, verb: str) -> None:
    if picture is not None:
        draw(report.units, picture, title="qla-tune: time of every trial")
    if as_json:
        ok = report.stopped in ("", "budget") and any(unit.row for unit in report.units)
        json_output.write(verb, ok, **tables.sweep_json(report), db=str(db.path))
    else:
        Console().print(tables.sweep_table(report))
    rate = report.trials_per_minute
    took = f"{report.seconds:.1f} s, {report.startup_s:.1f} of them to start"
    took += f" ({rate:.0f} a minute)" if rate else ""
    console.print(f"{len(report.trials)} trials in {took}, stored in {db.path}", highlight=False)
    if picture is not None:
        console.print(f"picture: {picture}", highlight=False)
    for reason in report.lost:
        console.print(f"a card was given up: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if report.stopped:
        text = (
            f"stopped early: {report.stopped}; run the same command again to go on, or: "
            f"qla-tune resume --db {shlex.quote(str(db.path))}"
        )
        console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if report.stopped == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if report.stopped not in ("", "budget"):
        raise typer.Exit(1)
    if not any(unit.row for unit in report.units):
        console.print("no schedule ran, so none was stored; the reasons are in the trial rows.", style="red")
        raise typer.Exit(1)


def _compile_only(problems, jobs, budget, max_points, seed, console: Console, as_json: bool) -> None:
    with CompilePool(jobs) as pool, ProgressListener(console) as listener:
        report = compile_points(problems, pool, budget, max_points, seed, listener.compiled)
    failed = sum(result.status != "ok" for _, result in report.compiled)
    if as_json:
        ok = report.stopped != "interrupted" and failed < len(report.compiled)
        json_output.write("run", ok, **tables.compile_json(report))
    else:
        Console().print(tables.compile_table(report))
    console.print(f"{len(report.compiled) - failed} compiled, {failed} failed, {report.left} left", highlight=False)
    if report.stopped == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed == len(report.compiled):
        raise typer.Exit(1)


for _name, _verb in {
    "show": show,
    "doctor": doctor,
    "export": export_rows,
    "import": import_rows,
    "merge": merge_rows,
    "fit": fit,
    "report": write_report,
    "replay": replay_sweeps,
    "verify": verify,
}.items():
    app.command(_name)(_verb)
