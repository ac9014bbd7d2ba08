"""`tools/host_cost.py` in a process of its own, where it replaces the kernels for good."""

import json
import subprocess
import sys
from pathlib import Path

import torch

TOOL = Path(__file__).parents[2] / "tools" / "host_cost.py"


def test_every_signature_launches_what_its_name_says():
    done = subprocess.run(
        [sys.executable, TOOL, "--calls", "1", "--json"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) >= 8 and all(row["host_us"] > 0 and row["cuda"] == torch.cuda.is_available() for row in rows)
    for row in rows:
        assert row["launches"] == (4 if "split" in row["signature"] else 2), row
