"""Each thing that can be missing or stale is found, named with what mends it, and nothing is changed by looking."""

import sqlite3
from dataclasses import replace

import pytest
from tuning_fakes import (
    ENVIRONMENT,
    add_rows_of_a_gone_kernel,
    best,
    fake_template,
    point,
    problem,
    trial,
    use_templates,
)

from qla_jit import runtime, toolchain
from qla_jit.artifacts import LIBRARY, MANIFEST, ArtifactStore
from qla_jit.db import Database
from qla_jit.db.schema import MIGRATIONS
from qla_jit.errors import DatabaseError, ToolError, UnsupportedError
from qla_jit.spec import KernelSpec
from qla_jit.tune import doctor
from qla_jit.tune.doctor import examine

TOOLS = toolchain.Toolchain("0.1.15", "13.0.88", "/x/nvcc")
OLD = "e" * 64


@pytest.fixture(autouse=True)
def healthy(monkeypatch):
    use_templates(monkeypatch, fake_template())
    monkeypatch.setattr(toolchain, "current", lambda: TOOLS)
    monkeypatch.setattr(doctor, "find_nvdisasm", lambda: "/x/nvdisasm")
    monkeypatch.setattr(runtime, "start", lambda: None)
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "shipped_rows", lambda arch: [])


@pytest.fixture
def db(tmp_path):
    with Database(tmp_path / "user.sqlite", shipped=False) as database:
        yield database


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "kernels")


def found(findings, name):
    (finding,) = [f for f in findings if f.name == name]
    return finding


def problems(findings):
    return [(f.name, f.verdict) for f in findings if f.is_problem]


def fail(error):
    def call(*_):
        raise error

    return call


def test_a_healthy_machine_without_a_card_has_no_problem_and_looking_makes_no_file(db, store, tmp_path):
    findings = examine(db, store)
    assert problems(findings) == []
    assert found(findings, "GPU").verdict == "note"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (replace(TOOLS, nvcc=None, nvcc_path=None), ("nvcc", "missing")),
        (replace(TOOLS, nvcc="12.7.99"), ("nvcc", "stale")),
        (replace(TOOLS, nvcc="11.9.1"), ("nvcc", "stale")),
        (replace(TOOLS, tilelang=None), ("TileLang", "missing")),
    ],
)
def test_missing_or_old_compiler_is_a_problem(tools, expected, db, store, monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: tools)
    findings = examine(db, store)
    assert problems(findings) == [expected]
    assert "install" in found(findings, expected[0]).fix


def test_oldest_supported_nvcc_is_no_problem(db, store, monkeypatch):
    monkeypatch.setattr(toolchain, "current", lambda: replace(TOOLS, nvcc="12.8.0"))
    assert problems(examine(db, store)) == []


def test_missing_nvdisasm_names_its_package(db, store, monkeypatch):
    monkeypatch.setattr(doctor, "find_nvdisasm", fail(ToolError("none")))
    findings = examine(db, store)
    assert problems(findings) == [("nvdisasm", "missing")]
    assert found(findings, "nvdisasm").fix == "pip install nvidia-cuda-nvdisasm"


@pytest.mark.parametrize("error", [ToolError("libtilelang.so does not load"), ImportError("no tvm_ffi")])
def test_runtime_libraries_that_do_not_load_are_a_problem(error, db, store, monkeypatch):
    monkeypatch.setattr(runtime, "start", fail(error))
    findings = examine(db, store)
    assert problems(findings) == [("runtime libraries", "broken")]
    assert str(error) in found(findings, "runtime libraries").found


@pytest.mark.parametrize("error", [UnsupportedError("capability (8, 0)"), RuntimeError("driver too old")])
def test_a_card_that_cannot_be_used_is_noted(error, db, store, monkeypatch):
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "environment_of", fail(error))
    findings = examine(db, store)
    assert problems(findings) == []
    assert found(findings, "GPU").found == str(error)


def test_cache_entries_are_counted_by_toolchain(db, store, monkeypatch):
    for a, tools in enumerate((TOOLS, TOOLS, replace(TOOLS, nvcc="12.9.1"), replace(TOOLS, tilelang="0.1.14"))):
        monkeypatch.setattr(toolchain, "current", lambda tools=tools: tools)
        made = store.publish(KernelSpec(problem(), point(a)), (), {LIBRARY: b"x"}, {})
    (made.path / MANIFEST).write_text("{")
    monkeypatch.setattr(toolchain, "current", lambda: TOOLS)
    finding = found(examine(db, store), "kernel cache")
    assert (finding.verdict, finding.values) == (
        "ok",
        {"path": str(store.root), "entries": 4, "of_other_toolchains": 1, "unreadable": 1},
    )


