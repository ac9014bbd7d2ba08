#!/usr/bin/env python3
"""Which tuned row should answer for heads that nobody tuned: by recorded sweeps, each head configuration left out once.

    python tools/nearest_study.py [FILE ...]

Its answer is the best row of the nearest other configuration whose schedule can run there, and its loss is that
schedule's time over the best of the exhaustive sweep.  Per kernel and weight of the value heads per key head
(`qla_jit.db.lookup`): the mean and the largest loss over configurations and workloads; * marks the weight in use, and
"heads" is Σ |Δ log2| over key and value heads.

Files: recordings whose every space is exhausted; by default those of the forward and the backward at d = 128.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from qla_jit.db import lookup
from qla_jit.db.jsonl import loads
from qla_jit.db.records import Trial

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    *sorted((ROOT / "tuning_db" / "sweeps").glob("sm90_*.jsonl")),
    ROOT / "docs" / "perf" / "heads_sweep_h200.jsonl",
    ROOT / "docs" / "perf" / "backward_sweep_h200.jsonl",
)
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0)


def times_of(trials: list[Trial]) -> dict:
    """{kernel: {workload: {problem: {schedule: µs}}}} of the search's trials that were right."""
    found: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for t in trials:
        if t.phase == "search" and t.status == "ok":
            found[t.problem.kernel][t.workload][t.problem][t.schedule] = t.median_us
    return found


def by_heads(a, b) -> float:
    """Σ |Δ log2| over key and value heads."""
    return abs(math.log2(a.num_heads / b.num_heads)) + abs(math.log2(a.num_value_heads / b.num_value_heads))


def losses(by_workload: dict, distance: Callable = lookup.distance) -> list[float]:
    """Loss of every (workload, problem) that is left out."""
    found = []
    for times in by_workload.values():
        for problem, known in times.items():
            others = sorted((p for p in times if p != problem), key=lambda p: (distance(problem, p), str(p)))
            taken = (min(times[p], key=times[p].get) for p in others)
            found += [known[s] / min(known.values()) - 1 for s in [next((s for s in taken if s in known), None)] if s]
    return found


def row(kernel: str, weight: str, lost: list[float]) -> str:
    return f"| `{kernel}` | {weight} | {len(lost)} | {statistics.mean(lost):.2%} | {max(lost):.1%} |"


def main(files: list[str]) -> None:
    trials = [t for path in map(Path, files or FILES) for t in loads(path.read_text(), str(path)).trials]
    print("| kernel | weight | left out | mean loss | worst |\n| --- | --- | --- | --- | --- |")
    for kernel, by_workload in times_of(trials).items():
        name = "KEY_HEAD_WEIGHT" if kernel in lookup.KEY_HEAD_KERNELS else "VALUE_HEAD_WEIGHT"
        for weight in WEIGHTS:
            mark = " *" if weight == getattr(lookup, name) else ""
            with mock.patch.object(lookup, name, weight):
                lost = losses(by_workload)
            print(row(kernel, f"{weight:g}{mark}", lost))
        print(row(kernel, "heads", losses(by_workload, by_heads)))


if __name__ == "__main__":
    main(sys.argv[1:])
