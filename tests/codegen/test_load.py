"""A compiled kernel loads fast, with neither TileLang's Python package nor a compiler, even after the process moved."""

import json
import os
import subprocess
import sys

import pytest
import torch
from kernels import DEFAULTS, HOPPER, INVERSE

from qla_jit import build, harness, runtime
from qla_jit.config import SPLIT_BACKWARD_KERNELS
from qla_jit.handles import TensorHandle

LOAD_S = 0.050  # a kernel, from asking the store to its entry
START_S = 0.5  # once per process: TVM's and TileLang's shared libraries, and nvcc's version
KERNELS = [k for k in HOPPER if k.template == INVERSE] + [HOPPER[0]]

LOADER = """
import json, sys, time
import torch, tvm_ffi  # what others' packages take to import is theirs
before = time.perf_counter()
from qla_jit import build, runtime, toolchain
from qla_jit.artifacts import ArtifactStore
from qla_jit.config import Problem
from qla_jit.schedule import Schedule
from qla_jit.spec import KernelSpec
if len(sys.argv) > 3:
    toolchain.DEFAULT_NVCC = __import__("pathlib").Path(sys.argv[3])
question = json.loads(sys.argv[2])
spec = KernelSpec(Problem.from_dict(question["problem"]), Schedule.from_dict(question["schedule"]))
store = ArtifactStore(sys.argv[1])
flags = build.flags(spec)
imported = time.perf_counter()
nvcc = toolchain.current().nvcc
runtime.start()
started = time.perf_counter()
entry = runtime.load(store.get(spec, flags))
print(json.dumps({
    "callable": callable(entry), "nvcc": nvcc, "import_s": imported - before, "start_s": started - imported,
    "load_s": time.perf_counter() - started,
    "imported": [name for name in ("tilelang", "tvm", "optuna") if name in sys.modules],
}))
"""


def load(cache, kernel, *more: str, **environment) -> dict:
    question = json.dumps({"problem": kernel.spec.problem.as_dict(), "schedule": kernel.spec.schedule.as_dict()})
    command = [sys.executable, "-c", LOADER, str(cache.root), question, *more]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_artifact_loads_without_tilelang(kernel, artifact, cache):
    said = load(cache, kernel)
    assert said["callable"] and said["imported"] == []


@pytest.mark.wall_clock
@pytest.mark.parametrize("kernel", KERNELS[:1], ids=str)
def test_artifact_loads_within_50_ms(kernel, artifact, cache):
    said = [load(cache, kernel) for _ in range(5)]
    best = {name: min(s[name] for s in said) for name in ("import_s", "start_s", "load_s")}
    assert best["load_s"] <= LOAD_S and best["start_s"] <= START_S, best


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=str)
def test_artifact_loads_where_there_is_no_compiler(kernel, artifact, cache, tmp_path):
    said = load(cache, kernel, str(tmp_path / "nvcc"), PATH=str(tmp_path), CUDA_HOME="", CUDA_PATH="")
    assert said["nvcc"] is None and said["callable"] and said["imported"] == []


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=str)
def test_second_ensure_compiles_nothing(kernel, artifact, cache, monkeypatch):
    def lower(*arguments, **named):
        raise AssertionError("lowering began")

    monkeypatch.setattr(build, "lower", lower)
    assert build.ensure(kernel.spec, cache) == artifact


@pytest.mark.parametrize("kernel", KERNELS[:1], ids=str)
def test_library_of_another_runtime_is_a_tool_error(kernel, artifact, tmp_path):
    from dataclasses import replace

    from qla_jit import runtime
    from qla_jit.errors import ToolError

    (tmp_path / "kernel.so").write_bytes(b"\x7fELF not a library")
    with pytest.raises(ToolError, match="delete .* to rebuild"):
        runtime.load(replace(artifact, path=tmp_path))


def is_run_by_harness(kernel) -> bool:
    return kernel.config.arch == "sm90" and kernel.spec.problem.kernel not in SPLIT_BACKWARD_KERNELS


@pytest.mark.skipif(torch.cuda.is_available(), reason="the addresses hold nothing: no kernel may start")
@pytest.mark.parametrize("kernel", [k for k in DEFAULTS if is_run_by_harness(k)], ids=str)
def test_host_code_takes_handles_for_tensors(kernel, artifact):
    """With all arguments as they should be, what is missing is the card; with a shape that is wrong, it says so."""
    entry, card = runtime.load(artifact), torch.device("cuda", 0)
    arguments = harness.make_case(kernel.spec.problem, (1200, 64), 0, device="cpu").arguments
    is_tensor = [isinstance(x, torch.Tensor) for x in arguments]
    place = lambda shape, x: TensorHandle(shape, x.dtype, card)
    handles = [place(x.shape, x) if tensor else x for tensor, x in zip(is_tensor, arguments)]
    with pytest.raises(Exception, match="CUDA"):
        entry(*(x.at(1 << 32) if tensor else x for tensor, x in zip(is_tensor, handles)))
    which = max(n for n, tensor in enumerate(is_tensor) if tensor)
    handles[which] = place((*arguments[which].shape, 1), arguments[which])
    with pytest.raises(Exception, match=kernel.spec.problem.kernel):
        entry(*(x.at(1 << 32) if tensor else x for tensor, x in zip(is_tensor, handles)))
