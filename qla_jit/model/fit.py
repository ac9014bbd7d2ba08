"""`fit_models`: cost models of all schedules from the rows of a database, and the reason for each that is refused.

A model is of one schedule over all head counts of its family: heads, sequences and lengths enter through depth and
CTAs, which is also what lets it predict heads that nobody measured.  Only rows of one template source and one
environment are fitted together.  Where rows name a segment length (parameter `SEGMENT_PARAMETER`), the one-wave form
T = λ₁ L + λ₂ N/L + λ₀ is fitted too, over the schedules that differ in it alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import Problem
from ..db.lookup import family, is_current
from ..db.records import ALL_WORKLOADS, BestRow, CostModel, Environment, Trial, problem_body
from ..registry import select
from ..schedule import Schedule
from ..spec import canonical_json, sha256
from ..workload import lengths_of
from . import features, robust

MIN_ROWS = 5  # two more than coefficients, so that leaving one out still leaves an error to see
MIN_DEPTHS = 3
MAX_LOO_ERROR = 0.10
MAX_LOO_P90 = 0.25
SEGMENT_PARAMETER = "segment_chunks"


@dataclass(frozen=True)
class Observation:
    """A measured time: of which problem, schedule and workload, and with what."""

    problem: Problem
    schedule: Schedule
    workload: str
    time_us: float
    template_digest: str
    environment: Environment

    @property
    def key(self) -> tuple:
        return self.problem, self.schedule, self.workload, self.template_digest, self.environment

    def as_dict(self) -> dict:
        return {
            "problem": problem_body(self.problem),
            "schedule": self.schedule.as_dict(),
            "workload": self.workload,
            "time_us": self.time_us,
            "template_digest": self.template_digest,
            "environment": self.environment.id,
        }


@dataclass(frozen=True)
class Refusal:
    """Rows that gave no model, and why."""

    problem: Problem
    schedule: Schedule
    form: str
    rows: int
    reason: str


def observations(trials: Iterable[Trial], best: Iterable[BestRow] = ()) -> list[Observation]:
    """One time per (problem, schedule, workload, source, environment): of its last race, else of its last search
    trial, else of a best row, which also tells the time of the default."""
    found: dict[tuple, Observation] = {}
    for row in best:
        if row.workload == ALL_WORKLOADS:
            continue
        pairs = [(row.schedule, row.median_us)]
        if row.default_median_us is not None and is_current(row):  # an older source may have had another default
            default = select(row.problem).default(row.problem)
            if default.template == row.schedule.template:
                pairs.append((default, row.default_median_us))
        for schedule, time_us in pairs:
            o = Observation(row.problem, schedule, row.workload, time_us, row.template_digest, row.environment)
            found[o.key] = o
    for phase in ("search", "final"):
        for t in trials:
            if t.phase == phase and t.status == "ok":
                o = Observation(t.problem, t.schedule, t.workload, t.median_us, t.template_digest, t.environment)
                found[o.key] = o
    return list(found.values())


def fit_models(found: Iterable[Observation], created: str = "") -> tuple[list[CostModel], list[Refusal]]:
    """A model, or a refusal, per (family, schedule), in a fixed order."""
    models, refused = [], []
    groups: dict[tuple, list[Observation]] = {}
    for o in found:
        groups.setdefault((family(o.problem), o.schedule, "work"), []).append(o)
        if SEGMENT_PARAMETER in o.schedule.params():
            groups.setdefault((o.problem, _without_segment(o.schedule), "one_wave"), []).append(o)
    for (problem, schedule, form), rows in sorted(groups.items(), key=lambda item: _text(*item[0])):
        result = _fit(problem, schedule, form, _of_one_source(rows), created)
        if isinstance(result, Refusal):
            refused.append(result)
        else:
            models.append(result)
    return models, refused


def _text(problem: Problem, schedule: Schedule, form: str) -> tuple[str, ...]:
    return canonical_json(problem_body(problem)), canonical_json(schedule.as_dict()), form


def _without_segment(schedule: Schedule) -> Schedule:
    params = {name: value for name, value in schedule.items if name != SEGMENT_PARAMETER}
    return Schedule.of(schedule.template, params)


def _of_one_source(rows: Sequence[Observation]) -> list[Observation]:
    """The rows of one template source and environment: of the source as it is now, else of which there are most."""
    sources: dict[tuple, list[Observation]] = {}
    for o in rows:
        sources.setdefault((o.template_digest, o.environment), []).append(o)
    return max(sources.values(), key=lambda found: (bool(is_current(found[0])), len(found), found[0].template_digest))


def _fit(
    problem: Problem, schedule: Schedule, form: str, rows: Sequence[Observation], created: str
) -> CostModel | Refusal:
    points = [_work(o) if form == "work" else _one_wave(o) for o in rows]
    times = [o.time_us for o in rows]
    reason = _too_little(points, form)
    if not reason:
        coefficients = robust.fit(points, times)
        errors = robust.leave_one_out(points, times)
        loo, p90 = statistics.median(errors), _quantile(errors, 0.9)
        reason = _too_wrong(loo, p90) or ("no coefficient is above 0" if not any(coefficients) else "")
    if reason:
        return Refusal(problem, schedule, form, len(rows), reason)
    ordered = sorted((o.as_dict() for o in rows), key=canonical_json)
    return CostModel(
        problem=problem,
        schedule=schedule,
        form=form,
        coefficients=coefficients,
        rows=len(rows),
        loo_error=loo,
        loo_p90=p90,
        fitted_on=sha256({"form": form, "rows": ordered, "environment": rows[0].environment.as_dict()}),
        template_digest=rows[0].template_digest,
        environment=rows[0].environment,
        created=created,
    )


def _work(o: Observation) -> tuple[float, float, float]:
    lengths = lengths_of(o.workload)
    depth = features.steps(o.problem, o.schedule, lengths, o.environment.sm_count)
    return depth, float(features.num_ctas(o.problem, o.schedule, lengths)), 1.0


def _one_wave(o: Observation) -> tuple[float, float, float]:
    segment = o.schedule[SEGMENT_PARAMETER]
    chunks = max(-(-length // o.problem.chunk_size) for length in lengths_of(o.workload))
    return float(segment), chunks / segment, 1.0


def residuals(model: CostModel, found: Iterable[Observation]) -> list[tuple[Observation, float]]:
    """The observations that a model describes, each with what the model predicts in µs."""
    described = []
    for o in found:
        source = (o.template_digest, o.environment) == (model.template_digest, model.environment)
        if model.form == "work" and source and (family(o.problem), o.schedule) == (model.problem, model.schedule):
            described.append((o, model.predict_us(*_work(o)[:2])))
        elif model.form == "one_wave" and source and SEGMENT_PARAMETER in o.schedule.params():
            if (o.problem, _without_segment(o.schedule)) == (model.problem, model.schedule):
                described.append((o, model.predict_us(*_one_wave(o)[:2])))
    return described


def best_segment(model: CostModel, chunks: int) -> float:
    """L* = √(λ₂ N / λ₁): the segment length, in chunks, at which a one-wave model is least; at most N."""
    a, b, _ = model.coefficients
    return float(chunks) if a == 0 else min(float(chunks), max(1.0, math.sqrt(b * chunks / a)))


def _too_little(points: Sequence[tuple], form: str) -> str:
    depths = len({p[0] for p in points})
    what = "depths" if form == "work" else "segment lengths"
    if len(points) < MIN_ROWS:
        return f"`rows >= {MIN_ROWS}` must hold, but there are {len(points)}; measure more heads or workloads"
    if depths < MIN_DEPTHS:
        return f"`distinct {what} >= {MIN_DEPTHS}` must hold, but there are {depths}; measure other workloads"
    return ""


def _too_wrong(loo: float, p90: float) -> str:
    if loo > MAX_LOO_ERROR or p90 > MAX_LOO_P90:
        return (
            f"`leave-one-out error <= {MAX_LOO_ERROR:.0%}, 90th percentile <= {MAX_LOO_P90:.0%}` must hold, but got "
            f"{loo:.1%} and {p90:.1%}; the form does not describe these rows"
        )
    return ""


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
