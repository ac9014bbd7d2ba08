"""The measuring interface: `Evaluator`, and `LiveEvaluator` that compiles and runs on the card at hand.

Search, finals and the sweep know only `Evaluator`, so the same code runs on recorded trials (`replay`).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import UTC, datetime
from typing import Protocol

from ..arch import get_arch
from ..config import Problem
from ..db.records import Environment, Times, Trial
from ..model.features import Split
from ..registry import get_template
from ..schedule import Schedule
from ..spec import KernelSpec
from ..workload import workload_of
from .cards import Cards, data_of
from .compile_pool import Compiled, CompilePool
from .roofline import floor_us
from .space import Space
from .static_filter import against
from .worker import Worker, WorkerLostError

SAMPLES = 40
RACE_SAMPLES = 20


class OutOfTimeError(Exception):
    """The budget ended while a trial waited for its compiler; nothing was learned about the schedule."""


class Evaluator(Protocol):
    """Turns a point into a `Trial`; never raises for what a schedule does wrong."""

    width: int  # points worth asking for ahead of measuring
    lanes: int  # calls of `evaluate` that may run side by side, each in a thread of its own

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

    def ended(self, problem: Problem) -> None:
        """Nothing of this problem will be asked for any more."""
        ...

    def close(self) -> None: ...


def now() -> str:
    """UTC time of a record, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class LiveEvaluator:
    """Compiles in a pool, runs in killable processes, one per card.  Safe to share between threads.

    static_filter: leave out what the compiler already says against (see `static_filter.against`).
    """

    def __init__(
        self,
        pool: CompilePool,
        workers: Worker | Sequence[Worker],
        seed: int = 0,
        samples: int = SAMPLES,
        static_filter: bool = True,
    ):
        self._pool = pool
        self._cards = Cards([workers] if isinstance(workers, Worker) else workers)
        self._seed = seed
        self._samples = samples
        self._filters = static_filter
        self._sources: dict[tuple[Problem, str, str], Schedule] = {}
        self._lock = threading.Lock()
        self.lanes = self._cards.count
        self.width = max(2, pool.jobs, 2 * self.lanes)

    @property
    def environment(self) -> Environment:
        return self._cards.environment

    @property
    def lost(self) -> list[str]:
        """Why each card that is no longer used was given up."""
        return self._cards.lost

    @property
    def queued(self) -> int:
        return self._pool.queued

    def space(self, space: Space, workload: str) -> Space:
        return space

    def prepare(self, problem: Problem, schedules: Iterable[Schedule], urgent: bool = False) -> None:
        for schedule in schedules:
            self._pool.submit(KernelSpec(problem, schedule), urgent)
            if self._filters:
                self._pool.submit(_default_of(problem, schedule), urgent)

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
        elif said := self._said_against(spec, compiled, deadline):
            answer = {"status": "filtered", "reason": said}
        else:
            key = (problem, workload, compiled.source_sha256 or spec.digest)
            with self._lock:  # claimed before it runs: its twin may be on another card's way
                twin = self._sources.setdefault(key, schedule)
            if twin != schedule:
                answer = {"status": "duplicate", "reason": f"lowers to the same CUDA text as {twin}"}
            else:
                request = self._request(spec, workload, compiled, self._samples, verify=True)
                answer = _believed(self._cards.measure, request, _floor_us(spec, workload))
                if answer["status"] != "ok":
                    self._sources.pop(key, None)
        return self._trial(spec, workload, compiled, answer, started, search_s=search_s)

    def race(self, problem: Problem, workload: str, schedules: Sequence[Schedule], rounds: int) -> list[Trial]:
        started = time.monotonic()
        specs = [KernelSpec(problem, schedule) for schedule in schedules]
        compiled = [self._compiled(spec, None) for spec in specs]
        data = data_of(self._request(specs[0], workload, compiled[0], RACE_SAMPLES, True)) if specs else None
        while True:  # all of a race is on one card: where that is lost, it starts again on another
            try:
                with self._cards.held(data) as run:
                    answers = self._race(specs, compiled, workload, rounds, run)
                break
            except WorkerLostError:
                if self._cards.closed or not self._cards.count:
                    raise
        return [
            self._trial(spec, workload, built, answer, started, phase="final")
            for spec, built, answer in zip(specs, compiled, answers)
        ]

    def _race(
        self, specs: Sequence[KernelSpec], compiled: Sequence[Compiled], workload: str, rounds: int, run: Callable
    ) -> list[dict]:
        answers = [{} if c.status == "ok" else {"status": c.status, "reason": c.reason} for c in compiled]
        for number in range(rounds):
            order = range(len(specs)) if number % 2 == 0 else reversed(range(len(specs)))
            for i in order:
                if answers[i].get("status", "ok") != "ok":
                    continue
                request = self._request(specs[i], workload, compiled[i], RACE_SAMPLES, verify=number == 0)
                answer = _believed(run, request, _floor_us(specs[i], workload))
                samples = [*answers[i].get("samples_us", ()), *answer.get("samples_us", ())]
                answers[i] = {**answers[i], **{k: v for k, v in answer.items() if v is not None}, "samples_us": samples}
        return answers

    def _said_against(self, spec: KernelSpec, compiled: Compiled, deadline: float | None) -> str:
        """What the compiler says against a kernel, empty where that is nothing."""
        if not self._filters:
            return ""
        default = self._compiled(_default_of(spec.problem, spec.schedule), deadline)
        return "; ".join(map(str, against(compiled.report, default.report, get_arch(spec.problem.arch))))

    def _compiled(self, spec: KernelSpec, deadline: float | None) -> Compiled:
        future = self._pool.submit(spec, urgent=True)
        try:
            return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except (FutureTimeoutError, CancelledError) as error:
            raise OutOfTimeError(f"{spec} was still compiling") from error

    def _request(self, spec: KernelSpec, workload: str, compiled: Compiled, samples: int, verify: bool) -> dict:
        asked = workload_of(spec.problem.kernel, workload)
        return {
            "problem": spec.problem.as_dict(),
            "schedule": spec.schedule.as_dict(),
            "path": compiled.path,
            "lengths": list(asked.lengths),
            "case": asked.case,
            "seed": self._seed,
            "samples": samples,
            "verify": verify,
        }

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
            sm_mhz=answer.get("sm_mhz"),
            memory_mhz=answer.get("memory_mhz"),
        )

    def ended(self, problem: Problem) -> None:
        self._cards.forget({"problem": problem.as_dict()})

    def close(self) -> None:
        self._cards.close()
        self._pool.close()


def _default_of(problem: Problem, schedule: Schedule) -> KernelSpec:
    """The default of a schedule's template: what the static filter compares with."""
    return KernelSpec(problem, get_template(schedule.template).default(problem))


def _floor_us(spec: KernelSpec, workload: str) -> float:
    asked = workload_of(spec.problem.kernel, workload)
    return floor_us(spec.problem, spec.schedule, asked.lengths, Split.of(asked))


def _believed(run: Callable[[dict], dict], request: dict, least_us: float) -> dict:
    """What ``run`` measures; a time below the roofline floor is measured again, and is ``wrong`` if that is no better:
    whatever was timed, it was not the whole kernel."""
    answer = run(request)
    if not _too_fast(answer, least_us):
        return answer
    again = run({**request, "verify": True})
    if not _too_fast(again, least_us):
        return again
    times = [f"{statistics.median(a['samples_us']):.3g}" for a in (answer, again)]
    reason = f"measured {' and then '.join(times)} us, below the roofline floor of {least_us:.3g} us"
    return {**again, "status": "wrong", "reason": reason, "samples_us": []}


def _too_fast(answer: dict, least_us: float) -> bool:
    return answer["status"] == "ok" and statistics.median(answer["samples_us"]) < least_us
