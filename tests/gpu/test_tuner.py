"""The tuner on a card with two kernels gone bad: one that never ends and one whose result is wrong."""

import json
import os
import subprocess
import sys

import pytest

from qla_jit import build, registry
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import OpConfig
from qla_jit.db import open_db
from qla_jit.spec import KernelSpec

pytestmark = pytest.mark.gpu

PROBLEM = OpConfig(2, 8).problem("kkt_inverse")
SWEEP = [
    "--heads",
    "2:8",
    "--head-dim",
    "128",
    "--kernels",
    "kkt_inverse",
    "--workload",
    "1024x8",
    "--chunk-size",
    "64",
]
#: In the CUDA text of the kernel: what is put in the place of what.
HANG = ("__syncthreads();", "__syncthreads(); while (clock64() != 1) __nanosleep(1000);")
WRONG = ("kLog2E = 1.4426950408889634f", "kLog2E = 1.5f")


def plant(store, monkeypatch, schedule, fault):
    """Publish a kernel for ``schedule`` whose device code was compiled from altered text."""
    original, (text, replacement) = build.nvcc_cubin, fault

    def nvcc_cubin(source, *args, **kwargs):
        assert text in source
        return original(source.replace(text, replacement, 1), *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(build, "nvcc_cubin", nvcc_cubin)
        patched.setattr(store, "remember_text", lambda *args: None)  # its text is not what was compiled
        build.build(KernelSpec(PROBLEM, schedule), store)


def qla_tune(*arguments):
    command = [sys.executable, "-m", "qla_jit.cli", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=os.environ)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_a_sweep_survives_a_hanging_and_a_wrong_kernel_and_chooses_neither(tmp_path, monkeypatch):
    monkeypatch.setenv("QLA_CACHE_DIR", str(tmp_path / "cache"))
    template = registry.get_template("kkt_inverse_sm90")
    default = template.default(PROBLEM)
    hanging = default.replace(value_heads_per_cta=1, min_ctas_per_sm=1)
    wrong = default.replace(value_heads_per_cta=2, min_ctas_per_sm=1)
    store = ArtifactStore()
    plant(store, monkeypatch, hanging, HANG)
    plant(store, monkeypatch, wrong, WRONG)
    db_path = tmp_path / "tuning.sqlite"

    code, said, errors = qla_tune("run", *SWEEP, "--db", str(db_path))
    assert code == 0, (said, errors)
    with open_db(db_path) as db:
        trials = {t.schedule: t for t in db.trials(PROBLEM) if t.phase == "search"}
        rows = [row for layer, row in db.best_rows("sm90") if layer == "user"]
    assert trials[hanging].status == "run_timeout" and trials[wrong].status == "wrong"
    others = {schedule: t.status for schedule, t in trials.items() if schedule not in (hanging, wrong)}
    assert len(others) >= 8 and set(others.values()) <= {"ok", "duplicate", "filtered"}
    assert rows and not {row.schedule for row in rows} & {hanging, wrong}

    code, said, errors = qla_tune("verify", "--db", str(db_path), "--layer", "user")
    assert code == 0, (said, errors)

    before = len(trials)
    code, said, errors = qla_tune("resume", "--db", str(db_path))
    assert code == 0, (said, errors)
    with open_db(db_path) as db:
        again = [t for t in db.trials(PROBLEM) if t.phase == "search"]
    assert len(again) == before  # every point is tried once
