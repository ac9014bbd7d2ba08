"""The sweep that a database saw last, so that ``qla-tune resume`` can go on with it: its `Plan` and its `Setup`.

Kept in the meta table of the user's file, one per file: two sweeps on one database leave the plan of the later one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ..config import Problem
from ..db import Database
from ..db.records import problem_body
from ..errors import DatabaseError
from ..spec import canonical_json

KEY = "last_sweep"
VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What to tune: problems, workloads, wall seconds (None: until all is tried), trials per unit, search seed, and
    whether the static filter decides before the card does."""

    problems: tuple[Problem, ...]
    workloads: tuple[str, ...]
    budget_s: float | None = None
    max_trials: int | None = None
    seed: int = 0
    static_filter: bool = True


@dataclass(frozen=True)
class Setup:
    """What a sweep is run with: compiler processes (None: one per core), CUDA devices, and absolute paths of files.

    storage: database where hosts share the sweep, without its password.
    """

    jobs: int | None = None
    devices: tuple[int, ...] = (0,)
    replay: str | None = None
    record: str | None = None
    picture: str | None = None
    storage: str | None = None


def remember(db: Database, plan: Plan, setup: Setup) -> None:
    """Make this the sweep to go on with."""
    values = {**asdict(plan), "problems": [problem_body(p) for p in plan.problems]}
    db.store.put_meta(KEY, canonical_json({"version": VERSION, "plan": values, "setup": asdict(setup)}))


def recall(db: Database) -> tuple[Plan, Setup]:
    """The sweep to go on with.  Raises DatabaseError where there is none, or where another version wrote it."""
    text = db.meta(KEY)
    if text is None:
        raise DatabaseError(
            f"a sweep must have been started on {db.path} to resume it, but none was; start one (for example "
            f"qla-tune --arch sm90 --budget 600), or name the database of the sweep (--db PATH or QLA_DB)."
        )
    try:
        return _decoded(text, str(db.path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(
            f"the sweep stored in {db.path} must be one that this version knows, but reading it gave {error!r}; "
            f"start the sweep again with its options."
        ) from error


def _decoded(text: str, path: str) -> tuple[Plan, Setup]:
    values = json.loads(text)
    if values["version"] != VERSION:
        raise DatabaseError(
            f"`version == {VERSION}` must hold for a stored sweep, but {path} has {values['version']}; another "
            f"qla-jit wrote it: resume with that one, or start the sweep again."
        )
    plan, setup = values["plan"], values["setup"]
    if "device" in setup:  # before a sweep could have several
        setup["devices"] = [setup.pop("device")]
    setup["devices"] = tuple(setup["devices"])
    problems = tuple(Problem.from_dict(p) for p in plan.pop("problems"))
    return Plan(problems, tuple(plan.pop("workloads")), **plan), Setup(**setup)
