"""Tuning records as text: one JSON object a line, for review, export and recorded sweeps.

    {"kind": "header", "format": "qla-jit-tuning", "version": 1}
    {"kind": "environment", "id": …, "gpu": …, …}
    {"kind": "best", "problem": {…}, "schedule": {…}, "workload": …, "environment": "<id>", …}
    {"kind": "cost_model", "problem": {…}, "schedule": {…}, "form": …, "coefficients": {…}, "environment": "<id>", …}
    {"kind": "trial", "problem": {…}, "schedule": {…}, "workload": …, "environment": "<id>", "status": …, …}

`dumps` writes canonical JSON in one fixed order, so that equal contents are equal bytes.  A recorded sweep is the same
format in the order of measuring.  A malformed line is a DatabaseError with its number, and nothing of the file is used.
Rows of kernels that only another version has are left out and counted.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DatabaseError
from ..spec import canonical_json
from .records import BestRow, CostModel, Environment, Trial, parse, problem_body, unknown_kernel

FORMAT = "qla-jit-tuning"
VERSION = 1
HEADER = {"kind": "header", "format": FORMAT, "version": VERSION}


@dataclass
class Records:
    """The contents of one file.  left_out: rows of kernels that this version does not have, by kernel."""

    environments: dict[str, Environment] = field(default_factory=dict)
    best: list[BestRow] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    fits: list[CostModel] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def _line(kind: str, values: dict) -> str:
    return canonical_json({"kind": kind, **values}) + "\n"


def _environment_line(environment: Environment) -> str:
    return _line("environment", {"id": environment.id, **environment.as_dict()})


def dumps(best: Iterable[BestRow] = (), trials: Iterable[Trial] = (), fits: Iterable[CostModel] = ()) -> str:
    """Canonical text of the records and of the environments that they name."""
    best = sorted(best, key=lambda r: (canonical_json(problem_body(r.problem)), r.workload))
    trials = sorted(trials, key=lambda t: (canonical_json(problem_body(t.problem)), t.workload, t.created, t.uid))
    fits = sorted(fits, key=lambda f: (*map(canonical_json, (problem_body(f.problem), f.schedule.as_dict())), f.form))
    environments = {r.environment.id: r.environment for r in (*best, *trials, *fits)}
    lines = [canonical_json(HEADER) + "\n"]
    lines += [_environment_line(environments[key]) for key in sorted(environments)]
    lines += [_line("best", row.as_dict()) for row in best]
    lines += [_line("cost_model", fit.as_dict()) for fit in fits]
    lines += [_line("trial", trial.as_dict()) for trial in trials]
    return "".join(lines)


def loads(text: str, name: str) -> Records:
    """Inverse of `dumps`; ``name`` is what messages call the text."""
    records = Records()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            _read_line(records, line, first=number == 1)
        except (DatabaseError, json.JSONDecodeError) as error:
            raise DatabaseError(
                f"every line of a tuning file must be a known record, but {name}, line {number}: {error} "
                f"Remove the line, or export the file again."
            ) from error
    if not text.strip():
        raise DatabaseError(f"a tuning file must begin with its header, but {name} is empty; export it again.")
    return records


def _read_line(records: Records, line: str, first: bool) -> None:
    values = json.loads(line)
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if first != (kind == "header"):
        raise DatabaseError(f"`kind == 'header'` must hold for the first line alone, but got kind={kind!r}.")
    if kind == "header":
        if values.get("format") != FORMAT or values.get("version") != VERSION:
            raise DatabaseError(f"format {FORMAT} version {VERSION} must be given, but got {values}; upgrade qla-jit.")
    elif kind == "environment":
        key = values.pop("id", None)
        environment = parse(Environment.from_dict, values)
        if key != environment.id:
            raise DatabaseError(f"an environment's id must be its digest {environment.id}, but got {key!r}.")
        records.environments[key] = environment
    elif kind in ("best", "trial", "cost_model") and (kernel := unknown_kernel(values)) is not None:
        records.left_out[kernel] += 1
    elif kind == "best":
        records.best.append(parse(BestRow.from_dict, values, records.environments))
    elif kind == "trial":
        records.trials.append(parse(Trial.from_dict, values, records.environments))
    elif kind == "cost_model":
        records.fits.append(parse(CostModel.from_dict, values, records.environments))
    else:
        raise DatabaseError(
            f"`kind in ('environment', 'best', 'cost_model', 'trial')` must hold, but got {kind!r}; upgrade qla-jit."
        )


def read(path: str | Path) -> Records:
    """Records of a file; DatabaseError where it is missing or malformed."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DatabaseError(f"a readable JSONL file must be given, but {error}; check the path.") from error


class Recorder:
    """Appends trials to a file as they happen; every line is flushed, so a crash loses at most the last one.

    Half a line that a crash left is removed before the next is written; DatabaseError where nothing can be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._cut_half_line()
        known = read(self.path).environments if self.path.exists() and self.path.stat().st_size else None
        self._environments = set(known or ())
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise DatabaseError(f"the file to record into must be writable, but {error}; name another.") from error
        if known is None:
            self._write(canonical_json(HEADER) + "\n")

    def add(self, trial: Trial) -> None:
        if trial.environment.id not in self._environments:
            self._environments.add(trial.environment.id)
            self._write(_environment_line(trial.environment))
        self._write(_line("trial", trial.as_dict()))

    def _cut_half_line(self) -> None:
        with contextlib.suppress(OSError), self.path.open("r+b") as file:
            text = file.read()
            if text and not text.endswith(b"\n"):
                file.truncate(text.rfind(b"\n") + 1)

    def _write(self, line: str) -> None:
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # which tries to write what is left, too
            self._cut_half_line()
            raise DatabaseError(
                f"{self.path} must be writable to record into, but {error}; free space on its disk, then run the same "
                f"command again to go on."
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # said by `add` already
            self._file.close()
