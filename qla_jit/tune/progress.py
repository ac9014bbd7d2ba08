"""Live progress of a sweep in the terminal (rich): trials done and left, best against default, compile queue, time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from ..db.lookup import heads_of
from ..db.records import Trial
from ..schedule import Schedule
from ..spec import KernelSpec
from .compile_pool import Compiled
from .sweep import Listener, Unit

NO_FAILURES = ("ok", "duplicate", "filtered")


def name_of(unit: Unit) -> str:
    chunk = "" if unit.problem.chunk_size == 64 else f" c{unit.problem.chunk_size}"
    return f"{unit.problem.kernel} {heads_of(unit.problem)}{chunk} {unit.workload}"


class ProgressListener(Listener):
    """Draws on ``console`` (stderr, so that stdout stays for --json); a context manager."""

    def __init__(self, console: Console):
        self.console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<36}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._end: float | None = None
        self._tasks: dict[str, TaskID] = {}  # by unit
        self._task = None  # of --compile-only

    def __enter__(self) -> ProgressListener:
        self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()

    def started(self, units: Sequence[Unit], budget_s: float | None) -> None:
        self._end = None if budget_s is None else time.monotonic() + budget_s
        for problem in dict.fromkeys(unit.problem for unit in units):
            space = next(unit.space for unit in units if unit.problem == problem)
            most_first = sorted(space.rejected.items(), key=lambda item: -item[1])
            rejected = ", ".join(f"{count} {rule}" for rule, count in most_first)
            self.console.print(
                f"{problem.kernel} {heads_of(problem)}: {len(space.points)} points of {space.total} to try"
                + (f" (infeasible: {rejected})" if rejected else ""),
                style="dim",
                highlight=False,
            )

    def unit_started(self, unit: Unit, target: int) -> None:
        self._tasks[name_of(unit)] = self._progress.add_task(
            name_of(unit), total=target, completed=len(unit.trials), state=f"{unit.strategy}, waiting for a compiler"
        )

    def trial_done(self, unit: Unit, trial: Trial, queued: int) -> None:
        parts = []
        if unit.best is not None:
            parts.append(f"best {unit.best.median_us:.1f} us")
            if unit.default is not None and unit.default.status == "ok":
                parts.append(f"{unit.default.median_us / unit.best.median_us:.2f}x default")
        filtered = sum(t.status == "filtered" for t in unit.trials)
        failed = sum(t.status not in NO_FAILURES for t in unit.trials)
        counts = {"filtered": filtered, "failed": failed, "compiling": queued}
        parts += [f"{count} {name}" for name, count in counts.items() if count]
        if self._end is not None:
            parts.append(f"{max(0.0, self._end - time.monotonic()):.0f} s left")
        self._progress.update(self._tasks[name_of(unit)], completed=len(unit.trials), state=", ".join(parts))
        if trial.status not in NO_FAILURES:
            self._failed(trial.status, trial.schedule, trial.reason)

    def racing(self, unit: Unit, schedules: Sequence[Schedule]) -> None:
        if self._tasks and schedules:
            self.console.print(f"  racing {len(schedules)} finalists of {name_of(unit)}", style="dim", highlight=False)

    def unit_done(self, unit: Unit) -> None:
        if unit.row is not None:
            gain = "" if unit.row.gain is None else f", {unit.row.gain:.2f}x the default"
            self.console.print(f"  {name_of(unit)}: {unit.row.median_us:.1f} us{gain}", style="green", highlight=False)

    def compiled(self, spec: KernelSpec, result: Compiled, left: int) -> None:
        """One kernel of --compile-only."""
        if self._task is None:
            self._task = self._progress.add_task("compiling", total=left + 1, state="")
        report = result.report
        state = f"{spec.problem.kernel}: {result.status}"
        if report:
            state += f", {report.get('registers')} registers, {report.get('smem_bytes')} B shared"
        self._progress.advance(self._task)
        self._progress.update(self._task, state=state)
        if result.status != "ok":
            self._failed(result.status, spec.schedule, result.reason)

    def _failed(self, status: str, schedule: Schedule, reason: str) -> None:
        text = f"  {status}: {schedule}: {reason.splitlines()[0][:160]}"
        self.console.print(text, style="yellow", highlight=False, markup=False)
