"""The measuring interface: `Evaluator`, and `LiveEvaluator` that compiles and runs on the card at hand.

Search, finals and the sweep know only `Evaluator`, so the same code runs on recorded trials (`replay`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime, timezone
from typing import Protocol

from ..config import Problem
from ..db.records import Environment, Times, Trial
from ..schedule import Schedule
from ..spec import KernelSpec
from ..workload import lengths_of
from .compile_pool import Compiled, CompilePool
from .space import Space
from .worker import Worker

SAMPLES = 40
RACE_SAMPLES = 20


class OutOfTimeError(Exception):
    """The budget ended while a trial waited for its compiler; nothing was learned about the schedule."""


class Evaluator(Protocol):
    """Turns a point into a `Trial`; never raises for what a schedule does wrong."""

    width: int  # points worth asking for ahead of measuring

    @property
    def environment(self) -> Environment: ...

    @property
    def queued(self) -> int:
        """Kernels that wait for a compiler."""
        ...

    def space(self, space: Space, workload: str) -> Space:
        """The part of a space that can be evaluated."""
        ...

    def prepare(self, problem: Problem, schedules: Iterable[Schedule], urgent: bool = False) -> None:
        """Announce points, so that their compilation may begin."""
        ...

    def ready(self, problem: Problem, schedule: Schedule) -> bool:
        """Whether `evaluate` would not wait for a compiler."""
        ...

    def evaluate(
        self,
        problem: Problem,
        workload: str,
        schedule: Schedule,
        deadline: float | None = None,
        search_s: float = 0.0,
    ) -> Trial:
        """Compile, verify and measure one point.  OutOfTimeError when ``deadline`` (monotonic) ends the wait for the
        compiler.  search_s: what choosing the point took, for the record."""
        ...

    def race(self, problem: Problem, workload: str, schedules: Sequence[Schedule], rounds: int) -> list[Trial]:
        """Measure verified points in turns, ``rounds`` times, and return one trial of phase ``final`` for each."""
        ...

    def close(self) -> None: ...


def now() -> str:
    """UTC time of a record, to the microsecond."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


class LiveEvaluator:
    """Compiles in a pool, runs in a killable process on one card."""

    def __init__(self, pool: CompilePool, worker: Worker, seed: int = 0, samples: int = SAMPLES):
        self._pool = pool
        self._worker = worker
        self._seed = seed
        self._samples = samples
        self._sources: dict[tuple[Problem, str, str], Schedule] = {}
        self.width = max(2, pool.jobs)

    @property
    def environment(self) -> Environment:
        return self._worker.environment

    @property
    def queued(self) -> int:
        return self._pool.queued

    def space(self, space: Space, workload: str) -> Space:
        return space

    def prepare(self, problem: Problem, schedules: Iterable[Schedule], urgent: bool = False) -> None:
        for schedule in schedules:
            self._pool.submit(KernelSpec(problem, schedule), urgent)

    def ready(self, problem: Problem, schedule: Schedule) -> bool:
        return self._pool.submit(KernelSpec(problem, schedule)).done()

    def evaluate(
        self,
        problem: Problem,
        workload: str,
        schedule: Schedule,
        deadline: float | None = None,
        search_s: float = 0.0,
    ) -> Trial:
        started = time.monotonic()
        spec = KernelSpec(problem, schedule)
        compiled = self._compiled(spec, deadline)
        if compiled.status != "ok":
            answer = {"status": compiled.status, "reason": compiled.reason}
        else:
            key = (problem, workload, compiled.source_sha256)
            twin = self._sources.get(key) if compiled.source_sha256 else None
            if twin not in (None, schedule):
                answer = {"status": "duplicate", "reason": f"lowers to the same CUDA text as {twin}"}
            else:
                answer = self._run(spec, workload, compiled, self._samples, verify=True)
                if answer["status"] == "ok":
                    self._sources[key] = schedule
        return self._trial(spec, workload, compiled, answer, started, search_s=search_s)

    def race(self, problem: Problem, workload: str, schedules: Sequence[Schedule], rounds: int) -> list[Trial]:
        started = time.monotonic()
        specs = [KernelSpec(problem, schedule) for schedule in schedules]
        compiled = [self._compiled(spec, None) for spec in specs]
        answers = [{} if c.status == "ok" else {"status": c.status, "reason": c.reason} for c in compiled]
        for number in range(rounds):
            order = range(len(specs)) if number % 2 == 0 else reversed(range(len(specs)))
            for i in order:
                if answers[i].get("status", "ok") != "ok":
                    continue
                answer = self._run(specs[i], workload, compiled[i], RACE_SAMPLES, verify=number == 0)
                samples = [*answers[i].get("samples_us", ()), *answer.get("samples_us", ())]
                answers[i] = {**answers[i], **{k: v for k, v in answer.items() if v is not None}, "samples_us": samples}
        return [
            self._trial(spec, workload, built, answer, started, phase="final")
            for spec, built, answer in zip(specs, compiled, answers)
        ]

    def _compiled(self, spec: KernelSpec, deadline: float | None) -> Compiled:
        future = self._pool.submit(spec, urgent=True)
        try:
            return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (FutureTimeoutError, CancelledError) as error:
            raise OutOfTimeError(f"{spec} was still compiling") from error

    def _run(self, spec: KernelSpec, workload: str, compiled: Compiled, samples: int, verify: bool) -> dict:
        return self._worker.measure(
            {
                "problem": spec.problem.as_dict(),
                "schedule": spec.schedule.as_dict(),
                "path": compiled.path,
                "lengths": lengths_of(workload),
                "seed": self._seed,
                "samples": samples,
                "verify": verify,
            }
        )

    def _trial(
        self,
        spec: KernelSpec,
        workload: str,
        compiled: Compiled,
        answer: dict,
        started: float,
        phase: str = "search",
        search_s: float = 0.0,
    ) -> Trial:
        verify_s, measure_s = answer.get("verify_s") or 0.0, answer.get("measure_s") or 0.0
        # The compiler ran beside other trials: its time is not part of the time that passed here.
        overhead_s = max(0.0, time.monotonic() - started - verify_s - measure_s)
        ok = answer["status"] == "ok"
        return Trial(
            problem=spec.problem,
            schedule=spec.schedule,
            workload=workload,
            template_digest=spec.template_digest,
            environment=self.environment,
            status=answer["status"],
            reason=answer.get("reason") or "",
            phase=phase,
            samples_us=tuple(answer.get("samples_us") or ()) if ok else (),
            error=answer.get("error"),
            registers=compiled.report.get("registers"),
            smem_bytes=compiled.report.get("smem_bytes"),
            local_bytes=compiled.report.get("local_bytes"),
            times=Times(*(round(t, 6) for t in (compiled.seconds, verify_s, measure_s, search_s, overhead_s))),
            created=now(),
        )

    def close(self) -> None:
        self._worker.close()
        self._pool.close()
