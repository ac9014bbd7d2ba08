"""How good the search is: strategies replayed on exhaustively recorded sweeps, so that every answer can be checked.

    python tools/search_study.py [--seeds 20] [--out docs/perf/search_study.jsonl] [--table]

Strategies, each from the template's default on: ``random`` order; ``tpe``, what `make_strategy` runs under a trial
limit; ``optuna``, the same with the settings that Optuna's TPE has by itself.  ``+near`` tries the winners of the
nearest *other* head configurations first, as a sweep does with the rows of its database.  The rows come from the
shipped database; those of the problem itself are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path

import optuna
from rich.progress import track

from qla_jit.config import Problem
from qla_jit.db import jsonl
from qla_jit.db.lookup import Match, heads_of, ranked
from qla_jit.db.records import BestRow
from qla_jit.schedule import Schedule
from qla_jit.tune.replay import ReplayEvaluator
from qla_jit.tune.replay_study import NEAR, run_seed
from qla_jit.tune.search import Exhaustive, OptunaSearch, Strategy, first_points
from qla_jit.tune.space import enumerate_space

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.10, 0.25, 0.50)
STRATEGIES = ("random", "optuna", "tpe", "random+near", "tpe+near")
MIN_POINTS = 9  # a quarter of fewer is the default and one guess


@dataclass(frozen=True)
class Result:
    """One strategy on one space with one budget.  Losses: time over the exhaustive best, minus 1, over the seeds.

    near_points: points of the space within 2 % of its best.  hits: share of the seeds that end within 2 %.
    """

    kernel: str
    heads: str
    workload: str
    points: int
    near_points: int
    strategy: str
    share: float
    trials: int
    hits: float
    median_loss: float
    worst_loss: float


class PlainOptuna(OptunaSearch):
    """TPE with ten startup trials drawn by Optuna and each parameter modelled alone."""

    def __init__(self, points: tuple[Schedule, ...], seed: int, first: list[Schedule]):
        super().__init__(points, seed, first)
        self._first = tuple(first)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed)


def budget(points: int, share: float) -> int:
    """Trials that a share of the points allows: rounded down, at least the default."""
    return max(1, int(points * share))


def neighbours(rows: Iterable[BestRow], problem: Problem, workload: str) -> list[Match]:
    """The rows that a database without this problem would offer for it."""
    return ranked(problem, (("shipped", row) for row in rows if row.problem != problem), workload)


def make(name: str, points: tuple[Schedule, ...], seed: int, near: list[Match]) -> Strategy:
    base, _, seeded = name.partition("+")
    kind = {"random": Exhaustive, "optuna": PlainOptuna, "tpe": OptunaSearch}[base]
    return kind(points, seed, first_points(points, near if seeded else ()))


@cache
def recording(files: tuple[Path, ...]) -> ReplayEvaluator:
    """All files as one: a problem that two configurations share was recorded with the first of them only."""
    return ReplayEvaluator([t for file in files for t in jsonl.read(file).trials], "the recorded sweeps")


def study_space(
    files: tuple[Path, ...], rows_file: Path, problem: Problem, workload: str, strategy: str, seeds: int
) -> list[Result]:
    """One strategy on one recorded space, all budgets."""
    evaluator = recording(files)
    points = evaluator.space(enumerate_space(problem), workload).points
    trials = [evaluator.evaluate(problem, workload, p) for p in points]
    times = [t.median_us for t in trials if t.status == "ok"]
    budgets = [budget(len(points), share) for share in SHARES]
    near = neighbours(jsonl.read(rows_file).best, problem, workload)
    # Each budget is a prefix of the next: a strategy does not know when it will be stopped.
    runs = [
        run_seed(make(strategy, points, seed, near), evaluator, problem, workload, min(times), max(budgets)).losses
        for seed in range(seeds)
    ]
    columns = [[run[count - 1] for run in runs] for count in budgets]
    return [
        Result(
            kernel=problem.kernel,
            heads=heads_of(problem),
            workload=workload,
            points=len(points),
            near_points=sum(t <= (1 + NEAR) * min(times) for t in times),
            strategy=strategy,
            share=share,
            trials=trials,
            hits=statistics.mean(loss <= NEAR for loss in column),
            median_loss=round(statistics.median(column), 4),
            worst_loss=round(max(column), 4),
        )
        for share, trials, column in zip(SHARES, budgets, columns)
    ]


def provenance(files: Iterable[Path], seeds: int) -> dict:
    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "kind": "run",
        "date": date.today().isoformat(),
        "commit": git("rev-parse", "--short", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--", "qla_jit", "templates", "tools", "tuning_db")),
        "command": " ".join(["tools/search_study.py", *sys.argv[1:]]),
        "optuna": optuna.__version__,
        "seeds": f"0..{seeds - 1}",
        "files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in files},
        "unit": "loss = best time found / exhaustive best - 1",
    }


def table(results: Iterable[Result]) -> str:
    """Markdown: one line for each kernel and strategy, over its spaces and seeds; losses and goal at 25 %."""
    lines = [
        "| kernel | spaces × points | strategy | within 2 % after 10 % | 25 % | 50 % "
        "| spaces with ≥ 90 % at 25 % | median loss | worst loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple, dict[float, list[Result]]] = {}
    for r in results:
        groups.setdefault((r.kernel, r.strategy), {}).setdefault(r.share, []).append(r)
    for (kernel, strategy), by_share in groups.items():
        quarter = by_share[0.25]
        points = sorted({r.points for r in quarter})
        hits = " | ".join(f"{statistics.mean(r.hits for r in by_share[share]):.0%}" for share in SHARES)
        lines.append(
            f"| {kernel} | {len(quarter)} × {'–'.join(map(str, dict.fromkeys((points[0], points[-1]))))} "
            f"| {strategy} | {hits} | {sum(r.hits >= 0.9 for r in quarter)} "
            f"| {statistics.median(r.median_loss for r in quarter):.1%} | {max(r.worst_loss for r in quarter):.1%} |"
        )
    return "\n".join(lines)


def read_results(path: Path) -> list[Result]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Result(**{k: v for k, v in line.items() if k != "kind"}) for line in lines if line["kind"] == "row"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--sweeps", type=Path, default=ROOT / "tuning_db" / "sweeps")
    parser.add_argument("--rows", type=Path, default=ROOT / "tuning_db" / "sm90.jsonl")
    parser.add_argument("--kernels", default="fused_forward,kkt_inverse")
    parser.add_argument("--min-points", type=int, default=MIN_POINTS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "perf" / "search_study.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table of --out and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(read_results(options.out)))
        return 0
    files = tuple(sorted(options.sweeps.glob("*.jsonl")))
    evaluator, spaces = recording(files), []
    for problem, workload in evaluator.recorded():
        large = len(evaluator.space(enumerate_space(problem), workload).points) >= options.min_points
        if problem.kernel in options.kernels.split(",") and large:
            spaces.append((problem, workload))
    spaces.sort(key=lambda s: options.kernels.index(s[0].kernel))
    results: dict[tuple, list[Result]] = {}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {
            pool.submit(study_space, files, options.rows, *space, strategy, options.seeds): (space, strategy)
            for space in spaces
            for strategy in STRATEGIES
        }
        for future in track(as_completed(futures), "strategies on spaces", total=len(futures)):
            results[futures[future]] = future.result()
    ordered = [r for space in spaces for strategy in STRATEGIES for r in results[space, strategy]]
    lines = [provenance((*files, options.rows), options.seeds), *({"kind": "row", **asdict(r)} for r in ordered)]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
