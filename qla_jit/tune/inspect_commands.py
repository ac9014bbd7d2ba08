"""The verbs of ``qla-tune`` that only look: show, doctor."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from ..artifacts import ArtifactStore
from ..db.layers import open_db
from . import tables
from .doctor import examine
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
    db: DbPath = None,
    as_json: AsJson = False,
) -> None:
    """Print the schedule that compile() would use, and where it came from."""
    problems = problems_of(
        arch, heads, head_dim, kernels, dtype, state_dtype, state_v_first, chunk_size, gate_dtype, beta_dtype
    )
    with open_db(db) as database:
        matches = [database.lookup(problem, workload or None) for problem in problems]
        if as_json:
            json.dump([tables.match_json(match) for match in matches], sys.stdout, indent=1)
            print()
        else:
            Console().print(tables.match_table(matches, database))


def doctor(db: DbPath = None, as_json: AsJson = False) -> None:
    """Say what is here, missing or stale, and what mends it.  Exit code 1 where something is missing or stale."""
    with open_db(db) as database:
        findings = examine(database, ArtifactStore())
    problems = sum(finding.is_problem for finding in findings)
    if as_json:
        json.dump({"ok": not problems, "findings": [f.as_dict() for f in findings]}, sys.stdout, indent=1)
        print()
    else:
        Console().print(tables.doctor_table(findings))
    if problems:
        raise typer.Exit(1)