def test_cache_that_others_can_write_is_broken_until_its_mode_is_mended(db, store):
    store.prepare()
    store.root.chmod(0o777)
    findings = examine(db, store)
    assert problems(findings) == [("kernel cache", "broken")]
    assert f"chmod -R go-w {store.root}" in found(findings, "kernel cache").fix
    store.root.chmod(0o755)
    assert problems(examine(db, store)) == []


def test_user_database_is_described(db, store):
    db.store.add(trials=[trial(created="1"), trial(created="2")], best=[best()])
    finding = found(examine(db, store), "user database")
    counted = {"schema": len(MIGRATIONS), "trials": 2, "best_rows": 1, "left_out": {}}
    assert finding.values == {"path": str(db.path), **counted}


def test_rows_of_a_gone_kernel_are_noted_and_no_problem(db, store):
    add_rows_of_a_gone_kernel(db.path)
    db.store.put_best(best())
    findings = examine(db, store)
    assert problems(findings) == []
    finding = found(findings, "rows of other versions")
    assert (finding.verdict, finding.values) == ("note", {"gone": 3})
    assert "3 rows of gone" in finding.found
    assert found(findings, "user database").values["best_rows"] == 1


@pytest.mark.parametrize("kind", ["foreign", "newer"])
def test_database_that_cannot_be_read_is_broken_and_the_rest_is_still_examined(kind, db, store):
    if kind == "foreign":
        db.path.write_bytes(b"something else entirely" * 50)
    else:
        db.store.put_best(best())
        db.close()
        with sqlite3.connect(db.path) as connection:
            connection.execute("PRAGMA user_version = 99")
    findings = examine(db, store)
    assert problems(findings) == [("user database", "broken")]
    assert str(db.path) in found(findings, "user database").found
    assert found(findings, "stale rows").verdict == "ok"


def test_shipped_rows_are_counted_per_arch(db, store, monkeypatch):
    rows = {"sm90": [best(), best(workload="*")], "sm120": [best(problem_=problem(arch="sm120"))]}
    monkeypatch.setattr(doctor, "shipped_rows", lambda arch: rows.get(arch, []))
    values = found(examine(db, store), "shipped rows").values
    assert values == {"sm90": 2, "sm100": 0, "sm103": 0, "sm120": 1, "sm121": 0}


def test_shipped_rows_that_cannot_be_read_are_a_problem(db, store, monkeypatch):
    monkeypatch.setattr(doctor, "shipped_rows", fail(DatabaseError("sm90.jsonl, line 3")))
    assert problems(examine(db, store)) == [("shipped rows", "broken")]


def test_card_without_rows_of_its_arch_is_told_to_tune(db, store, monkeypatch):
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "environment_of", lambda: replace(ENVIRONMENT, arch="sm120"))
    db.store.put_best(best())
    findings = examine(db, store)
    assert problems(findings) == [("tuned rows", "missing")]
    assert found(findings, "tuned rows").fix == "qla-tune --arch sm120"
    db.store.put_best(best(problem_=problem(arch="sm120")))
    assert problems(examine(db, store)) == []


def test_stale_rows_come_with_one_command_for_all_heads(db, store, monkeypatch):
    rows = [best(problem_=problem(h, 64), template_digest=OLD) for h in (16, 32)]
    monkeypatch.setattr(doctor, "shipped_rows", lambda arch: rows if arch == "sm90" else [])
    db.store.put_best(best(point(template="gone"), problem(head_dim_k=64, head_dim_v=64)))
    db.store.put_best(best(problem_=problem(8, 32)))
    stale = [f for f in examine(db, store) if f.name == "stale rows"]
    assert {(f.verdict, f.values["rows"], f.fix) for f in stale} == {
        ("stale", 2, "qla-tune --arch sm90 --kernels fused_forward --heads 16:64,32:64 --head-dim 128"),
        ("stale", 1, "qla-tune --arch sm90 --kernels fused_forward --heads 16:64 --head-dim 64"),
    }


def test_a_stale_row_that_a_current_one_outranks_is_no_problem(db, store, monkeypatch):
    """Otherwise the command that doctor names could not clear what it found: shipped rows stay as they are."""
    monkeypatch.setattr(doctor, "shipped_rows", lambda arch: [best(template_digest=OLD)] if arch == "sm90" else [])
    assert problems(examine(db, store)) == [("stale rows", "stale")]
    db.store.put_best(best())
    assert problems(examine(db, store)) == []
