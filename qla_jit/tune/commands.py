"""The verbs of ``qla-tune`` (typer): run, show, export, import.  `qla_jit.cli` is the entry point."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..config import KERNELS, OpConfig
from ..db import jsonl
from ..db.jsonl import Recorder
from ..db.layers import Database, open_db
from ..errors import ConfigError, UnsupportedError
from ..workload import DEFAULT_WORKLOADS, lengths_of
from . import tables
from .compile_only import compile_points
from .compile_pool import CompilePool
from .environment import has_gpu
from .evaluate import Evaluator, LiveEvaluator
from .picture import draw
from .progress import ProgressListener
from .replay import ReplayEvaluator
from .space import plan_problems
from .sweep import Plan, Report, run_sweep
from .worker import Worker

EXIT_INTERRUPTED = 130
#: Heads of the models that are tuned when none are named: Qwen3.5/3.6 and Qwen3-Next at TP 1 to 8.
DEFAULT_HEADS = "2:8,4:16,8:32,16:64,16:48,16:32,16:16,32:32"

app = typer.Typer(help="Tune Gated DeltaNet kernels and look at what was found.", no_args_is_help=True)

Arch = Annotated[str, typer.Option(help="Architecture to tune for: sm90, sm100, sm103, sm120, sm121.")]
Heads = Annotated[str, typer.Option(help="H:HV query/key and value heads, several separated by commas.")]
HeadDim = Annotated[str, typer.Option(help="Head dimension, or K:V where they differ.")]
Kernels = Annotated[str, typer.Option(help=f"Kernels separated by commas, of {', '.join(KERNELS)}; all by default.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float16.")]
StateDtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
StateVFirst = Annotated[bool, typer.Option("--state-v-first", help="States are [N, HV, V, K].")]
ChunkSize = Annotated[str, typer.Option(help="Chunk sizes separated by commas; by default what the templates offer.")]
DbPath = Annotated[Path | None, typer.Option("--db", help="Tuning database; QLA_DB or your data folder by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


def _pair(text: str, option: str) -> tuple[int, int]:
    parts = text.split(":")
    if len(parts) in (1, 2) and all(p.isascii() and p.isdigit() for p in parts):
        return int(parts[0]), int(parts[-1])
    raise ConfigError(f"`{option}` must be N or N:M, but got {text!r}; write for example 16:64.")


def _names(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip()) or allowed
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ConfigError(f"`{option}` must be of {', '.join(allowed)}, but got {', '.join(unknown)}; remove those.")
    return names


def _problems(arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size):
    dim_k, dim_v = _pair(head_dim, "--head-dim")
    configs = [
        OpConfig(*_pair(h, "--heads"), dim_k, dim_v, dtype, state_dtype, state_v_first, arch)
        for h in heads.split(",")
    ]
    chunk_sizes = [_pair(c, "--chunk-size")[0] for c in chunk_size.split(",")] if chunk_size else None
    return plan_problems(configs, _names(kernels, KERNELS, "--kernels"), chunk_sizes)


@app.command()
def run(
    arch: Arch = "sm90",
    heads: Heads = DEFAULT_HEADS,
    head_dim: HeadDim = "128",
    budget: Annotated[float | None, typer.Option(help="Wall seconds for everything; without it, all is tried.")] = None,
    workload: Annotated[str, typer.Option(help="Workloads separated by commas: 8192x4, 1x8192, a+b+L*N.")] = "",
    kernels: Kernels = "",
    dtype: Dtype = "bfloat16",
    state_dtype: StateDtype = "float32",
    state_v_first: StateVFirst = False,
    chunk_size: ChunkSize = "",
    max_trials: Annotated[int | None, typer.Option(min=1, help="Most trials per kernel and workload.")] = None,
    db: DbPath = None,
    replay: Annotated[Path | None, typer.Option(help="Take measurements from a recorded sweep; needs no GPU.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append every trial to this JSONL file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the sweep into this PNG.")] = None,
    compile_only: Annotated[bool, typer.Option("--compile-only", help="Fill the kernel cache; needs no GPU.")] = False,
    seed: Annotated[int, typer.Option(help="Of the search and of the data.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiler processes; one per core by default.")] = None,
    device: Annotated[int, typer.Option(min=0, help="CUDA device to measure on.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Tune: enumerate, compile, verify, measure, store.  Ctrl-C stops; the same command goes on."""
    problems = _problems(arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size)
    workloads = tuple(workload.split(",")) if workload else DEFAULT_WORKLOADS
    for text in workloads:
        lengths_of(text)
    console = Console(stderr=True)
    if compile_only:
        _compile_only(problems, jobs, budget, max_trials, seed, console, as_json)
        return
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(contextlib.closing(_evaluator(replay, jobs, device, seed)))
        database = stack.enter_context(open_db(db))
        recorder = stack.enter_context(contextlib.closing(Recorder(record))) if record else None
        listener = stack.enter_context(ProgressListener(console))
        plan = Plan(tuple(problems), workloads, budget, max_trials, seed)
        report = run_sweep(plan, evaluator, database, listener, recorder)
    _finish(report, database, picture, console, as_json)


