"""Stand-ins for the tuning tests: a template with a known best point, trials, and an evaluator without a GPU."""

from __future__ import annotations

import sqlite3
import textwrap
import time
from contextlib import closing
from pathlib import Path

from qla_jit import registry
from qla_jit.config import OpConfig
from qla_jit.db.lookup import family
from qla_jit.db.records import BestRow, CostModel, Environment, Times, Trial
from qla_jit.db.store import Store
from qla_jit.schedule import Parameter, Role, Rule, Schedule
from qla_jit.template import SharedBuffer, Template, Work
from qla_jit.tune.evaluate import now

ENVIRONMENT = Environment("Fake H200", "sm90", 132, "580.1", "13.0", "0.1.15", "2.11.0")
DIGEST = "d" * 64
A, B, C = tuple(range(4)), tuple(range(5)), ("p", "q", "r", "s", "t", "u")


def sum_is_even(problem, schedule, arch):
    total = schedule["a"] + schedule["b"]
    return None if total % 2 == 0 else f"a + b = {total}"


def fake_template(name="fake", kernel="fused_forward", choices=(A, B, C), archs=("sm90",)) -> Template:
    """4 × 5 × 6 points, of which the 60 with an even a + b are feasible; more `choices` make it larger."""
    return Template(
        kernel=kernel,
        name=name,
        archs=archs,
        preferred=archs,
        parameters=tuple(Parameter(n, c, c[0], n) for n, c in zip("abc", choices)),
        rules=(Rule("sum_is_even", sum_is_even),),
        roles=lambda p, s: (Role("all", 4, 64, "everything"),),
        buffers=lambda p, s: (SharedBuffer("x", 128, 2),),
        work=lambda p, s: Work(1, 1, 1),
        prim_func=lambda p, s: None,
        sources=(),
    )


def use_templates(monkeypatch, *templates: Template, digest: str = DIGEST) -> None:
    named = {t.name: t for t in templates}
    monkeypatch.setattr(registry, "templates", lambda: named)
    monkeypatch.setattr(registry, "digest", lambda name: (registry.get_template(name), digest)[1])
    for module in ("sweep", "board"):
        monkeypatch.setattr(f"qla_jit.tune.{module}.digest", lambda name: digest)


def problem(num_heads=16, num_value_heads=64, kernel="fused_forward", **changes):
    chunk_size = changes.pop("chunk_size", 64)
    return OpConfig(num_heads, num_value_heads, **changes).problem(kernel, chunk_size)


def point(a=0, b=0, c="p", template="fake") -> Schedule:
    return Schedule.of(template, {"a": a, "b": b, "c": c})


def time_us(schedule: Schedule) -> float:
    """Least at a=2, b=4, c=r; the default (0, 0, p) is far from it."""
    return 100.0 + 10 * abs(schedule["a"] - 2) + 5 * abs(schedule["b"] - 4) + 3 * abs(ord(schedule["c"]) - ord("r"))


def trial(schedule=None, status="ok", median=100.0, problem_=None, workload="8192x4", **changes) -> Trial:
    values = dict(
        problem=problem_ or problem(),
        schedule=schedule or point(),
        workload=workload,
        template_digest=DIGEST,
        environment=ENVIRONMENT,
        status=status,
        reason="" if status == "ok" else f"because {status}",
        samples_us=(median - 1, median, median + 1) if status == "ok" else (),
        error=1e-3 if status == "ok" else None,
        registers=168,
        smem_bytes=1024,
        local_bytes=0,
        times=Times(1.5, 0.25, 0.125, 0.0625, 0),
        created="2026-01-01T00:00:00.000000+00:00",
    )
    return Trial(**{**values, **changes})


def best(schedule=None, problem_=None, workload="8192x4", median=80.0, **changes) -> BestRow:
    values = dict(
        problem=problem_ or problem(),
        workload=workload,
        schedule=schedule or point(2, 4, "r"),
        median_us=median,
        default_median_us=100.0,
        template_digest=DIGEST,
        environment=ENVIRONMENT,
        trials=60,
        created="2026-01-01T00:00:00.000000+00:00",
    )
    return BestRow(**{**values, **changes})


def cost_model(schedule=None, problem_=None, coefficients=(2.0, 0.05, 6.0), **changes) -> CostModel:
    asked = problem_ or problem()
    values = dict(
        problem=family(asked) if changes.get("form", "work") == "work" else asked,
        schedule=schedule or point(),
        form="work",
        coefficients=coefficients,
        rows=12,
        loo_error=0.02,
        loo_p90=0.05,
        fitted_on="f" * 64,
        template_digest=DIGEST,
        environment=ENVIRONMENT,
        created="2026-01-01T00:00:00.000000+00:00",
    )
    return CostModel(**{**values, **changes})


GONE = '{"arch":"sm90","chunk_size":64,"kernel":"gone","num_value_heads":64}'


def add_rows_of_a_gone_kernel(path: Path) -> Path:
    """Two best rows and a trial of a kernel that this version does not have, as a version that had it stored them."""
    other = problem(1, 1)
    with Store(path) as store:
        store.add(trials=[trial(problem_=other)], best=[best(problem_=other), best(problem_=other, workload="*")])
    with closing(sqlite3.connect(path)) as connection, connection:
        change = "UPDATE problem SET kernel = 'gone', body = ? WHERE json_extract(body, '$.num_heads') = 1"
        assert connection.execute(change, (GONE,)).rowcount == 1
    return path


def with_a_gone_kernel(text: str) -> str:
    """JSONL of records with the kernel of all of them renamed."""
    return text.replace('"kernel":"fused_forward"', '"kernel":"gone"')


class FakeEvaluator:
    """Answers from `time_us`; remembers what it was asked.  ``statuses`` maps a schedule to a failure."""

    queued = 0
    lanes = 1

    def __init__(self, statuses=None, width=1, stop_after=None, delay_s=0.0, times=time_us):
        self.asked: list[Schedule] = []
        self.raced: list[list[Schedule]] = []
        self.environment = ENVIRONMENT
        self.width = width
        self._statuses = statuses or {}
        self._stop_after = stop_after
        self._delay_s = delay_s
        self._times = times

    def space(self, space, workload):
        return space

    def prepare(self, problem, schedules, urgent=False):
        pass

    def ready(self, problem, schedule):
        return True

    def ended(self, problem):
        """Nothing was prepared."""

    def evaluate(self, problem, workload, schedule, deadline=None, search_s=0.0):
        if self._stop_after is not None and len(self.asked) >= self._stop_after:
            raise KeyboardInterrupt
        self.asked.append(schedule)
        time.sleep(self._delay_s)
        status = self._statuses.get(schedule, "ok")
        return trial(schedule, status, self._times(schedule), problem, workload, created=now())

    def race(self, problem, workload, schedules, rounds):
        self.raced.append(list(schedules))
        return [trial(s, "ok", self._times(s), problem, workload, phase="final", created=now()) for s in schedules]

    def close(self):
        pass


def script(folder, name: str, text: str) -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)
