"""What a report shows, gathered from records alone: panels per problem and workload, best rows, failures, provenance.

Trials of one card are never mixed with those of another, nor those of two sources of a template: the newest source
counts, older trials are only counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import registry
from ..arch import ARCHS
from ..config import KERNELS, Problem
from ..db import Database
from ..db.lookup import is_current
from ..db.merge import read_source
from ..db.records import ALL_WORKLOADS, BestRow, CostModel, Environment, Trial
from ..errors import UnsupportedError
from ..model.observation import observations
from ..schedule import Schedule
from .boundary import Boundary, boundaries
from .finals import best_row, overall_row
from .report_models import plain_models


@dataclass(frozen=True)
class Panel:
    """One problem on one workload on one card: the search trials in the order they were made, the race, the default.

    default: None where it is not among the trials.  older: trials of older template sources, left out.
    """

    problem: Problem
    workload: str
    environment: Environment
    trials: tuple[Trial, ...]
    raced: tuple[Trial, ...] = ()
    default: Schedule | None = None
    older: int = 0

    @property
    def ran(self) -> list[Trial]:
        return [t for t in self.trials if t.status == "ok"]

    @property
    def best(self) -> Trial | None:
        return min(self.ran, key=lambda t: t.median_us, default=None)

    @property
    def default_trial(self) -> Trial | None:
        return next((t for t in self.trials if t.schedule == self.default and t.status == "ok"), None)

    @property
    def templates(self) -> list[str]:
        return list(dict.fromkeys(t.schedule.template for t in self.trials))


@dataclass(frozen=True)
class BestLine:
    """A best row, the layer or file that holds it, and whether its template's source is today's (None: gone)."""

    row: BestRow
    layer: str
    current: bool | None

    @property
    def state(self) -> str:
        return {True: "current", False: "stale", None: "template gone"}[self.current]


@dataclass(frozen=True)
class Failure:
    """Trials that failed alike.  reason: its first line, with numbers replaced so that like failures meet."""

    kernel: str
    status: str
    reason: str
    count: int
    example: Trial


@dataclass(frozen=True)
class Source:
    """One source of one template among the records."""

    template: str
    digest: str
    current: bool | None
    trials: int
    best_rows: int


@dataclass
class ReportData:
    """Everything on the page.  sources: files that were read.  models: cost-model fits in plain form.  planes: where
    splitting pays, of operators with models of its kernels."""

    sources: list[str]
    trials: list[Trial] = field(default_factory=list)
    best: list[BestLine] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    models: list[dict] = field(default_factory=list)
    planes: list[Boundary] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        found = [*(p.problem for p in self.panels), *(line.row.problem for line in self.best)]
        return sorted(dict.fromkeys(found), key=problem_order)

    @property
    def environments(self) -> list[Environment]:
        found = {e.id: e for e in (*(t.environment for t in self.trials), *(b.row.environment for b in self.best))}
        return [found[key] for key in sorted(found)]

    @property
    def newest(self) -> str:
        """When the newest record was made; empty where none is dated."""
        return max([*(t.created for t in self.trials), *(b.row.created for b in self.best)], default="")


def problem_order(problem: Problem) -> tuple:
    kernel = -KERNELS.index(problem.kernel)
    sizes = (problem.head_dim_k, problem.head_dim_v, problem.num_heads, problem.num_value_heads, problem.chunk_size)
    return problem.arch, kernel, *((size or 0) for size in sizes), str(problem)


def from_database(db: Database, arch: str | None = None) -> ReportData:
    """The user's trials, and the best rows of both layers; arch: only of that one."""
    archs = [arch] if arch else list(ARCHS)
    trials = [t for t in db.trials() if t.problem.arch in archs]
    best = [_line(row, layer) for name in archs for layer, row in db.best_rows(name)]
    data = ReportData([f"{db.path} over the shipped rows"], trials, best, panels_of(trials))
    data.left_out = dict(db.left_out())
    fits = dict.fromkeys(fit for problem in data.problems for fit in db.fits(problem))
    data.models = plain_models(fits, trials, [line.row for line in best])
    data.planes = _planes(best, fits, trials)
    return data


def from_files(paths: Sequence[str | Path], arch: str | None = None) -> ReportData:
    """The records of JSONL or SQLite files; where a file has races but no best rows, the rows that they decide."""
    records = [read_source(path) for path in paths]
    trials = list({t.uid: t for r in records for t in r.trials if arch in (None, t.problem.arch)}.values())
    panels = panels_of(trials)
    best = [
        _line(row, Path(path).name)
        for path, r in zip(paths, records)
        for row in r.best
        if arch in (None, row.problem.arch)
    ]
    known = {(line.row.problem, line.row.workload) for line in best}
    decided = [row for row in decided_rows(panels) if (row.problem, row.workload) not in known]
    best += [_line(row, "recorded race") for row in decided]
    left_out = sum((r.left_out for r in records), Counter())
    fits = [fit for r in records for fit in r.fits if arch in (None, fit.problem.arch)]
    models = plain_models(fits, trials, [line.row for line in best])
    planes = _planes(best, fits, trials)
    return ReportData([str(path) for path in paths], trials, best, panels, models, planes, dict(left_out))


