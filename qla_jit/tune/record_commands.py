"""The verbs of ``qla-tune`` that move records between files and databases: export, import, merge."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..db import jsonl
from ..db.layers import open_db
from ..db.merge import merge
from ..errors import ConfigError
from . import json_output
from .options import AsJson, DbPath


def _say_left_out(console: Console, left_out: Mapping[str, int]) -> None:
    for kernel, rows in sorted(left_out.items()):
        text = f"left out: {rows} rows of {kernel}, a kernel that this version does not have"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def export_rows(
    file: Annotated[Path | None, typer.Argument(help="JSONL file to write; stdout by default.")] = None,
    arch: Annotated[str | None, typer.Option(help="Only rows of this architecture.")] = None,
    trials: Annotated[bool, typer.Option(help="Also every trial, not only the best rows.")] = True,
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Write your records as canonical JSONL: equal contents give equal bytes."""
    if as_json and file is None:
        raise ConfigError("`--json` needs a FILE, because stdout is where the rows go without one; name a file.")
    with open_db(db) as database:
        text, left_out = database.export_text(arch, trials), database.left_out()
    _say_left_out(Console(stderr=True), left_out)
    if file is None:
        sys.stdout.write(text)
    else:
        _write(file, text)
    if as_json:
        json_output.write("export", True, file=str(file), lines=text.count("\n"), left_out=dict(left_out))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the file to export to must be writable, but {error}; name another.") from error


def import_rows(
    file: Annotated[Path, typer.Argument(help="JSONL file that qla-tune export or --record wrote.")],
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of a JSONL file to your database: all of them or none."""
    records = jsonl.read(file)
    with open_db(db) as database:
        database.import_records(records)
        path = database.path
    if as_json:
        counts = {"best_rows": len(records.best), "trials": len(records.trials), "fits": len(records.fits)}
        json_output.write("import", True, **counts, left_out=dict(records.left_out), db=str(path))
    console = Console(stderr=True)
    console.print(f"{len(records.best)} best rows and {len(records.trials)} trials are in {path}", highlight=False)
    _say_left_out(console, records.left_out)


def merge_rows(
    sources: Annotated[list[Path], typer.Argument(help="Databases (SQLite) or exports (JSONL) to take rows from.")],
    into: Annotated[Path, typer.Option(help="Database to add them to; made if it does not exist.")],
    as_json: AsJson = False,
) -> None:
    """Unite databases, all or nothing: every trial once, and for one key the better-measured best row."""
    with open_db(into) as database:
        done = merge(sources, database)
    if as_json:
        json_output.write("merge", True, **asdict(done), db=str(into))
    text = (
        f"{done.trials_new} of {done.trials_read} trials were new; best rows: {done.best_new} new, "
        f"{done.best_replaced} replaced, {done.best_kept} kept; cost models: {done.fits_new} new; all in {into}"
    )
    console = Console(stderr=True)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    _say_left_out(console, done.left_out)
