"""From a `KernelSpec` to a shared library: TileLang lowers, nvcc compiles, ptxas' own words are kept.

Needs no GPU.  TileLang is imported here and nowhere else at run time.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import toolchain
from .arch import get_arch
from .artifacts import LIBRARY, SOURCE, Artifact, ArtifactStore
from .errors import BuildError, InfeasibleError
from .registry import get_template
from .resources import is_feasible
from .spec import KernelSpec

NVCC_FLAGS = ("-O3", "-std=c++20", "-lineinfo")


def flags(spec: KernelSpec) -> tuple[str, ...]:
    """What changes the bytes besides source and toolchain: nvcc flags and TileLang pass options."""
    options = get_template(spec.schedule.template).pass_configs
    return (*NVCC_FLAGS, *(f"{name}={value}" for name, value in sorted(options.items())))


@dataclass(frozen=True)
class Lowered:
    """A lowered kernel: device and host IR, CUDA text, and the time it took."""

    artifact: object
    source: str
    smem_bytes: int
    seconds: float


def ensure(spec: KernelSpec, store: ArtifactStore | None = None) -> Artifact:
    """The artifact of ``spec``: from the store, else built now and published.

    Raises InfeasibleError before anything is compiled, CompilerMissingError without nvcc, BuildError with the log.
    """
    store = store or ArtifactStore()
    found = store.get(spec, flags(spec))
    return found if found is not None else build(spec, store)


def build(spec: KernelSpec, store: ArtifactStore) -> Artifact:
    """Lower and compile ``spec``, whatever the store holds, and publish the result."""
    feasible = is_feasible(spec.problem, spec.schedule)
    if not feasible:
        raise InfeasibleError(
            f"a schedule must be feasible to be built, but {spec.schedule}: {feasible}; use another schedule.",
            feasible.violations,
        )
    toolchain.current().require()
    log: list[str] = []
    lowered = lower(spec, log)
    with tempfile.TemporaryDirectory(prefix="qla-build-") as folder:
        path = Path(folder) / LIBRARY
        try:
            lowered.artifact.rt_mod.export_library(str(path))
        except Exception as error:
            raise BuildError(f"the host stub of {spec} must link, but: {error}", "\n".join(log)) from error
        files = {LIBRARY: path.read_bytes(), SOURCE: lowered.source.encode()}
    report = {**ptxas_report("\n".join(log)), "smem_bytes": lowered.smem_bytes, "build_seconds": round(lowered.seconds, 3)}
    return store.publish(spec, flags(spec), files, report)


def lower(spec: KernelSpec, log: list[str] | None = None, compile_device: bool = True) -> Lowered:
    """Run TileLang's pipeline; with ``compile_device`` also nvcc, whose output is appended to ``log``."""
    os.environ.setdefault("TILELANG_DISABLE_CACHE", "1")  # our store is the only cache
    import tilelang
    from tilelang import tvm

    template = get_template(spec.schedule.template)
    target = tvm.target.Target({"kind": "cuda", "arch": get_arch(spec.problem.arch).target})
    config = {getattr(tilelang.PassConfigKey, name): value for name, value in template.pass_configs.items()}
    began = time.perf_counter()
    _install_nvcc_callback(log if log is not None else [])
    try:
        with tvm.transform.PassContext(opt_level=3, config=config), target:
            function = template.prim_func(spec.problem, spec.schedule)
            artifact = tilelang.lower(
                function, target=target, enable_host_codegen=compile_device, enable_device_compile=compile_device
            )
    except BuildError:
        raise
    except Exception as error:
        said = "\n".join(log or [])
        raise BuildError(f"{spec} with {spec.schedule} must lower for {target}, but: {error}", said) from error
    dynamic = [f.attrs["dyn_shared_memory_buf"] for f in artifact.device_mod.functions.values() if _has_dynamic(f)]
    return Lowered(artifact, artifact.kernel_source, int(sum(dynamic)), time.perf_counter() - began)


def _has_dynamic(function) -> bool:
    return "dyn_shared_memory_buf" in function.attrs


def _install_nvcc_callback(log: list[str]) -> None:
    """TileLang calls this for every kernel; ours keeps ptxas' report and ignores TileLang's own binary cache."""
    import tvm_ffi

    def compile_cuda(code, target, pass_config=None):
        fast_math = bool((pass_config or {}).get("tl.enable_fast_math", False))
        return bytearray(nvcc_cubin(str(code), str(target.attrs["arch"]), log, fast_math))

    tvm_ffi.register_global_func("tilelang_callback_cuda_compile", compile_cuda, override=True)


def nvcc_cubin(source: str, target: str, log: list[str], fast_math: bool = True) -> bytes:
    """Compile CUDA text to a cubin for ``target`` (``sm_90a``); BuildError carries nvcc's output."""
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    number = target.removeprefix("sm_")
    with tempfile.TemporaryDirectory(prefix="qla-nvcc-") as folder:
        text, binary = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        text.write_text(source)
        command = [
            toolchain.current().nvcc_path, "--cubin", *NVCC_FLAGS, "-gencode", f"arch=compute_{number},code=sm_{number}",
            "--ptxas-options=-v", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}",
            *(["--use_fast_math"] if fast_math else []), "-o", str(binary), str(text),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log.append(done.stderr)
        if done.returncode:
            raise BuildError(f"nvcc must compile the kernel for {target}, but it failed:\n{done.stderr[-2000:]}", done.stderr)
        return binary.read_bytes()


def ptxas_report(log: str) -> dict:
    """Registers at launch, spills, stack and static shared memory (bytes), and ptxas' performance warnings."""

    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    return {
        "registers": max(registers, default=0),
        "spill_bytes": total(r"(\d+) bytes spill stores"),
        "local_bytes": total(r"(\d+) bytes stack frame"),
        "static_smem_bytes": total(r"(\d+) bytes smem"),
        "warnings": sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", log))),
    }
