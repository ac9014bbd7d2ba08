"""`fit_models`: cost models of all schedules from the rows of a database, and the reason for each that is refused.

A model is of one schedule over all head counts of its family: heads, sequences and lengths enter through depth and
CTAs, which is also what lets it predict heads that nobody measured.  Only rows of one template source and one
environment are fitted together.  Where all kernels of a split are measured, the one-wave form T = λ₁ L + λ₂ N/L + λ₀ of
their sum is fitted too (`split_rows`), for each operator; its key is that of `segment_forward`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config import Problem
from ..db.lookup import family, is_current
from ..db.records import CostModel, problem_body
from ..schedule import Schedule
from ..spec import canonical_json, sha256
from ..workload import workload_of
from . import features, robust
from .observation import Observation
from .split_rows import SplitTime, split_times

MIN_ROWS = 5  # two more than coefficients, so that leaving one out still leaves an error to see
MIN_DEPTHS = 3
MAX_LOO_ERROR = 0.10
MAX_LOO_P90 = 0.25


@dataclass(frozen=True)
class Refusal:
    """Rows that gave no model, and why."""

    problem: Problem
    schedule: Schedule
    form: str
    rows: int
    reason: str


def fit_models(found: Iterable[Observation], created: str = "") -> tuple[list[CostModel], list[Refusal]]:
    """A model, or a refusal, per (family, schedule) and per operator with a measured split, in a fixed order."""
    found, groups = list(found), {}
    for o in found:
        groups.setdefault((family(o.problem), o.schedule, "work"), []).append(o)
    chosen = {key: _work_rows(_of_one_source(rows)) for key, rows in groups.items()}
    for (problem, schedule), times in split_times(found).items():
        chosen[problem, schedule, "one_wave"] = _one_wave_rows(times)
    models, refused = [], []
    for key, rows in sorted(chosen.items(), key=lambda item: _text(*item[0])):
        result = _fit(*key, rows, created)
        if isinstance(result, Refusal):
            refused.append(result)
        else:
            models.append(result)
    return models, refused


@dataclass(frozen=True)
class _Row:
    """What is fitted: the three features of a form, the time in µs, and the rows of the database behind it."""

    features: tuple[float, float, float]
    time_us: float
    observations: tuple[Observation, ...]


def _text(problem: Problem, schedule: Schedule, form: str) -> tuple[str, ...]:
    return canonical_json(problem_body(problem)), canonical_json(schedule.as_dict()), form


def _of_one_source(rows: Sequence[Observation]) -> list[Observation]:
    """The rows of one template source and environment: of the source as it is now, else of which there are most."""
    sources: dict[tuple, list[Observation]] = {}
    for o in rows:
        sources.setdefault((o.template_digest, o.environment), []).append(o)
    return max(sources.values(), key=lambda found: (bool(is_current(found[0])), len(found), found[0].template_digest))


def _fit(problem: Problem, schedule: Schedule, form: str, rows: Sequence[_Row], created: str) -> CostModel | Refusal:
    points, times = [row.features for row in rows], [row.time_us for row in rows]
    reason = _too_little(points, form)
    if not reason:
        coefficients = robust.fit(points, times)
        errors = robust.leave_one_out(points, times)
        loo, p90 = statistics.median(errors), _quantile(errors, 0.9)
        reason = _too_wrong(loo, p90) or ("no coefficient is above 0" if not any(coefficients) else "")
    if reason:
        return Refusal(problem, schedule, form, len(rows), reason)
    ordered = sorted((o.as_dict() for row in rows for o in row.observations), key=canonical_json)
    last = rows[0].observations[-1]
    return CostModel(
        problem=problem,
        schedule=schedule,
        form=form,
        coefficients=coefficients,
        rows=len(rows),
        loo_error=loo,
        loo_p90=p90,
        fitted_on=sha256({"form": form, "rows": ordered, "environment": last.environment.as_dict()}),
        template_digest=last.template_digest,
        environment=last.environment,
        created=created,
    )


def _work_rows(rows: Iterable[Observation]) -> list[_Row]:
    return [_Row(_work(o), o.time_us, (o,)) for o in rows]


def _work(o: Observation) -> tuple[float, float, float]:
    asked = workload_of(o.problem.kernel, o.workload)
    work, split = (o.problem, o.schedule, asked.lengths), features.Split.of(asked)
    depth = features.steps(*work, o.environment.sm_count, split)
    return depth, float(features.num_ctas(*work, split)), 1.0


def _one_wave_rows(times: Iterable[SplitTime]) -> list[_Row]:
    return [_Row((float(t.segment_chunks), t.chunks / t.segment_chunks, 1.0), t.time_us, t.parts) for t in times]


def residuals(model: CostModel, found: Iterable[Observation]) -> list[tuple[float, float]]:
    """(measured, predicted) in µs of the rows that a model describes."""
    rows: list[_Row] = []
    if model.form == "one_wave":
        rows = _one_wave_rows(split_times(found).get((model.problem, model.schedule), ()))
    else:
        key = model.problem, model.schedule
        rows = _work_rows(o for o in found if (family(o.problem), o.schedule) == key)
    source = model.template_digest, model.environment
    return [
        (row.time_us, model.predict_us(*row.features[:2]))
        for row in rows
        if (row.observations[-1].template_digest, row.observations[-1].environment) == source
    ]


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
