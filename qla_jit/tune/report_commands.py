"""``qla-tune report``: a database or recorded sweeps as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..config import KERNELS
from ..db.layers import open_db
from ..errors import ConfigError
from . import json_output
from .options import AsJson, DbPath, names_in
from .report import render
from .report_data import ReportData, filtered, from_database, from_files


def write_report(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Recorded sweeps (JSONL) or databases; by default yours over the shipped rows."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    arch: Annotated[str | None, typer.Option(help="Only this architecture.")] = None,
    kernels: Annotated[str, typer.Option(help="Only these kernels, separated by commas.")] = "",
    heads: Annotated[str, typer.Option(help="Only these H:HV, separated by commas.")] = "",
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Tuning report",
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: best rows, importances, curves, heat maps, failures, provenance."""
    unknown = [name for name in names_in(kernels) if name not in KERNELS]
    if unknown:
        raise ConfigError(f"`--kernels` must be of {', '.join(KERNELS)}, but got {', '.join(unknown)}; remove those.")
    data = filtered(_data(files, db, arch), names_in(kernels), names_in(heads))
    text = render(data, title)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"`--out` must be writable, but {error}; name another file.") from error
    counts = {"trials": len(data.trials), "best_rows": len(data.best), "problems": len(data.problems)}
    if as_json:
        json_output.write("report", True, out=str(out), bytes=len(text.encode()), sources=data.sources, **counts)
        return
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    Console(stderr=True).print(f"{out}: {told}", highlight=False, markup=False, soft_wrap=True)


def _data(files: list[Path] | None, db: Path | None, arch: str | None) -> ReportData:
    if files:
        if db is not None:
            raise ConfigError("either files or `--db` must be given, but got both; leave one out.")
        return from_files(files, arch)
    with open_db(db) as database:
        return from_database(database, arch)
