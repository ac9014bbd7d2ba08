"""One SQLite file of tuning records.

Every write is one transaction with a rollback journal, so a process killed at any moment loses at most the record it
was writing.  Writing goes through sqlite-utils (imported on the first write); reading needs only the standard library,
because the runtime reads.  Whatever SQLite refuses (foreign file, truncated, locked, read-only, full disk) becomes a
DatabaseError that names the file and the remedy.  Rows of kernels that only another version has stay in the file; they
are counted, and otherwise as if they were not there.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from ..config import KERNELS, Problem
from ..errors import DatabaseError, OlderSchemaError
from ..schedule import Schedule
from ..spec import canonical_json
from . import schema
from .records import BestRow, CostModel, Environment, Times, Trial, parse, problem_body, short_id

BUSY_TIMEOUT_S = 30.0
MODES = {"rw": "mode=rwc", "ro": "mode=ro", "immutable": "mode=ro&immutable=1"}

_TRIAL_COLUMNS = (
    "samples_us, status, reason, phase, workload, template_digest, error, registers, smem_bytes, local_bytes, "
    "sm_mhz, memory_mhz"
)
_TIME_COLUMNS = "compile_s, verify_s, measure_s, search_s, overhead_s"
_KNOWN = f"p.kernel IN ({', '.join('?' * len(KERNELS))})"


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        remedy = "check the file's permissions"
        if "locked" in text:
            remedy = f"another process held it for more than {BUSY_TIMEOUT_S:.0f} s; stop that process"
        elif "malformed" in text or "not a database" in text:
            remedy = "move it away and import your last export (qla-tune import)"
        elif "full" in text or "disk I/O" in text:
            remedy = "free space on its disk; nothing was changed"
        elif "readonly" in text or "read-only" in text or "unable to open" in text:
            remedy = "make its folder writable, or name another file (--db PATH or QLA_DB)"
        raise DatabaseError(f"{path} must be a usable tuning database, but SQLite says: {text}; {remedy}.") from error


class Store:
    """An open database file.  ``rw`` creates and migrates it; ``ro`` and ``immutable`` never change anything.

    ``immutable`` promises SQLite that nobody writes the file, so it opens in a read-only folder; for shipped files.
    Not shared between threads; open one per thread.
    """

    def __init__(self, path: str | Path, mode: str = "rw"):
        self.path = str(path)
        self.mode = mode
        if mode == "rw":
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DatabaseError(
                    f"the folder of {path} must be creatable, but {error}; name another file (--db PATH or QLA_DB)."
                ) from error
        with _explained(self.path):
            self._connection = sqlite3.connect(
                f"file:{quote(self.path)}?{MODES[mode]}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise
        self._writer = None

    def _prepare(self) -> None:
        version = schema.check(self._connection, self.path)
        if self.mode == "rw":
            self._connection.execute("PRAGMA foreign_keys = ON")
            schema.migrate(self._connection, self.path)
        elif version < len(schema.MIGRATIONS):
            raise OlderSchemaError(
                f"`schema version == {len(schema.MIGRATIONS)}` must hold to read, but {self.path} has {version}; "
                f"make the file and its folder writable once, and it is migrated when opened."
            )

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator:
        """A sqlite-utils database inside BEGIN IMMEDIATE … COMMIT."""
        if self.mode != "rw":
            raise DatabaseError(f"`mode == 'rw'` must hold to write, but {self.path} is open as {self.mode!r}.")
        with _explained(self.path):
            if self._writer is None:
                import sqlite_utils

                self._writer = sqlite_utils.Database(self._connection)
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def add_trial(self, trial: Trial) -> None:
        """Store one trial in its own transaction; a trial already stored is left alone."""
        self.add(trials=(trial,))

    def put_best(self, row: BestRow) -> None:
        """Store the winner for its (problem, workload), replacing the previous one."""
        self.add(best=(row,))

    def add(
        self,
        environments: Iterable = (),
        trials: Iterable[Trial] = (),
        best: Iterable[BestRow] = (),
        fits: Iterable[CostModel] = (),
    ) -> None:
        """Store many records in one transaction: all of them or none."""
        with self._transaction() as db:
            self._insert(db, environments, trials, best, fits)

    def replace_fits(self, fits: Iterable[CostModel], refused: Iterable[tuple[Problem, Schedule, str]]) -> None:
        """Store fits and remove those of the (problem, schedule, form) that were refused, in one transaction."""
        with self._transaction() as db:
            for problem, schedule, form in refused:
                keys = [short_id(problem_body(problem)), short_id(schedule.as_dict()), form]
                db.conn.execute("DELETE FROM cost_model WHERE (problem_id, schedule_id, form) = (?, ?, ?)", keys)
            self._insert(db, (), (), (), fits)

    def merge(
        self,
        environments: Iterable[Environment],
        trials: Iterable[Trial],
        select: Callable[[list[BestRow]], Iterable[BestRow]],
        select_fits: Callable[[list[CostModel]], Iterable[CostModel]] = lambda stored: (),
    ) -> int:
        """`add` whose best rows and fits are what ``select`` and ``select_fits`` make of the stored ones; returns how
        many trials were new."""
        with self._transaction() as db:
            known = self.num_trials
            self._insert(db, environments, trials, select(self.best_rows()), select_fits(self.fits()))
            return self.num_trials - known

    def _insert(
        self,
        db,
        environments: Iterable,
        trials: Iterable[Trial],
        best: Iterable[BestRow],
        fits: Iterable[CostModel],
    ) -> None:
        for environment in environments:
            self._put_environment(db, environment)
        for trial in trials:
            db["trial"].insert({**self._keys(db, trial), **_trial_row(trial)}, ignore=True)
        for row in best:
            db["best"].insert({**self._keys(db, row), **_best_row(row)}, replace=True)
        for fit in fits:
            db["cost_model"].insert({**self._keys(db, fit), **_fit_row(fit)}, replace=True)

    def _put_environment(self, db, environment: Environment) -> str:
        db["environment"].insert({"id": environment.id, **environment.as_dict()}, ignore=True)
        return environment.id

    def _keys(self, db, record: Trial | BestRow | CostModel) -> dict:
        """Insert what the record refers to, where missing, and return the references."""
        problem, schedule = problem_body(record.problem), record.schedule.as_dict()
        row = {"arch": record.problem.arch, "kernel": record.problem.kernel, "body": canonical_json(problem)}
        db["problem"].insert({"id": short_id(problem), **row}, ignore=True)
        row = {"template": record.schedule.template, "body": canonical_json(schedule)}
        db["schedule"].insert({"id": short_id(schedule), **row}, ignore=True)
        return {
            "problem_id": short_id(problem),
            "schedule_id": short_id(schedule),
            "environment_id": self._put_environment(db, record.environment),
        }

    def put_meta(self, key: str, value: str) -> None:
        """A named string about the file itself."""
        with self._transaction() as db:
            db["meta"].insert({"key": key, "value": value}, replace=True)

    def meta(self, key: str) -> str | None:
        found = self._query("SELECT value FROM meta WHERE key = ?", (key,))
        return found[0]["value"] if found else None

    def _query(self, sql: str, arguments: tuple = ()) -> list[dict]:
        with _explained(self.path):
            cursor = self._connection.execute(sql, arguments)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row)) for row in cursor]

    @property
    def num_trials(self) -> int:
        found = self._query(
            f"SELECT count(*) AS trials FROM trial t JOIN problem p ON p.id = t.problem_id WHERE {_KNOWN}", KERNELS
        )
        return found[0]["trials"]

    def left_out(self) -> Counter[str]:
        """How many best rows, trials and fits are of kernels that this version does not have, by kernel."""
        counted = Counter()
        for table in ("best", "trial", "cost_model"):
            rows = self._query(
                f"SELECT p.kernel, count(*) AS rows FROM {table} t JOIN problem p ON p.id = t.problem_id "
                f"WHERE NOT {_KNOWN} GROUP BY p.kernel",
                KERNELS,
            )
            counted.update({row["kernel"]: row["rows"] for row in rows})
        return counted

    def environments(self) -> dict[str, Environment]:
        """Environments by id."""
        rows = self._query("SELECT * FROM environment ORDER BY id")
        return {row.pop("id"): parse(Environment.from_dict, row) for row in rows}

    def trials(self, problem: Problem | None = None, workload: str | None = None) -> list[Trial]:
        """Stored trials in the order they were made, all or those of one problem and workload."""
        where, arguments = [_KNOWN], [*KERNELS]
        if problem is not None:
            where.append("t.problem_id = ?")
            arguments.append(short_id(problem_body(problem)))
        if workload is not None:
            where.append("t.workload = ?")
            arguments.append(workload)
        rows = self._query(
            f"SELECT p.body AS problem, s.body AS schedule, t.environment_id AS environment, t.created, "
            f"{_TRIAL_COLUMNS}, {_TIME_COLUMNS} FROM trial t JOIN problem p ON p.id = t.problem_id "
            f"JOIN schedule s ON s.id = t.schedule_id WHERE {' AND '.join(where)} ORDER BY t.id",
            tuple(arguments),
        )
        environments = self.environments()
        return [parse(Trial.from_dict, _decoded_trial(row), environments) for row in rows]

    def best_rows(self, arch: str | None = None) -> list[BestRow]:
        """Winners, all or those of one arch, in a fixed order."""
        rows = self._query(
            f"SELECT p.body AS problem, s.body AS schedule, b.environment_id AS environment, b.workload, b.median_us, "
            f"b.default_median_us, b.template_digest, b.trials, b.created FROM best b "
            f"JOIN problem p ON p.id = b.problem_id JOIN schedule s ON s.id = b.schedule_id "
            f"WHERE {_KNOWN} {'AND p.arch = ?' if arch else ''} ORDER BY p.body, b.workload",
            (*KERNELS, arch) if arch else KERNELS,
        )
        environments = self.environments()
        return [parse(BestRow.from_dict, {**row, **_bodies(row)}, environments) for row in rows]

    def fits(self, arch: str | None = None) -> list[CostModel]:
        """Fitted cost models, all or those of one arch, in a fixed order."""
        rows = self._query(
            f"SELECT p.body AS problem, s.body AS schedule, c.environment_id AS environment, c.form, c.coefficients, "
            f"c.rows, c.loo_error, c.loo_p90, c.fitted_on, c.template_digest, c.created FROM cost_model c "
            f"JOIN problem p ON p.id = c.problem_id JOIN schedule s ON s.id = c.schedule_id "
            f"WHERE {_KNOWN} {'AND p.arch = ?' if arch else ''} ORDER BY p.body, s.body, c.form",
            (*KERNELS, arch) if arch else KERNELS,
        )
        environments = self.environments()
        decoded = [{**row, **_bodies(row), "coefficients": json.loads(row["coefficients"])} for row in rows]
        return [parse(CostModel.from_dict, row, environments) for row in decoded]


def _bodies(row: dict) -> dict:
    return {"problem": json.loads(row["problem"]), "schedule": json.loads(row["schedule"])}


def _decoded_trial(row: dict) -> dict:
    times = {name: row.pop(name) for name in asdict(Times())}
    return {**row, **_bodies(row), "samples_us": json.loads(row["samples_us"]), "times": times}


def _trial_row(trial: Trial) -> dict:
    return {
        "uid": trial.uid,
        "workload": trial.workload,
        "template_digest": trial.template_digest,
        "status": trial.status,
        "reason": trial.reason,
        "phase": trial.phase,
        "samples_us": canonical_json(list(trial.samples_us)),
        "median_us": trial.median_us,
        "iqr_us": trial.iqr_us,
        "error": trial.error,
        "registers": trial.registers,
        "smem_bytes": trial.smem_bytes,
        "local_bytes": trial.local_bytes,
        **asdict(trial.times),
        "created": trial.created,
        "sm_mhz": trial.sm_mhz,
        "memory_mhz": trial.memory_mhz,
    }


def _best_row(row: BestRow) -> dict:
    return {
        "workload": row.workload,
        "median_us": row.median_us,
        "default_median_us": row.default_median_us,
        "template_digest": row.template_digest,
        "trials": row.trials,
        "created": row.created,
    }


def _fit_row(fit: CostModel) -> dict:
    return {
        "form": fit.form,
        "coefficients": canonical_json(fit.values),
        "rows": fit.rows,
        "loo_error": fit.loo_error,
        "loo_p90": fit.loo_p90,
        "fitted_on": fit.fitted_on,
        "template_digest": fit.template_digest,
        "created": fit.created,
    }
