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
#: Time of a step where all SMs share the memory over that of one alone: what is tried, and by how much of the errors
#: of rows left out the best must be better than a form without it.
MEMORY_RATIOS = (1.2, 1.35, 1.5, 1.7, 1.9, 2.1, 2.4, 2.7, 3.0)
MEMORY_GAIN = 0.5
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
    """What is fitted: the three features of a form, the time in µs, the rows of the database behind it, and the share
    of form ``work``."""

    features: tuple[float, float, float]
    time_us: float
    observations: tuple[Observation, ...]
    share: float = 0.0

    def at(self, ratio: float) -> tuple[float, float, float]:
        """The features where a step that shares the memory takes ``ratio`` times one that does not."""
        depth, *others = self.features
        return max(depth, ratio * self.share), *others


def _text(problem: Problem, schedule: Schedule, form: str) -> tuple[str, ...]:
    return canonical_json(problem_body(problem)), canonical_json(schedule.as_dict()), form


def _of_one_source(rows: Sequence[Observation]) -> list[Observation]:
    """The rows of one template source and environment: of the source as it is now, else of which there are most."""
    sources: dict[tuple, list[Observation]] = {}
    for o in rows:
        sources.setdefault((o.template_digest, o.environment), []).append(o)
    return max(sources.values(), key=lambda found: (bool(is_current(found[0])), len(found), found[0].template_digest))


def _fit(problem: Problem, schedule: Schedule, form: str, rows: Sequence[_Row], created: str) -> CostModel | Refusal:
    reason = _too_little([row.features for row in rows], form)
    if not reason:
        coefficients, loo, p90 = _best_fit(rows)
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


def _best_fit(rows: Sequence[_Row]) -> tuple[tuple[float, ...], float, float]:
    """(coefficients, median and 90th percentile of the errors of rows left out); with the limit of the memory as the
    last coefficient where that describes the rows better."""
    times = [row.time_us for row in rows]

    def fitted(ratio: float):
        points = [row.at(ratio) for row in rows]
        return robust.loss(points, times, robust.fit(points, times))

    def judged(ratio: float):
        points = [row.at(ratio) for row in rows]
        found, errors = robust.fit(points, times), robust.leave_one_out(points, times)
        found = (*found, found[0] * ratio) if ratio else found
        return found, statistics.median(errors), _quantile(errors, 0.9)

    plain = judged(0.0)
    if not any(row.at(MEMORY_RATIOS[-1]) != row.features for row in rows):
        return plain
    limited = judged(min(MEMORY_RATIOS, key=fitted))
    return limited if sum(limited[1:]) < (1 - MEMORY_GAIN) * sum(plain[1:]) else plain


def _work_rows(rows: Iterable[Observation]) -> list[_Row]:
    return [_work_row(o) for o in rows]


def _work_row(o: Observation) -> _Row:
    asked = workload_of(o.problem.kernel, o.workload)
    work, split, sm_count = (o.problem, o.schedule, asked.lengths), features.Split.of(asked), o.environment.sm_count
    depth, ctas = features.steps(*work, sm_count, split), float(features.num_ctas(*work, split))
    return _Row((depth, ctas, 1.0), o.time_us, (o,), features.even_share(*work, sm_count, split))


def _one_wave_rows(times: Iterable[SplitTime]) -> list[_Row]:
    return [_Row((float(t.segment_chunks), t.chunks / t.segment_chunks, 1.0), t.time_us, t.parts) for t in times]


def _rows_of(model: CostModel, found: Iterable[Observation]) -> list[_Row]:
    """The rows that a model describes."""
    if model.form == "one_wave":
        rows = _one_wave_rows(split_times(found).get((model.problem, model.schedule), ()))
    else:
        key = model.problem, model.schedule
        rows = _work_rows(o for o in found if (family(o.problem), o.schedule) == key)
    source = model.template_digest, model.environment
    return [r for r in rows if (r.observations[-1].template_digest, r.observations[-1].environment) == source]


def residuals(model: CostModel, found: Iterable[Observation]) -> list[tuple[float, float]]:
    """(measured, predicted) in µs of the rows that a model describes."""
    return [(row.time_us, model.predict_us(*row.features[:2], row.share)) for row in _rows_of(model, found)]


def left_out_errors(model: CostModel, found: Iterable[Observation]) -> tuple[float, ...]:
    """|prediction / time − 1| of every row that a model describes, by a fit of the others of the same form."""
    rows = _rows_of(model, found)
    a, *_, m = model.coefficients
    ratio = m / a if model.form == "work" and a else 0.0
    return robust.leave_one_out([row.at(ratio) for row in rows], [row.time_us for row in rows])


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
