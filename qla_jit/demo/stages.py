"""The stages of the demo: sweep, kernels, layer, peers, picture.

With a card that the kernels support and nvcc, the sweep is live and its rows go into the user's database.  Otherwise
the same search runs on a recorded sweep, whose rows go into a file of the output folder: they belong to another card.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import toolchain
from ..config import OpConfig
from ..db import Database, jsonl, open_db
from ..errors import CompilerMissingError, ReplayMissError, UnsupportedError
from ..op import CompiledOp, select_kernels
from ..op import compile as compile_op
from ..tune.compile_pool import CompilePool
from ..tune.environment import has_gpu
from ..tune.evaluate import LiveEvaluator
from ..tune.picture import draw
from ..tune.progress import ProgressListener
from ..tune.replay import ReplayEvaluator
from ..tune.space import enumerate_space, plan_problems
from ..tune.sweep import Plan, Report, run_sweep
from ..tune.worker import Worker
from ..workload import DEFAULT_WORKLOADS
from . import layer, peers
from .tables import kernel_table, layer_table, sweep_table

REPLAY_ARCH = "sm90"  # what the shipped recordings were measured on
PICTURE, REPLAY_DATABASE = "sweep.png", "replay.sqlite"


@dataclass(frozen=True)
class Machine:
    """What can be done here.  arch: of the card, None without a supported one; notes: what is missing."""

    arch: str | None
    has_compiler: bool
    notes: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        return self.arch is not None and self.has_compiler

    @property
    def kind(self) -> str:
        return "live" if self.is_live else "recorded"


def look_around() -> Machine:
    """The card and the compiler of this machine; opens a CUDA context if there is a card."""
    from ..arch import detect

    arch, notes = None, []
    if has_gpu():
        try:
            arch = detect().name
        except UnsupportedError as error:
            notes.append(str(error))
    else:
        notes.append("No GPU: the sweep is replayed from a recording, and the operator runs on CPU tensors.")
    try:
        toolchain.current().require()
        compiler = True
    except CompilerMissingError as error:
        notes.append(str(error))
        compiler = False
    return Machine(arch, compiler, tuple(notes))


def sweep_live(config: OpConfig, budget_s: float, console: Console) -> tuple[Report, Database]:
    """Tune the layer's kernels on the card, into the user's database."""
    database = open_db()
    plan = Plan(tuple(plan_problems([config])), DEFAULT_WORKLOADS, budget_s)
    evaluator = LiveEvaluator(CompilePool(), Worker(0))
    with contextlib.closing(evaluator), ProgressListener(console) as listener:
        console.print(f"measuring on {evaluator.environment}", highlight=False)
        return run_sweep(plan, evaluator, database, listener), database


def recordings() -> list[Path]:
    """Sweeps that the package ships."""
    folder = Path(str(resources.files("qla_jit.tuning_db"))) / "sweeps"
    return sorted(folder.glob("*.jsonl"))


def sweep_recorded(
    config: OpConfig, files: Sequence[Path], budget_s: float, out: Path, console: Console
) -> tuple[Report, Database]:
    """The same search on recorded trials of the layer's kernels, into a fresh database in ``out``.

    Raises ReplayMissError where no file holds any.
    """
    spaces = {problem: set(enumerate_space(problem).points) for problem in plan_problems([config])}
    for file in files:
        records = jsonl.read(file)
        # Points that the templates no longer have cannot be replayed.
        recorded = {(t.problem, t.workload) for t in records.trials if t.schedule in spaces.get(t.problem, ())}
        problems = tuple(p for p in spaces if any(p == problem for problem, _ in recorded))
        workloads = sorted({w for _, w in recorded if all((p, w) in recorded for p in problems)})
        if problems and workloads:
            break
    else:
        raise ReplayMissError(
            f"a recorded sweep of heads {config.num_heads}:{config.num_value_heads} on {config.arch} must be among "
            f"{[f.name for f in files]}, but none is; record one on a GPU: qla-tune --record FILE."
        )
    evaluator = ReplayEvaluator(records.trials, str(file))
    path = out / REPLAY_DATABASE
    path.unlink(missing_ok=True)
    database = Database(path)
    console.print(f"replaying {file.name}, measured on {evaluator.environment}", highlight=False)
    with ProgressListener(console) as listener:
        return run_sweep(Plan(problems, tuple(workloads), budget_s), evaluator, database, listener), database


def build_kernels(config: OpConfig, database: Database, console: Console) -> CompiledOp:
    """Compile what the cache lacks, in parallel, and load the operator; needs nvcc, no card."""
    specs = select_kernels(config, database).specs
    with _progress(console) as progress, CompilePool(len(specs)) as pool:
        task = progress.add_task(f"nvcc for {config.arch}", total=len(specs))
        waiting = {pool.submit(spec): spec for spec in specs}
        for future in as_completed(waiting):
            kernel, result = waiting[future].problem.kernel, future.result()
            progress.advance(task)
            console.print(f"  {kernel}: {result.status} in {result.seconds:.1f} s", highlight=False)
    return compile_op(config, db=database)  # a kernel that failed above fails here again, with its log


def run_layer(device: str, shapes: Sequence[str], console: Console) -> list[layer.Row]:
    """Every batch through `chunk_gated_delta_rule`."""
    rows = []
    with _progress(console) as progress:
        task = progress.add_task("qla_jit", total=len(shapes))
        for shape in shapes:
            rows.append(layer.measure(shape, device, layer.qla_jit_call))
            progress.advance(task)
    return rows


def run_peers(shapes: Sequence[str], console: Console) -> dict[str, tuple[list[layer.Row], str]]:
    """The same batches through every installed peer."""
    found: dict[str, tuple[list[layer.Row], str]] = {}
    with _progress(console) as progress:
        for name in peers.PEERS:
            if peers.is_installed(name):
                task = progress.add_task(f"{name} (compiles and tunes itself)", total=1)
                found[name] = peers.measure_peer(name, shapes)
                progress.advance(task)
            else:
                found[name] = [], "not installed"
    return found


def run(out: Path, budget_s: float, recording: Path | None, console: Console) -> None:
    """All stages.  Raises QlaError for what cannot go on, KeyboardInterrupt once the trials are stored and drawn."""
    out.mkdir(parents=True, exist_ok=True)
    machine = look_around()
    for note in machine.notes:
        _warn(console, note)
    config = layer.layer_config(machine.arch if machine.is_live else REPLAY_ARCH)

    console.rule(f"1  {machine.kind} sweep")
    report, picture = None, None
    if machine.is_live:
        report, database = sweep_live(config, budget_s, console)
    else:
        try:
            files = [recording] if recording else recordings()
            report, database = sweep_recorded(config, files, budget_s, out, console)
        except ReplayMissError as error:
            _warn(console, str(error))
            database = open_db()
    if report is not None:
        picture = draw(report.units, out / PICTURE, title=f"qla-jit demo: {machine.kind} sweep")
        console.print(sweep_table(report))
        if report.stopped == "interrupted":
            raise KeyboardInterrupt
        if report.stopped not in ("", "budget"):
            _warn(console, f"the sweep stopped early: {report.stopped}")

    console.rule("2  kernels")
    if machine.has_compiler:
        with database:
            op = build_kernels(config, database, console)
        console.print(kernel_table(op))
        for kernel in op.report():
            console.print(f"{kernel['schedule']}\n  {kernel['chosen']}", highlight=False, markup=False)
    else:
        _warn(console, "none is built without a compiler.")

    device = "cuda" if machine.is_live else "cpu"
    console.rule(f"3  a Qwen3.5 layer on {device} tensors")
    heads, shapes = (layer.HEADS, layer.CUDA_SHAPES) if machine.is_live else (layer.CPU_HEADS, layer.CPU_SHAPES)
    results = {"qla_jit": (run_layer(device, shapes, console), "")}
    if machine.is_live:
        results.update(run_peers(shapes, console))
    console.print(layer_table(f"heads {heads[0]}:{heads[1]}, d = 128, error against float64", shapes, results))
    if picture is not None:
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


def _warn(console: Console, text: str) -> None:
    console.print(text, style="yellow", highlight=False, markup=False)


def _progress(console: Console) -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()
    return Progress(*columns, TimeElapsedColumn(), console=console)