def _planes(best: Sequence[BestLine], fits: Iterable[CostModel], trials: Sequence[Trial]) -> list[Boundary]:
    rows = [(line.layer, line.row) for line in best]
    return boundaries(rows, fits, observations(trials, [row for _, row in rows]))


def _line(row: BestRow, layer: str) -> BestLine:
    return BestLine(row, layer, is_current(row))


def filtered(data: ReportData, kernels: Iterable[str] = (), heads: Iterable[str] = ()) -> ReportData:
    """Only some kernels and head counts (``H:HV``); empty means all."""
    kernels, heads = set(kernels), set(heads)

    def has_heads(problem: Problem) -> bool:
        if problem.num_heads is None:  # the kernel knows nothing of key heads
            return any(text.endswith(f":{problem.num_value_heads}") for text in heads)
        return f"{problem.num_heads}:{problem.num_value_heads}" in heads

    def kept(problem: Problem) -> bool:
        return (not kernels or problem.kernel in kernels) and (not heads or has_heads(problem))

    return replace(
        data,
        trials=[t for t in data.trials if kept(t.problem)],
        best=[line for line in data.best if kept(line.row.problem)],
        panels=[p for p in data.panels if kept(p.problem)],
        planes=[p for p in data.planes if kept(p.forward)],
    )


def panels_of(trials: Iterable[Trial]) -> list[Panel]:
    """Trials by problem, workload and card, those of each template's newest source alone."""
    groups: dict[tuple, list[Trial]] = {}
    for trial in sorted(trials, key=lambda t: t.created):
        groups.setdefault((trial.problem, trial.workload, trial.environment), []).append(trial)
    panels = [_panel(*key, group) for key, group in groups.items()]
    order = {workload: i for i, workload in enumerate(dict.fromkeys(p.workload for p in panels))}
    return sorted(panels, key=lambda p: (problem_order(p.problem), order[p.workload], p.environment.id))


def _panel(problem: Problem, workload: str, environment: Environment, trials: list[Trial]) -> Panel:
    newest = {t.schedule.template: t.template_digest for t in trials}  # in order of time: the last one stays
    known = [t for t in trials if newest[t.schedule.template] == t.template_digest]
    search = {t.schedule: t for t in known if t.phase == "search"}
    raced = {t.schedule: t for t in known if t.phase == "final"}
    return Panel(
        problem,
        workload,
        environment,
        tuple(search.values()),
        tuple(raced.values()),
        _default(problem, list(search.values())),
        len(trials) - len(known),
    )


def _default(problem: Problem, trials: Sequence[Trial]) -> Schedule | None:
    """The template's default among the trials: today's, or for an older source the first, as in every sweep."""
    if not trials:
        return None
    try:
        default = registry.select(problem).default(problem)
    except UnsupportedError:
        default = None
    first = trials[0]
    if any(t.schedule == default for t in trials) and default.template == first.schedule.template:
        return default
    return None if source_is_current(first.schedule.template, first.template_digest) else first.schedule


def decided_rows(panels: Sequence[Panel]) -> list[BestRow]:
    """The rows that the recorded races decide, as a sweep would store them."""
    rows, groups = [], {}
    for panel in panels:
        if panel.raced and panel.default is not None:
            row = best_row(panel.raced, panel.default, len(panel.trials))
            if row is not None:
                rows.append(replace(row, created=max(t.created for t in panel.raced)))
            groups.setdefault((panel.problem, panel.environment), []).append(panel)
    for group in groups.values():
        races = {p.workload: p.raced for p in group}
        row = overall_row(races, group[0].default, sum(len(p.trials) for p in group))
        if row is not None:
            rows.append(replace(row, created=max(t.created for p in group for t in p.raced)))
    return sorted(rows, key=lambda r: (problem_order(r.problem), r.workload != ALL_WORKLOADS, r.workload))


_NUMBERS = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


def failures(trials: Iterable[Trial]) -> list[Failure]:
    """Failed trials by kernel, status and reason, the most frequent first."""
    groups: dict[tuple, list[Trial]] = {}
    for trial in trials:
        if trial.status != "ok":
            first = (trial.reason.splitlines() or [""])[0][:200]
            groups.setdefault((trial.problem.kernel, trial.status, _NUMBERS.sub("…", first)), []).append(trial)
    found = [Failure(*key, len(group), group[0]) for key, group in groups.items()]
    return sorted(found, key=lambda f: (-f.count, f.kernel, f.status, f.reason))


def template_sources(data: ReportData) -> list[Source]:
    """Which sources of which templates the records were measured with."""
    trials = Counter((t.schedule.template, t.template_digest) for t in data.trials)
    best = Counter((b.row.schedule.template, b.row.template_digest) for b in data.best)

    keys = sorted({*trials, *best})
    return [Source(*key, source_is_current(*key), trials[key], best[key]) for key in keys]


def source_is_current(template: str, digest: str) -> bool | None:
    """Whether that is the template's source today; None where there is no such template any more."""
    return registry.digest(template) == digest if template in registry.templates() else None
