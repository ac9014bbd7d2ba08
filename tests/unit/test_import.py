"""What `import qla_jit` may cost: no TileLang, no Optuna, no CUDA context, no file read, little time."""

import json
import subprocess
import sys

import pytest

import qla_jit

HEAVY = ("tilelang", "tvm", "tvm_ffi", "optuna", "triton", "matplotlib", "rich", "typer", "sqlite_utils", "sqlite3")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    report = "print(json.dumps(sorted(set(sys.modules) - before)))"
    code = f"import json, sys, torch; before = set(sys.modules)\n{statement}\n{report}"
    return {name.partition(".")[0] for name in json.loads(run(code))}


def test_import_loads_nothing_heavy():
    assert not loaded_by("import qla_jit").intersection(HEAVY)


def test_the_measure_of_the_test_above_sees_a_heavy_import():
    assert "sqlite3" in loaded_by("import qla_jit, sqlite3").intersection(HEAVY)


def test_naming_a_config_and_the_operator_loads_no_compiler_and_no_tuner():
    loaded = loaded_by("import qla_jit; qla_jit.OpConfig(2, 8); qla_jit.chunk_gated_delta_rule; qla_jit.compile")
    assert not loaded & {"tilelang", "tvm", "tvm_ffi", "optuna"}


def test_import_opens_no_cuda_context_and_reads_no_file_of_its_own():
    run(
        """
        import sys, torch
        opened = []
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
        import qla_jit
        strange = [name for name in opened if not name.endswith((".py", ".pyc")) and ".pyc." not in name]
        assert not torch.cuda.is_initialized(), "CUDA was initialised"
        assert not strange, strange
        """.replace("\n        ", "\n")
    )


@pytest.mark.wall_clock
def test_import_adds_at_most_300_ms_to_that_of_torch():
    code = "import time, torch; t = time.perf_counter(); import qla_jit; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) <= 0.3


@pytest.mark.wall_clock
def test_the_operator_itself_is_there_within_300_ms_of_torch():
    code = (
        "import time, torch; t = time.perf_counter(); import qla_jit; qla_jit.OpConfig; qla_jit.chunk_gated_delta_rule"
        "; print(time.perf_counter() - t)"
    )
    assert min(float(run(code)) for _ in range(3)) <= 0.3


def test_every_public_name_is_absent_after_the_import_and_resolves_at_first_use():
    run(
        """
        import qla_jit
        names = [name for name in qla_jit.__all__ if name != "__version__"]
        assert len(names) > 10 and set(names) <= set(dir(qla_jit)), names
        for name in names:
            assert name not in vars(qla_jit), f"{name} was loaded with the package, or before its turn"
            assert getattr(qla_jit, name) is vars(qla_jit)[name]
        """.replace("\n        ", "\n")
    )


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qla_jit.nothing  # noqa: B018
