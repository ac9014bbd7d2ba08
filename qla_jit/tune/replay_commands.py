"""``qla-tune replay``: how a search strategy does on recorded sweeps, with no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..db import jsonl
from ..db.layers import Database, open_db
from ..db.lookup import heads_of
from ..db.records import problem_body
from ..errors import ConfigError, ReplayMissError
from . import json_output
from .options import AsJson, DbPath, names_in
from .replay import ReplayEvaluator, shipped_sweeps
from .replay_study import STRATEGIES, Replayed, SeedRun, replay
from .search import NEIGHBOURS


def replay_sweeps(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Recorded sweeps (JSONL); by default the shipped ones.")
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(STRATEGIES)}; auto is what a sweep would run.", autocompletion=lambda: STRATEGIES
        ),
    ] = "auto",
    budget: Annotated[str, typer.Option(help="Trials per run, or a share of the points: 12, 25%.")] = "25%",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 1,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    near: Annotated[
        bool, typer.Option("--near", help="Begin with the rows of the nearest other problems in the database.")
    ] = False,
    current: Annotated[
        bool, typer.Option("--current", help="Search this version's points; one that was not recorded is an error.")
    ] = False,
    kernels: Annotated[str, typer.Option(help="Only these kernels, separated by commas.")] = "",
    heads: Annotated[str, typer.Option(help="Only these H:HV, separated by commas.")] = "",
    workload: Annotated[str, typer.Option(help="Only these workloads, separated by commas.")] = "",
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Run a search strategy on recorded sweeps and compare what it finds with the recorded best."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"`--strategy` must be of {', '.join(STRATEGIES)}, but got {strategy!r}; name one of them.")
    paths = files or shipped_sweeps()
    # One recording: a kernel that two configurations share was recorded with the first of them only.
    trials = [t for path in paths for t in jsonl.read(path).trials]
    evaluator = ReplayEvaluator(trials, ", ".join(path.name for path in paths))
    chosen = _chosen(evaluator, names_in(kernels), names_in(heads), names_in(workload))
    seeds_used = range(seed, seed + seeds)
    with open_db(db) as database:
        results = [
            replay(evaluator, p, w, strategy, seeds_used, budget, _others(database, p, w) if near else (), current)
            for p, w in chosen
        ]
    if as_json:
        units = [_unit_json(r) for r in results]
        json_output.write("replay", True, files=[str(p) for p in paths], strategy=strategy, near=near, units=units)
    else:
        _print(results, near)


def _others(database: Database, problem, workload: str) -> list:
    return [match for match in database.near(problem, workload) if match.row.problem != problem]


def _chosen(evaluator: ReplayEvaluator, kernels: list[str], heads: list[str], workloads: list[str]) -> list[tuple]:
    recorded = evaluator.recorded()
    chosen = [
        (problem, workload)
        for problem, workload in recorded
        if (not kernels or problem.kernel in kernels)
        and (not heads or heads_of(problem) in heads)
        and (not workloads or workload in workloads)
    ]
    known = (
        (kernels, {p.kernel for p, _ in recorded}),
        (heads, {heads_of(p) for p, _ in recorded}),
        (workloads, {w for _, w in recorded}),
    )
    missing = [name for asked, there in known for name in asked if name not in there]
    if missing or not chosen:
        raise ReplayMissError(
            f"what is asked for must be recorded, but {', '.join(missing) or 'that combination'} is not; recorded are "
            f"{'; '.join(', '.join(sorted(there)) for _, there in known)}."
        )
    return chosen


def _run_json(run: SeedRun) -> dict:
    found = run.found
    return {
        "seed": run.seed,
        "trials": run.trials,
        "found_us": found and found.median_us,
        "schedule": found and found.schedule.as_dict(),
        "loss": run.loss,
        "trials_to_2_percent": run.trials_to_near,
    }


def _unit_json(result: Replayed) -> dict:
    return {
        "problem": problem_body(result.problem),
        "workload": result.workload,
        "strategy": result.strategy,
        "points": result.points,
        "budget": result.budget,
        "best_us": result.best.median_us,
        "best_schedule": result.best.schedule.as_dict(),
        "default_us": result.default.median_us,
        "within_2_percent": result.hits,
        "median_loss": result.median_loss,
        "worst_loss": result.worst_loss,
        "unrecorded": result.unrecorded,
        "gone": result.gone,
        "runs": [_run_json(run) for run in result.runs],
    }


def _percent(value: float | None) -> str:
    return "nothing ran" if value is None else f"{value:.1%}"


def _print(results: list[Replayed], near: bool) -> None:
    seeds = len(results[0].runs)
    table = Table(title=f"replayed, {seeds} seed{'s' * (seeds > 1)}" + (f", {NEIGHBOURS} neighbours first" * near))
    table.add_column("space", no_wrap=True)
    for name in ("search", "default us", "best us", "found us", "within 2%", "median loss", "worst"):
        table.add_column(name, overflow="fold", justify="left" if name == "search" else "right")
    for r in results:
        found = sorted(run.found.median_us for run in r.runs if run.found is not None)
        default = "-" if r.default.median_us is None else f"{r.default.median_us:.1f}"
        table.add_row(
            f"{r.problem.kernel} {heads_of(r.problem)} {r.workload}",
            f"{r.strategy} {r.budget}/{r.points}",
            default,
            f"{r.best.median_us:.1f}",
            f"{found[len(found) // 2]:.1f}" if found else "-",
            f"{r.hits:.0%}",
            _percent(r.median_loss),
            _percent(r.worst_loss),
        )
    Console().print(table)
    console = Console(stderr=True)
    hits = sum(r.hits * len(r.runs) for r in results)
    runs = sum(len(r.runs) for r in results)
    console.print(f"{hits:.0f} of {runs} runs ended within 2 % of the recorded best", highlight=False)
    apart = sum(r.unrecorded for r in results), sum(r.gone for r in results)
    if any(apart):
        text = (
            f"note: {apart[0]} feasible points of this version were not recorded, and {apart[1]} recorded ones are "
            f"none any more; the recorded points were searched unless --current was given."
        )
        console.print(text, style="yellow", highlight=False, soft_wrap=True)
