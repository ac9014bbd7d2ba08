"""From a `KernelSpec` to a shared library: TileLang lowers, nvcc compiles, ptxas' own words are kept.

Needs no GPU.  TileLang is imported here and nowhere else at run time.  Builds of several threads do not disturb each
other, nor TileLang kernels that the same process compiles for itself; they lower in parallel best in processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import cubin, ir, toolchain
from .arch import get_arch
from .artifacts import CUBIN, LIBRARY, SOURCE, Artifact, ArtifactStore, DeviceCode
from .errors import BuildError, InfeasibleError
from .registry import get_template
from .resources import is_feasible
from .spec import KernelSpec

NVCC_FLAGS = ("-O3", "-std=c++20", "-lineinfo")


def flags(spec: KernelSpec) -> tuple[str, ...]:
    """What changes the bytes besides source and toolchain: nvcc flags and TileLang pass options."""
    options = get_template(spec.schedule.template).pass_configs
    return (*NVCC_FLAGS, *(f"{name}={value}" for name, value in sorted(options.items())))


#: Environment variables by which nvcc takes flags that no digest sees.
HIDDEN_FLAGS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
CUDA_CALLBACK = "tilelang_callback_cuda_compile"


@dataclass(frozen=True)
class Lowered:
    """A lowered kernel: device and host IR, CUDA text, dynamic shared memory, the time it took, nvcc's cubin (None
    where the device code was not compiled), and where that was taken from instead of compiling the text again."""

    artifact: object
    source: str
    smem_bytes: int
    seconds: float
    cubin: bytes | None = None
    taken: DeviceCode | None = None


def _never(text: str) -> None:
    """No CUDA text is known."""


@dataclass
class _Run:
    """What nvcc said and made during one `lower`, or what it had made of the same text before."""

    log: list[str]
    known: Callable[[str], DeviceCode | None] = _never
    cubins: list[bytes] = field(default_factory=list)
    taken: DeviceCode | None = None


_current = threading.local()  # .run: the `_Run` of the build this thread is in
_callback_lock = threading.Lock()
_callback = None  # the function we registered with TVM


def ensure(spec: KernelSpec, store: ArtifactStore | None = None) -> Artifact:
    """The artifact of ``spec``: from the store, else built now and published.

    Raises InfeasibleError before anything is compiled, CompilerMissingError without nvcc, BuildError with the log.
    """
    store = store or ArtifactStore()
    found = store.get(spec, flags(spec))
    return found if found is not None else build(spec, store)


def build(spec: KernelSpec, store: ArtifactStore) -> Artifact:
    """Lower and compile ``spec``, whatever the store holds of it, and publish the result.

    A CUDA text that was compiled before, for whichever spec, is not compiled again.
    """
    feasible = is_feasible(spec.problem, spec.schedule)
    if not feasible:
        raise InfeasibleError(
            f"a schedule must be feasible to be built, but {spec.schedule}: {feasible}; use another schedule.",
            feasible.violations,
        )
    toolchain.current().require()
    store.prepare()
    log: list[str] = []
    target, options = get_arch(spec.problem.arch).target, flags(spec)
    lowered = lower(spec, log, known=lambda text: store.device_code(text, target, options))
    with tempfile.TemporaryDirectory(prefix="qla-build-") as folder:
        path = Path(folder) / LIBRARY
        try:
            lowered.artifact.rt_mod.export_library(str(path))
            library = path.read_bytes()
        except Exception as error:
            raise BuildError(
                f"the host stub of {spec} must link, but: {error}; put g++ on PATH, nvcc needs it too.", "\n".join(log)
            ) from error
    files = {LIBRARY: library, SOURCE: lowered.source.encode(), CUBIN: lowered.cubin}
    roles = get_template(spec.schedule.template).roles(spec.problem, spec.schedule)
    report = {
        **_said_by_ptxas(lowered.taken, log),
        **cubin.report(roles, lowered.cubin),
        **ir.report(lowered.artifact.device_mod),
        "smem_bytes": lowered.smem_bytes,
        "build_seconds": round(lowered.seconds, 3),
    }
    if lowered.taken is not None:
        report["device_code_of"] = lowered.taken.build
    artifact = store.publish(spec, options, files, report)
    if lowered.taken is None:
        store.remember_text(lowered.source, target, options, artifact)
    return artifact


def _said_by_ptxas(taken: DeviceCode | None, log: list[str]) -> dict:
    fields = ptxas_report("\n".join(log))
    return fields if taken is None else {name: taken.report[name] for name in fields}


def lower(
    spec: KernelSpec,
    log: list[str] | None = None,
    compile_device: bool = True,
    known: Callable[[str], DeviceCode | None] = _never,
) -> Lowered:
    """Run TileLang's pipeline; with ``compile_device`` also nvcc, whose output is appended to ``log``, unless the
    device code of the CUDA text is ``known``.

    Raises BuildError with what TileLang or nvcc said.
    """
    tilelang = _import_tilelang()
    tvm = tilelang.tvm
    template = get_template(spec.schedule.template)
    target = tvm.target.Target({"kind": "cuda", "arch": get_arch(spec.problem.arch).target})
    config = {getattr(tilelang.PassConfigKey, name): value for name, value in template.pass_configs.items()}
    run = _Run([] if log is None else log, known)
    began = time.perf_counter()
    _install_nvcc_callback()
    _current.run = run
    try:
        with tvm.transform.PassContext(opt_level=3, config=config), target:
            function = template.prim_func(spec.problem, spec.schedule)
            artifact = tilelang.lower(
                function, target=target, enable_host_codegen=compile_device, enable_device_compile=compile_device
            )
    except BuildError:
        raise
    except Exception as error:
        said = "\n".join(run.log)
        raise BuildError(f"{spec} with {spec.schedule} must lower for {target}, but: {error}", said) from error
    finally:
        _current.run = None
    if compile_device and len(run.cubins) != 1:
        said = "\n".join(run.log)
        raise BuildError(f"{spec} must compile to one cubin, but got {len(run.cubins)}; report this.", said)
    dynamic = [f.attrs["dyn_shared_memory_buf"] for f in artifact.device_mod.functions.values() if _has_dynamic(f)]
    return Lowered(
        artifact,
        artifact.kernel_source,
        int(sum(dynamic)),
        time.perf_counter() - began,
        run.cubins[0] if compile_device else None,
        run.taken,
    )


def _import_tilelang():
    try:
        import tilelang
    except OSError as error:  # importing it creates its cache folder
        raise BuildError(f"TileLang must import, but: {error}; set TILELANG_CACHE_DIR to a writable folder.") from error
    return tilelang


def _has_dynamic(function) -> bool:
    return "dyn_shared_memory_buf" in function.attrs


def _install_nvcc_callback() -> None:
    """Make TVM call our nvcc for kernels of this package, and whatever was registered before for all others."""
    global _callback
    import tvm_ffi

    with _callback_lock:
        previous = tvm_ffi.get_global_func(CUDA_CALLBACK)
        if _callback is not None and previous.same_as(_callback):
            return

        def compile_cuda(code, target, pass_config=None):
            run = getattr(_current, "run", None)
            if run is None:
                return previous(code, target, pass_config)
            run.taken = run.known(str(code))
            if run.taken is not None:
                run.cubins.append(run.taken.cubin)
            else:
                fast_math = bool((pass_config or {}).get("tl.enable_fast_math", False))
                run.cubins.append(nvcc_cubin(str(code), str(target.attrs["arch"]), run.log, fast_math))
            return bytearray(run.cubins[-1])

        tvm_ffi.register_global_func(CUDA_CALLBACK, compile_cuda, override=True)
        _callback = tvm_ffi.get_global_func(CUDA_CALLBACK)


def nvcc_cubin(source: str, target: str, log: list[str], fast_math: bool = True) -> bytes:
    """Compile CUDA text to a cubin for ``target`` (``sm_90a``).

    Raises BuildError with nvcc's output, CompilerMissingError without nvcc.
    """
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    tools = toolchain.current()
    tools.require()
    number = target.removeprefix("sm_")
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN_FLAGS}
    with tempfile.TemporaryDirectory(prefix="qla-nvcc-") as folder:
        (Path(folder) / SOURCE).write_text(source)
        command = [
            tools.nvcc_path, "--cubin", *NVCC_FLAGS, "-gencode", f"arch=compute_{number},code=sm_{number}",
            "--ptxas-options=-v", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}",
            *(["--use_fast_math"] if fast_math else []), "-o", CUBIN, SOURCE,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            raise BuildError(f"nvcc must start, but: {error}; check {tools.nvcc_path}.", str(error)) from error
        log.append(done.stderr)
        if done.returncode:
            said = "\n".join(re.findall(r".*\b(?:error|fatal)\b.*", done.stderr)) or done.stderr[-2000:]
            raise BuildError(f"nvcc must compile for {target}, but it said:\n{said[:2000]}", done.stderr)
        return (Path(folder) / CUBIN).read_bytes()


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
