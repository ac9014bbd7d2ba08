"""Cost-model fits of a database in the plain form that the report draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..db.lookup import heads_of, is_current
from ..db.records import BestRow, CostModel, Trial
from ..model.fit import residuals
from ..model.observation import observations


def plain_models(fits: Iterable[CostModel], trials: Iterable[Trial], best: Sequence[BestRow]) -> list[dict]:
    """Models of schedules in use first, then those of the smallest error; for the keys see `report.model_section`."""
    used = {(row.schedule, row.template_digest) for row in best}
    found = observations(trials, best)
    ordered = sorted(
        fits, key=lambda m: ((m.schedule, m.template_digest) not in used, m.loo_error, str(m.problem), str(m.schedule))
    )
    return [_plain(m, found, (m.schedule, m.template_digest) in used) for m in ordered]


def _plain(model: CostModel, found: Sequence, used: bool) -> dict:
    heads = "" if model.problem.num_value_heads is None else f" {heads_of(model.problem)}"
    notes = ["in use"] * used + [f"90th percentile {model.loo_p90:.1%}"]
    notes += ["stale"] * (not is_current(model))
    return {
        "name": f"{model.problem.kernel}{heads}, {model.form}",
        "schedule": str(model.schedule),
        "coefficients": model.values,
        "rows": model.rows,
        "loo_error": model.loo_error,
        "fitted_on": model.fitted_on,
        "points": residuals(model, found),
        "note": ", ".join(notes),
    }
