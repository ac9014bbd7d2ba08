"""`tools/host_cost.py` in a process of its own, where it replaces the kernels for good."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from qla_jit.config import BACKWARD

TOOL = Path(__file__).parents[2] / "tools" / "host_cost.py"


def rows_of(*arguments: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, TOOL, "--json", *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_signature_launches_what_its_name_says():
    rows = rows_of("--calls", "1")
    assert len(rows) >= 8 and all(row["host_us"] > 0 and row["cuda"] == torch.cuda.is_available() for row in rows)
    for row in rows:
        assert row["launches"] == (4 if "split" in row["signature"] else 2), row


def test_the_launches_of_a_backward_come_in_their_order():
    kernels = [*BACKWARD.before, *BACKWARD.whole, *BACKWARD.after]
    rows = rows_of("--backward", "--lengths", "64*2")
    names = [f"{kernel} {what}" for kernel in kernels for what in ("starts", "returns")]
    assert [row["part"] for row in rows] == [*names, "the call returns"]
    assert all(before["host_us"] <= after["host_us"] for before, after in zip(rows, rows[1:]))


def test_new_plans_are_timed_for_both_passes():
    rows = rows_of("--plans")
    assert len(rows) == 2 * 2 * 4 and all(row["host_us"] > 0 for row in rows)
    assert sum(row["part"].startswith("backward, ") for row in rows) == 8
