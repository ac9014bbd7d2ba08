#!/usr/bin/env python3
"""Errors of the shipped cost models on rows left out of their fits, pooled over schedules: what a plan can rely on.

    python tools/fit_errors.py [--arch sm90] [FILE.jsonl …]      (recorded sweeps; those of the repository if none)

Per kernel, and over all: rows, median and 90th percentile of |prediction / time − 1|, each row predicted by a fit of
the others of its schedule.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path

from qla_jit.db import jsonl
from qla_jit.db.layers import shipped
from qla_jit.model.fit import left_out_errors
from qla_jit.model.observation import observations

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ("tuning_db/sweeps/*.jsonl", "docs/perf/*_sweep_h200.jsonl")


def pooled(arch: str, files: Iterable[Path]) -> dict[str, list[float]]:
    """Errors by kernel."""
    found, trials = [], []
    for file in files:
        trials += jsonl.loads(file.read_text(encoding="utf-8"), file.name).trials
    found = observations(trials)
    errors: dict[str, list[float]] = {}
    for model in shipped(arch).fits:
        if model.form == "work":
            errors.setdefault(model.problem.kernel, []).extend(left_out_errors(model, found))
    return {kernel: of for kernel, of in errors.items() if of}


def line(name: str, errors: list[float]) -> str:
    """A row of the table."""
    ninth = sorted(errors)[int(0.9 * (len(errors) - 1))]
    return f"| {name} | {len(errors)} | {statistics.median(errors):.1%} | {ninth:.1%} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", default="sm90")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    files = options.files or sorted(file for pattern in RECORDED for file in ROOT.glob(pattern))
    errors = pooled(options.arch, files)
    if not errors:
        parser.error("no row of a shipped cost model is in these files; name recordings of its sweeps")
    print("| kernel | rows | median | 90 % |\n| --- | --- | --- | --- |")
    for kernel, of in sorted(errors.items()):
        print(line(kernel, of))
    print(line("all", [error for of in errors.values() for error in of]))


if __name__ == "__main__":
    main()
