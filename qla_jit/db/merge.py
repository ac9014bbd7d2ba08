"""Unite tuning databases: trials without duplicates, and of two best rows or fits for one key the better-measured.

`merge` reads every source before it writes, and writes in one transaction, so a bad source or a full disk leaves the
target as it was.  The result does not depend on the order of the sources, and merging again changes nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import DatabaseError, OlderSchemaError
from ..spec import canonical_json
from . import jsonl
from .jsonl import Records
from .layers import Database
from .lookup import is_current
from .records import BestRow, CostModel
from .store import Store

SQLITE_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class Merged:
    """What a merge did: trials that were new of those read, and best rows new, replaced, and kept as they were.

    fits_new: fitted cost models that were new or better than those of their key.
    left_out: rows of the sources that are of kernels which this version does not have, by kernel.
    """

    trials_read: int
    trials_new: int
    best_new: int
    best_replaced: int
    best_kept: int
    fits_new: int
    left_out: dict[str, int]


def read_source(path: str | Path) -> Records:
    """Records of a JSONL file or of a SQLite database, told apart by content; DatabaseError for anything else."""
    try:
        with Path(path).open("rb") as file:
            is_sqlite = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError as error:
        raise DatabaseError(f"a readable source must be given, but {error}; check the path.") from error
    if not is_sqlite:
        return jsonl.read(path)
    try:
        return _of_database(path)
    except OlderSchemaError:  # sources are only read, so a copy is what gets migrated
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(path, Path(folder, "copy.sqlite"))
            Store(copy).close()
            return _of_database(copy)


def _of_database(path: str | Path) -> Records:
    with Store(path, mode="ro") as store:
        return Records(store.environments(), store.best_rows(), store.trials(), store.fits(), store.left_out())


def better(a: BestRow, b: BestRow) -> BestRow:
    """The better-measured row: the template's source as it is now, then more trials, then the lower median."""
    return max(a, b, key=_quality)


def _quality(row: BestRow) -> tuple:
    """The text is last only so that equally good rows give the same answer in any order."""
    return bool(is_current(row)), row.trials, -row.median_us, canonical_json(row.as_dict())


def better_fit(a: CostModel, b: CostModel) -> CostModel:
    """The better-founded fit: the template's source as it is now, then more rows, then the smaller error."""
    return max(a, b, key=lambda fit: (bool(is_current(fit)), fit.rows, -fit.loo_error, canonical_json(fit.as_dict())))


def merge(sources: Sequence[str | Path], into: Database) -> Merged:
    """Add the records of all sources to the user's file of ``into``.

    Raises DatabaseError for a source that cannot be read or a target that cannot be written; nothing is changed then.
    """
    records = [read_source(source) for source in sources]
    environments = {e.id: e for r in records for e in r.environments.values()}
    trials = [trial for r in records for trial in r.trials]
    given = _by_key(row for r in records for row in r.best)
    before: dict[tuple, BestRow] = {}

    def select(stored: list[BestRow]) -> list[BestRow]:
        before.update({_key(row): row for row in stored if _key(row) in given})
        return [row for key, row in given.items() if key not in before or better(before[key], row) != before[key]]

    fits: dict[tuple, CostModel] = {}
    for fit in (fit for r in records for fit in r.fits):
        fits[_fit_key(fit)] = better_fit(fits.get(_fit_key(fit), fit), fit)
    chosen: list[CostModel] = []

    def select_fits(stored: list[CostModel]) -> list[CostModel]:
        known = {_fit_key(fit): fit for fit in stored}
        chosen[:] = [fit for key, fit in fits.items() if key not in known or better_fit(known[key], fit) != known[key]]
        return chosen

    new = into.store.merge(environments.values(), trials, select, select_fits)
    replaced = sum(better(row, given[key]) != row for key, row in before.items())
    left_out = sum((r.left_out for r in records), Counter())
    return Merged(
        len(trials), new, len(given) - len(before), replaced, len(before) - replaced, len(chosen), dict(left_out)
    )


def _key(row: BestRow) -> tuple:
    return row.problem, row.workload


def _fit_key(fit: CostModel) -> tuple:
    return fit.problem, fit.schedule, fit.form


def _by_key(rows: Iterable[BestRow]) -> dict[tuple, BestRow]:
    chosen: dict[tuple, BestRow] = {}
    for row in rows:
        chosen[_key(row)] = better(chosen[_key(row)], row) if _key(row) in chosen else row
    return chosen
