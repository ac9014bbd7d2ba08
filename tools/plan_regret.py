#!/usr/bin/env python3
"""How far the plan's choice of a `fused_forward` schedule is from the fastest recorded one, with no GPU.

    python tools/plan_regret.py

Per recorded (heads, workload): the fastest median in microseconds, and how much slower the schedule is that `plan`
chooses from the shipped rows, by plain rates and by the shipped cost models.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from qla_jit import plan
from qla_jit.db import jsonl, open_db
from qla_jit.workload import lengths_of

SWEEPS = Path(__file__).resolve().parent.parent / "tuning_db" / "sweeps"


def main() -> None:
    db = open_db()
    print("| heads | workload | fastest µs | plain rates | cost models |\n| --- | --- | --- | --- | --- |")
    for path in sorted(SWEEPS.glob("*.jsonl")):
        records = jsonl.loads(path.read_text(), str(path))
        sm_count = next(iter(records.environments.values())).sm_count
        trials = [
            t for t in records.trials
            if t.problem.kernel == "fused_forward" and t.phase == "search" and t.status == "ok"
        ]  # fmt: skip
        for workload in dict.fromkeys(t.workload for t in trials):
            times = {t.schedule: statistics.median(t.samples_us) for t in trials if t.workload == workload}
            problem, fastest = trials[0].problem, min(times.values())
            match = db.lookup(problem)
            cells = []
            for fits in ((), db.fits(problem)):
                options = plan.options(problem, db.siblings(match), fits)
                chosen = plan.choose(problem, options, lengths_of(workload), sm_count, match.schedule)
                cells.append(f"+{100 * (times[chosen] / fastest - 1):.1f} %")
            heads = f"{problem.num_heads}/{problem.num_value_heads}"
            print(f"| {heads} | {workload} | {fastest:.1f} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
