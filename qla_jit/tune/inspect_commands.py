"""The verbs of ``qla-tune`` that only look: show, doctor."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..artifacts import ArtifactStore
from ..db.layers import open_db
from . import json_output, tables
from .doctor import examine
from .explain import explain
from .explain_output import explanation_json, print_explanation
from .options import (
    DEFAULT_HEADS,
    Arch,
    AsJson,
    BetaDtype,
    ChunkSize,
    DbPath,
    Dtype,
    GateDtype,
    HeadDim,
    Heads,
    Kernels,
    StateDtype,
    StateVFirst,
    problems_of,
)


def show(
    arch: Arch = "sm90",
    heads: Heads = DEFAULT_HEADS,
    head_dim: HeadDim = "128",
    kernels: Kernels = "",
    dtype: Dtype = "bfloat16",
    state_dtype: StateDtype = "float32",
    state_v_first: StateVFirst = False,
    gate_dtype: GateDtype = "float32",
    beta_dtype: BetaDtype = "float32",
    chunk_size: ChunkSize = "64",
    workload: Annotated[str, typer.Option(help="Prefer rows measured on this workload.")] = "",
    brief: Annotated[bool, typer.Option("--brief", help="Only the table, without the reasons.")] = False,
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Print the schedule that compile() would use, where it came from, what it beat, and what was rejected."""
    problems = problems_of(
        arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size, gate_dtype, beta_dtype
    )
    with open_db(db) as database:
        store = ArtifactStore()
        found = [explain(database, problem, workload or None, store) for problem in problems]
        if as_json:
            rows = [explanation_json(f) for f in found]
            json_output.write("show", True, db=str(database.path), rows=rows)
            return
        console = Console()
        console.print(tables.match_table([f.match for f in found], database))
        for f in [] if brief else found:
            print_explanation(f, console)


def doctor(db: DbPath = None, as_json: AsJson = False) -> None:
    """Say what is here, missing or stale, and what mends it.  Exit code 1 where something is missing or stale."""
    with open_db(db) as database:
        findings = examine(database, ArtifactStore())
    problems = sum(finding.is_problem for finding in findings)
    if as_json:
        json_output.write("doctor", not problems, findings=[f.as_dict() for f in findings])
    else:
        Console().print(tables.doctor_table(findings))
    if problems:
        raise typer.Exit(1)
