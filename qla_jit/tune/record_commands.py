"""The verbs of ``qla-tune`` that move records between files and databases: export, import, merge."""

from __future__ import annotations

import json
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
) -> None:
    """Write your records as canonical JSONL: equal contents give equal bytes."""
    with open_db(db) as database:
        text, left_out = database.export_text(arch, trials), database.left_out()
    _say_left_out(Console(stderr=True), left_out)
    if file is None:
        sys.stdout.write(text)
    else:
        file.write_text(text, encoding="utf-8")


def import_rows(
    file: Annotated[Path, typer.Argument(help="JSONL file that qla-tune export or --record wrote.")],
    db: DbPath = None,
) -> None:
    """Add the records of a JSONL file to your database: all of them or none."""
    records = jsonl.read(file)
    with open_db(db) as database:
        database.import_records(records)
        path = database.path
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
        json.dump({**asdict(done), "db": str(into)}, sys.stdout, indent=1)
        print()
    text = (
        f"{done.trials_new} of {done.trials_read} trials were new; best rows: {done.best_new} new, "
        f"{done.best_replaced} replaced, {done.best_kept} kept; cost models: {done.fits_new} new; all in {into}"
    )
    console = Console(stderr=True)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    _say_left_out(console, done.left_out)