def _evaluator(replay: Path | None, jobs: int | None, device: int, seed: int) -> Evaluator:
    if replay is not None:
        return ReplayEvaluator.from_file(replay)
    if not has_gpu():
        raise UnsupportedError(
            "a CUDA GPU must be present to measure, but PyTorch sees none; two things work without one: "
            "`--replay FILE` searches a recorded sweep, `--compile-only` fills the kernel cache."
        )
    return LiveEvaluator(CompilePool(jobs), Worker(device), seed)


def _finish(report: Report, db: Database, picture: Path | None, console: Console, as_json: bool) -> None:
    if picture is not None:
        draw(report.units, picture, title="qla-tune: time of every trial")
    if as_json:
        json.dump({**tables.sweep_json(report), "db": str(db.path)}, sys.stdout, indent=1)
        print()
    else:
        Console().print(tables.sweep_table(report))
    count, minutes = len(report.trials), report.seconds / 60
    rate = f" ({count / minutes:.0f} a minute)" if minutes else ""
    console.print(f"{count} trials in {report.seconds:.1f} s{rate}, stored in {db.path}", highlight=False)
    if picture is not None:
        console.print(f"picture: {picture}", highlight=False)
    if report.stopped:
        text = f"stopped early: {report.stopped}; run the same command again to go on."
        console.print(text, style="yellow", markup=False)
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
    if as_json:
        json.dump(tables.compile_json(report), sys.stdout, indent=1)
        print()
    else:
        Console().print(tables.compile_table(report))
    failed = sum(result.status != "ok" for _, result in report.compiled)
    console.print(f"{len(report.compiled) - failed} compiled, {failed} failed, {report.left} left", highlight=False)
    if report.stopped == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed == len(report.compiled):
        raise typer.Exit(1)


@app.command()
def show(
    arch: Arch = "sm90",
    heads: Heads = DEFAULT_HEADS,
    head_dim: HeadDim = "128",
    kernels: Kernels = "",
    dtype: Dtype = "bfloat16",
    state_dtype: StateDtype = "float32",
    state_v_first: StateVFirst = False,
    chunk_size: ChunkSize = "64",
    workload: Annotated[str, typer.Option(help="Prefer rows measured on this workload.")] = "",
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Print the schedule that compile() would use, and where it came from."""
    problems = _problems(arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size)
    with open_db(db) as database:
        matches = [database.lookup(problem, workload or None) for problem in problems]
        if as_json:
            json.dump([tables.match_json(match) for match in matches], sys.stdout, indent=1)
            print()
        else:
            Console().print(tables.match_table(matches, database))


@app.command("export")
def export_rows(
    file: Annotated[Path | None, typer.Argument(help="JSONL file to write; stdout by default.")] = None,
    arch: Annotated[str | None, typer.Option(help="Only rows of this architecture.")] = None,
    trials: Annotated[bool, typer.Option(help="Also every trial, not only the best rows.")] = True,
    db: DbPath = None,
) -> None:
    """Write your records as canonical JSONL: equal contents give equal bytes."""
    with open_db(db) as database:
        text = database.export_text(arch, trials)
    if file is None:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


@app.command("import")
def import_rows(
    file: Annotated[Path, typer.Argument(help="JSONL file that qla-tune export or --record wrote.")],
    db: DbPath = None,
) -> None:
    """Add the records of a JSONL file to your database: all of them or none."""
    records = jsonl.read(file)
    with open_db(db) as database:
        database.import_records(records)
        path = database.path
    console = Console(stderr=True)
    console.print(f"{len(records.best)} best rows and {len(records.trials)} trials are in {path}", highlight=False)
