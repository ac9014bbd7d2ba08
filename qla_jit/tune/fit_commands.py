"""The verb ``qla-tune fit``: cost models from the rows of a database, stored there, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..db.layers import Database, open_db
from ..db.lookup import is_current
from ..db.records import CostModel, problem_body
from ..errors import DatabaseError
from ..model.fit import Refusal, fit_models
from ..model.observation import observations
from . import json_output
from .evaluate import now
from .options import AsJson, DbPath


@dataclass(frozen=True)
class Fitted:
    """What `fit_database` stored, and what it refused."""

    models: list[CostModel]
    refused: list[Refusal]


def fit_database(db: Database, arch: str | None = None) -> Fitted:
    """Fit every schedule of the user's file and store the good models in place of what was stored for them.

    A refused one leaves no older model of its key behind.  Raises DatabaseError where there are no rows at all.
    """
    reader = db.reader()
    found = []
    if reader is not None:
        with reader:
            found = [o for o in observations(reader.trials(), reader.best_rows()) if arch in (None, o.problem.arch)]
    if not found:
        raise DatabaseError(
            f"times of tuned schedules must be in {db.path} to fit them, but there are none; run a sweep, or import "
            f"a recorded one (qla-tune import FILE)."
        )
    models, refused = fit_models(found, now())
    db.store.replace_fits(models, [(r.problem, r.schedule, r.form) for r in refused])
    return Fitted(models, refused)


def fit(
    arch: Annotated[str | None, typer.Option(help="Only rows of this architecture.")] = None,
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Fit cost models to the times in your database and store them.  Exit code 1 where none was good enough."""
    with open_db(db) as database:
        fitted = fit_database(database, arch)
        path = str(database.path)
    if as_json:
        json_output.write("fit", bool(fitted.models), **fitted_json(fitted), db=path)
    else:
        _print(fitted)
    text = f"{len(fitted.models)} cost models stored in {path}, {len(fitted.refused)} refused"
    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
    if not fitted.models:
        raise typer.Exit(1)


def fitted_json(fitted: Fitted) -> dict:
    return {
        "models": [
            {**m.as_dict(), "environment": m.environment.as_dict(), "current": bool(is_current(m))}
            for m in fitted.models
        ],
        "refused": [
            {
                "problem": problem_body(r.problem),
                "schedule": r.schedule.as_dict(),
                "form": r.form,
                "rows": r.rows,
                "reason": r.reason,
            }
            for r in fitted.refused
        ],
    }


def _print(fitted: Fitted) -> None:
    table = Table(title="cost models")
    for name in ("kernel", "schedule", "µs", "rows", "left-out error", "90th pct."):
        table.add_column(name, overflow="fold")
    for m in fitted.models:
        values = ", ".join(f"{name} {value:.4g}" for name, value in m.values.items())
        stale = "" if is_current(m) else " (older source)"
        errors = (f"{m.loo_error:.1%}", f"{m.loo_p90:.1%}")
        table.add_row(m.problem.kernel, f"{m.schedule}{stale}", values, str(m.rows), *errors)
    console = Console()
    console.print(table)
    for r in fitted.refused:
        text = f"refused: {r.problem.kernel} {r.schedule}, form {r.form}: {r.reason}"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
