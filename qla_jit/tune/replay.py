"""Recorded sweeps behind the measuring interface: search, finals, report and their tests run with no GPU.

A point that was not recorded raises ReplayMissError; it is never guessed from its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from ..config import Problem
from ..db import jsonl
from ..db.records import Environment, Trial
from ..errors import DatabaseError, ReplayMissError
from ..schedule import Schedule
from .space import Space


def shipped_sweeps(arch: str = "") -> list[Path]:
    """The recorded sweeps of the package, all or those of an arch."""
    folder = resources.files("qla_jit.tuning_db").joinpath("sweeps")
    names = (Path(str(file)) for file in folder.iterdir() if file.name.endswith(".jsonl"))
    return sorted(path for path in names if path.name.startswith(f"{arch}_" if arch else ""))


@functools.cache
def shipped_trials(arch: str) -> tuple[Trial, ...]:
    """The trials of all shipped sweeps of an arch."""
    return tuple(trial for path in shipped_sweeps(arch) for trial in jsonl.read(path).trials)


class ReplayEvaluator:
    """Serves the trials of a JSONL file: the last of each point, its race where one was recorded."""

    width = 1
    lanes = 1
    queued = 0

    def __init__(self, trials: Iterable[Trial], name: str = "recording"):
        self._name = name
        self._trials: dict[tuple, Trial] = {}
        for trial in trials:
            self._trials[trial.problem, trial.workload, trial.schedule, trial.phase] = trial
        if not self._trials:
            raise DatabaseError(f"a recorded sweep must hold trials, but {name} has none; record one with --record.")

    @classmethod
    def from_file(cls, path: str | Path) -> ReplayEvaluator:
        return cls(jsonl.read(path).trials, str(path))

    @property
    def environment(self) -> Environment:
        return next(iter(self._trials.values())).environment

    def recorded(self) -> list[tuple[Problem, str]]:
        """(problem, workload) of everything recorded, in file order."""
        return list(dict.fromkeys((problem, workload) for problem, workload, _, _ in self._trials))

    def points(self, problem: Problem, workload: str) -> list[Schedule]:
        """Schedules with a recorded search trial, in file order; none where the problem was not recorded on it."""
        return [s for p, w, s, phase in self._trials if (p, w, phase) == (problem, workload, "search")]

    def space(self, space: Space, workload: str) -> Space:
        points = self.points(space.problem, workload)
        if not points:
            known = sorted({f"{p.kernel} heads {p.num_heads}:{p.num_value_heads} {w}" for p, w in self.recorded()})
            raise ReplayMissError(
                f"trials of {space.problem.kernel} on {workload} must be recorded in {self._name}, but it holds only "
                f"{known[:6]}; ask for one of those, or record this one on a GPU with --record."
            )
        return space.restricted(points)

    def prepare(self, problem: Problem, schedules: Iterable[Schedule], urgent: bool = False) -> None:
        """Recorded kernels need no compiler."""

    def ready(self, problem: Problem, schedule: Schedule) -> bool:
        return True

    def ended(self, problem: Problem) -> None:
        """Recorded times take no preparation."""

    def evaluate(
        self,
        problem: Problem,
        workload: str,
        schedule: Schedule,
        deadline: float | None = None,
        search_s: float = 0.0,
    ) -> Trial:
        return self._find(problem, workload, schedule, "search")

    def race(self, problem: Problem, workload: str, schedules: Sequence[Schedule], rounds: int) -> list[Trial]:
        found = []
        for schedule in schedules:
            if (problem, workload, schedule, "final") in self._trials:
                found.append(self._find(problem, workload, schedule, "final"))
            else:
                found.append(replace(self._find(problem, workload, schedule, "search"), phase="final"))
        return found

    def _find(self, problem: Problem, workload: str, schedule: Schedule, phase: str) -> Trial:
        try:
            return self._trials[problem, workload, schedule, phase]
        except KeyError:
            raise ReplayMissError(
                f"a trial of {schedule} for {problem.kernel} on {workload} must be recorded, but {self._name} has "
                f"none; record it on a GPU with --record."
            ) from None

    def close(self) -> None:
        """Nothing is open."""
