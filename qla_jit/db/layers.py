"""The database that everything else sees: the user's file over the shipped rows.

The user's file is created by the first write, never by a read.  Best rows are cached per arch and read again when the
file changes, so a lookup in ``compile()`` costs microseconds and the same files give the same answer on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import Counter
from importlib import resources
from pathlib import Path

from .. import env
from ..config import Problem
from ..errors import DatabaseError, OlderSchemaError
from . import jsonl
from .lookup import Match, choose, family, ranked, warn_if_stale
from .records import BestRow, CostModel, Trial
from .store import Store

SOURCE_DIGEST = "source_sha256"  # meta key of a shipped file: digest of the JSONL that it was built from


def shipped_rows(arch: str) -> list[BestRow]:
    """Rows of the package for an arch: from the SQLite copy where it matches the reviewed JSONL, else from that."""
    return shipped(arch).best


def shipped(arch: str) -> jsonl.Records:
    """Best rows and fits of the package for an arch (see `shipped_rows`); no trials."""
    folder = resources.files("qla_jit.tuning_db")
    source = folder.joinpath(f"{arch}.jsonl")
    if not source.is_file():
        return jsonl.Records()
    text = source.read_bytes()
    built = folder.joinpath(f"{arch}.sqlite")
    if isinstance(built, Path) and built.is_file():
        # A copy that an older version built is only slower to do without: the text says the same.
        with contextlib.suppress(OlderSchemaError), Store(built, mode="immutable") as store:
            if store.meta(SOURCE_DIGEST) == hashlib.sha256(text).hexdigest():
                return jsonl.Records(best=store.best_rows(arch), fits=store.fits(arch))
    return jsonl.loads(text.decode(), str(source))


class Database:
    """Lookups over both layers, and records into the user's.  Safe to share between threads for lookups only."""

    def __init__(self, path: str | Path | None = None, shipped: bool = True):
        self.path = Path(path) if path is not None else env.database_path()
        self._uses_shipped = shipped
        self._store: Store | None = None
        self._shipped: dict[str, jsonl.Records] = {}
        self._fits: dict[str, tuple[object, list[CostModel]]] = {}
        self._rows: dict[str, tuple[object, dict[Problem, list[tuple[str, BestRow]]]]] = {}
        self._matches: dict[tuple[Problem, str | None], tuple[object, Match]] = {}

    def lookup(self, problem: Problem, workload: str | None = None) -> Match:
        """The schedule to use for a problem and where it came from (see `choose`)."""
        stamp = self._stamp()
        cached = self._matches.get((problem, workload))
        if cached is None or cached[0] != stamp:
            rows = self._families(problem.arch, stamp).get(family(problem), [])
            cached = self._matches[problem, workload] = (stamp, choose(problem, rows, workload))
        warn_if_stale(cached[1])
        return cached[1]

    def near(self, problem: Problem, workload: str | None = None) -> list[Match]:
        """Rows near enough to answer a problem, best answer first, whether or not they can run there."""
        return ranked(problem, self._families(problem.arch, self._stamp()).get(family(problem), []), workload)

    def _stamp(self) -> object:
        """Changes whenever another process commits: SQLite writes the header of every committed file."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DatabaseError(f"{self.path} must be readable, but {error}; set QLA_DB to another file.") from error
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _families(self, arch: str, stamp: object) -> dict[Problem, list[tuple[str, BestRow]]]:
        cached = self._rows.get(arch)
        if cached is None or cached[0] != stamp:
            grouped: dict[Problem, list[tuple[str, BestRow]]] = {}
            for layer, row in self.best_rows(arch):
                grouped.setdefault(family(row.problem), []).append((layer, row))
            cached = self._rows[arch] = (stamp, grouped)
        return cached[1]

    def best_rows(self, arch: str) -> list[tuple[str, BestRow]]:
        """(layer, row) of both layers, the user's first."""
        reader = self.reader()
        own = []
        if reader is not None:
            with reader:
                own = reader.best_rows(arch)
        return [*(("user", row) for row in own), *(("shipped", row) for row in self._below(arch).best)]

    def _below(self, arch: str) -> jsonl.Records:
        if not self._uses_shipped:
            return jsonl.Records()
        if arch not in self._shipped:
            self._shipped[arch] = shipped(arch)
        return self._shipped[arch]

    def fits(self, problem: Problem) -> list[CostModel]:
        """Fitted cost models of a problem and of its family, the user's before the shipped ones."""
        stamp = self._stamp()
        cached = self._fits.get(problem.arch)
        if cached is None or cached[0] != stamp:
            reader, own = self.reader(), []
            if reader is not None:
                with reader:
                    own = reader.fits(problem.arch)
            cached = self._fits[problem.arch] = (stamp, [*own, *self._below(problem.arch).fits])
        return [fit for fit in cached[1] if fit.problem in (problem, family(problem))]

    def siblings(self, match: Match) -> list[BestRow]:
        """All best rows (one per workload) of the sweep that a match came from; none for a default."""
        if match.row is None:
            return []
        same = (match.layer, match.row.problem, match.row.template_digest)
        rows = self.best_rows(match.problem.arch)
        return [row for layer, row in rows if (layer, row.problem, row.template_digest) == same]

    def trials(self, problem: Problem | None = None, workload: str | None = None) -> list[Trial]:
        """The user's trials, in the order they were made."""
        reader = self.reader()
        if reader is None:
            return []
        with reader:
            return reader.trials(problem, workload)

    def reader(self) -> Store | None:
        """A short-lived read-only connection to the user's file, None where there is none yet.

        Nothing stays open across a fork, and a reader blocks no writer.
        """
        if not self.path.exists() or self.path.stat().st_size == 0:
            return None
        try:
            return Store(self.path, mode="ro")
        except DatabaseError:
            if not os.access(self.path, os.W_OK):
                raise
            # Only a writer may finish a rollback that a killed process left behind, or migrate an older file; for a
            # file that is broken or not ours this raises the same error again and changes nothing.
            Store(self.path).close()
            return Store(self.path, mode="ro")

    def meta(self, key: str) -> str | None:
        """A named string about the user's file, None where it was never stored."""
        reader = self.reader()
        if reader is None:
            return None
        with reader:
            return reader.meta(key)

    def left_out(self) -> Counter[str]:
        """How many of the user's rows are of kernels that this version does not have, by kernel."""
        reader = self.reader()
        if reader is None:
            return Counter()
        with reader:
            return reader.left_out()

    @property
    def store(self) -> Store:
        """The user's file, open for writing (created now if it does not exist)."""
        if self._store is None:
            self._store = Store(self.path)
        return self._store

    def import_records(self, records: jsonl.Records) -> None:
        """Add the records of a JSONL file, all in one transaction; a row replaces the row of its key."""
        self.store.add(records.environments.values(), records.trials, records.best, records.fits)

    def export_text(self, arch: str | None = None, trials: bool = True) -> str:
        """The user's records as canonical JSONL."""
        reader = self.reader()
        if reader is None:
            return jsonl.dumps()
        with reader:
            chosen = [t for t in reader.trials() if arch in (None, t.problem.arch)] if trials else []
            return jsonl.dumps(reader.best_rows(arch), chosen, reader.fits(arch))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_db(path: str | Path | None = None) -> Database:
    """The user's database (QLA_DB, or the platform's user data folder) over the shipped rows."""
    return Database(path)
