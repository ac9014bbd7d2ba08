"""Tables of a tuning database, and the migrations that lead to them.

One transaction per migration: a failure leaves the file as it was.  ``application_id`` tells our files from foreign
ones and ``user_version`` counts migrations; both live in page 1, so they change with the tables or not at all.
A change of what a stored JSON body means is a migration too, otherwise an older qla-jit would misread it.
"""

from __future__ import annotations

import sqlite3

from ..errors import DatabaseError
from .records import FORMS, PHASES, STATUSES

APPLICATION_ID = 0x514C414A  # "QLAJ"


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


#: Statuses that `_INITIAL` knew.
_FIRST_STATUSES = tuple(status for status in STATUSES if status != "filtered")

_INITIAL = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    """CREATE TABLE environment (
        id TEXT PRIMARY KEY, gpu TEXT NOT NULL, arch TEXT NOT NULL, sm_count INTEGER NOT NULL, driver TEXT NOT NULL,
        cuda TEXT NOT NULL, tilelang TEXT NOT NULL, torch TEXT NOT NULL) STRICT""",
    """CREATE TABLE problem (
        id TEXT PRIMARY KEY, arch TEXT NOT NULL, kernel TEXT NOT NULL, body TEXT NOT NULL) STRICT""",
    "CREATE TABLE schedule (id TEXT PRIMARY KEY, template TEXT NOT NULL, body TEXT NOT NULL) STRICT",
    f"""CREATE TABLE trial (
        id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE,
        problem_id TEXT NOT NULL REFERENCES problem (id), schedule_id TEXT NOT NULL REFERENCES schedule (id),
        workload TEXT NOT NULL, template_digest TEXT NOT NULL,
        environment_id TEXT NOT NULL REFERENCES environment (id),
        status TEXT NOT NULL CHECK (status IN ({_one_of(_FIRST_STATUSES)})), reason TEXT NOT NULL,
        phase TEXT NOT NULL CHECK (phase IN ({_one_of(PHASES)})),
        samples_us TEXT NOT NULL, median_us REAL, iqr_us REAL, error REAL,
        registers INTEGER, smem_bytes INTEGER, local_bytes INTEGER,
        compile_s REAL NOT NULL, verify_s REAL NOT NULL, measure_s REAL NOT NULL, search_s REAL NOT NULL,
        overhead_s REAL NOT NULL, created TEXT NOT NULL) STRICT""",
    "CREATE INDEX trial_by_problem ON trial (problem_id, workload)",
    """CREATE TABLE best (
        problem_id TEXT NOT NULL REFERENCES problem (id), workload TEXT NOT NULL,
        schedule_id TEXT NOT NULL REFERENCES schedule (id), median_us REAL NOT NULL, default_median_us REAL,
        template_digest TEXT NOT NULL, environment_id TEXT NOT NULL REFERENCES environment (id),
        trials INTEGER NOT NULL, created TEXT NOT NULL, PRIMARY KEY (problem_id, workload)) STRICT""",
    """CREATE TABLE cost_model (
        id TEXT PRIMARY KEY, arch TEXT NOT NULL, kernel TEXT NOT NULL, coefficients TEXT NOT NULL,
        trials INTEGER NOT NULL, loo_error REAL NOT NULL, fitted_on TEXT NOT NULL,
        environment_id TEXT NOT NULL REFERENCES environment (id), created TEXT NOT NULL) STRICT""",
)

_FITS_AND_CLOCKS = (
    "DROP TABLE cost_model",  # never written, and it named neither problem nor schedule
    f"""CREATE TABLE cost_model (
        problem_id TEXT NOT NULL REFERENCES problem (id), schedule_id TEXT NOT NULL REFERENCES schedule (id),
        form TEXT NOT NULL CHECK (form IN ({_one_of(tuple(FORMS))})), coefficients TEXT NOT NULL,
        rows INTEGER NOT NULL, loo_error REAL NOT NULL, loo_p90 REAL NOT NULL, fitted_on TEXT NOT NULL,
        template_digest TEXT NOT NULL, environment_id TEXT NOT NULL REFERENCES environment (id),
        created TEXT NOT NULL, PRIMARY KEY (problem_id, schedule_id, form)) STRICT""",
    "ALTER TABLE trial ADD COLUMN sm_mhz INTEGER",
    "ALTER TABLE trial ADD COLUMN memory_mhz INTEGER",
)

_FILTERED = (  # SQLite changes no CHECK in place
    f"""CREATE TABLE trial_with_filtered (
        id INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE,
        problem_id TEXT NOT NULL REFERENCES problem (id), schedule_id TEXT NOT NULL REFERENCES schedule (id),
        workload TEXT NOT NULL, template_digest TEXT NOT NULL,
        environment_id TEXT NOT NULL REFERENCES environment (id),
        status TEXT NOT NULL CHECK (status IN ({_one_of(STATUSES)})), reason TEXT NOT NULL,
        phase TEXT NOT NULL CHECK (phase IN ({_one_of(PHASES)})),
        samples_us TEXT NOT NULL, median_us REAL, iqr_us REAL, error REAL,
        registers INTEGER, smem_bytes INTEGER, local_bytes INTEGER,
        compile_s REAL NOT NULL, verify_s REAL NOT NULL, measure_s REAL NOT NULL, search_s REAL NOT NULL,
        overhead_s REAL NOT NULL, created TEXT NOT NULL, sm_mhz INTEGER, memory_mhz INTEGER) STRICT""",
    "INSERT INTO trial_with_filtered SELECT * FROM trial",
    "DROP TABLE trial",
    "ALTER TABLE trial_with_filtered RENAME TO trial",
    "CREATE INDEX trial_by_problem ON trial (problem_id, workload)",
)

#: Migration n leads from ``user_version`` n to n + 1; append, never edit.
MIGRATIONS: list[tuple[str, ...]] = [_INITIAL, _FITS_AND_CLOCKS, _FILTERED]


def check(connection: sqlite3.Connection, path: str) -> int:
    """The schema version of an open file; DatabaseError when it is foreign or newer than this package."""
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID and (tables or application or version):
        raise DatabaseError(
            f"`application_id == {APPLICATION_ID:#x}` must hold, but {path} has {application:#x} and {tables} tables "
            f"of another program; name another file (--db PATH or QLA_DB)."
        )
    if version > len(MIGRATIONS):
        raise DatabaseError(
            f"`schema version <= {len(MIGRATIONS)}` must hold, but {path} has {version}: a newer qla-jit wrote it; "
            f"upgrade qla-jit, or name another file (--db PATH or QLA_DB)."
        )
    return version


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring an open, writable file to the current version, one transaction per step."""
    while check(connection, path) < len(MIGRATIONS):
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = check(connection, path)  # again under the lock: another process may have migrated meanwhile
            if version < len(MIGRATIONS):
                for statement in MIGRATIONS[version]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
