"""What the tuning database says about the kernels of a split and those that it stands in for: schedules and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .config import BACKWARD, CHECKED_SPLITS, DEFAULT_CHUNK_SIZE, FORWARD, SAME_PROGRAM, OpConfig, Pass, Problem
from .db import Database
from .db.lookup import is_current
from .db.records import ALL_WORKLOADS, BestRow, CostModel
from .plan import Option, options
from .registry import candidates, select
from .resources import is_feasible
from .schedule import Schedule


@dataclass(frozen=True)
class SplitModels:
    """What the database says about the kernels of one config's forward or backward, by kernel name.

    kernels: which they are.  problems, schedules: of all of them, as looked up.  options: schedules to choose from with
    their times.  one_wave: of a whole split forward without `kkt_inverse`, where it errs less than the kernels' models.
    """

    problems: Mapping[str, Problem]
    schedules: Mapping[str, Schedule]
    options: Mapping[str, tuple[Option, ...]]
    one_wave: CostModel | None = None
    kernels: Pass = FORWARD

    @property
    def can_split(self) -> bool:
        """Whether every kernel of a split, and those of whole sequences to compare with, have a predicted time."""
        return all(self.options.get(kernel) for kernel in (*self.kernels.whole, *self.kernels.split))

    @classmethod
    def of(
        cls, config: OpConfig, db: Database, chunk_size: int = DEFAULT_CHUNK_SIZE, kernels: Pass = FORWARD
    ) -> SplitModels:
        """Of a config's problems.  Kernels of a split that no template answers there have neither entry."""
        problems, schedules, found, errors = {}, {}, {}, []
        for kernel in (*kernels.before, *kernels.whole, *kernels.after):
            problem = problems[kernel] = config.problem(kernel, chunk_size)
            match = db.lookup(problem)
            schedules[kernel] = match.schedule
            rows, fits = db.siblings(match), db.fits(problem)
            if kernel in BACKWARD.after:
                found[kernel] = tuple(Option(f.schedule, *f.coefficients) for f in fits if f.schedule == match.schedule)
                continue
            fitted = split_options(problem, rows, fits) if kernel in BACKWARD.whole else ()
            found[kernel] = tuple(option for option, _ in fitted) or options(problem, rows, fits)
        for kernel in kernels.split:
            problem = config.problem(kernel, chunk_size)
            if not candidates(problem):
                continue
            match = db.lookup(problem)
            problems[kernel], schedules[kernel] = problem, match.schedule
            fitted = split_options(problem, db.siblings(match), db.fits(problem))
            errors += [fit.loo_error for _, fit in fitted]
            found[kernel] = tuple(option for option, _ in fitted)
            if not fitted and kernel in SAME_PROGRAM:
                found[kernel] = _of_same_program(problem, found.get(SAME_PROGRAM[kernel], ()))
        one_wave = _one_wave(problems, found, db)
        if one_wave is not None and one_wave.loo_error >= max(errors, default=0.0):
            one_wave = None
        return cls(problems, schedules, found, one_wave, kernels)


def _of_same_program(problem: Problem, measured: Sequence[Option]) -> tuple[Option, ...]:
    """The options of the kernel whose program ``problem`` runs, with the times that were measured there, as far as
    `CHECKED_SPLITS` has them.

    Where CTAs share a head as in the template's default, registers are those of the default: what starts a segment
    takes a few.
    """
    template = select(problem)
    default = template.default(problem)
    found = {}
    for option in measured:
        params = dict(option.schedule.params())
        if params.get("dv_split") not in CHECKED_SPLITS.get(problem.kernel, (None,)):
            continue
        if "registers" in params and params["dv_split"] == default["dv_split"]:
            params["registers"] = default["registers"]
        schedule = Schedule.of(template.name, params)
        if is_feasible(problem, schedule):
            found.setdefault(schedule, replace(option, schedule=schedule))
    return tuple(found.values())


def split_options(
    problem: Problem, rows: Sequence[BestRow], fits: Sequence[CostModel]
) -> list[tuple[Option, CostModel]]:
    """The schedules of a kernel of a split or of the backward that a plan chooses from, each with its cost model.

    rows: of one sweep.  fits: of `Database.fits`, the preferred first.  Of schedules that share the work alike among
    CTAs, one: the best over all workloads, else the winner of most, else what most rows of any heads tell of.
    """
    digests = {row.schedule.template: row.template_digest for row in rows}
    fitted: dict[Schedule, CostModel] = {}
    for fit in fits:
        current = digests.get(fit.schedule.template)
        if fit.form == "work" and (is_current(fit) if current is None else fit.template_digest == current):
            fitted.setdefault(fit.schedule, fit)
    wins: dict[Schedule, int] = {}
    for row in rows:
        wins[row.schedule] = wins.get(row.schedule, 0) + (len(rows) if row.workload == ALL_WORKLOADS else 1)
    chosen: dict[tuple, Schedule] = {}
    for schedule in sorted(fitted, key=lambda s: (-wins.get(s, 0), -fitted[s].rows, fitted[s].coefficients[0], str(s))):
        if is_feasible(problem, schedule):
            chosen.setdefault((schedule.template, *map(schedule.params().get, ("columns", "dv_split"))), schedule)
    return [(Option(s, *fitted[s].coefficients), fitted[s]) for s in chosen.values()]


def _one_wave(problems: Mapping[str, Problem], found: Mapping[str, tuple[Option, ...]], db: Database):
    """The one-wave model of a forward of exactly these heads, if the schedule of its last kernel may be chosen."""
    forward = problems.get("segment_forward")
    if forward is None:
        return None
    schedules = {option.schedule for option in found["segment_forward"]}
    fits = (fit for fit in db.fits(forward) if fit.form == "one_wave" and fit.schedule in schedules)
    return next((fit for fit in fits if is_current(fit)), None)
