"""CUDA text compiled for the CPU, and its launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .errors import EmulationError
from .rewrite import rewrite

SOURCES = Path(__file__).parent / "cpp"
FLAGS = ("-std=c++20", "-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden", "-w")
KERNEL_FLAGS = ("-O1", "-ftrivial-auto-var-init=pattern")  # what a kernel never wrote is huge
MACHINE_FLAGS = ("-O3",)
CACHE_VARIABLE = "QLA_EMULATOR_CACHE"
ERROR_BYTES = 1 << 16


@dataclass(frozen=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` gets: ``dims`` in elements, innermost first; ``strides`` in bytes, the first that
    of an element; ``box`` in elements; ``swizzle`` 0 (none), 1 (32 bytes), 2 (64 bytes) or 3 (128 bytes)."""

    tensor: torch.Tensor
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        rank, element = len(self.dims), self.strides[0]
        inner = self.box[0] * element
        rules = {
            "1 <= rank <= 5, equal for dims, strides and box": 1 <= rank <= 5
            and rank == len(self.strides) == len(self.box),
            "every dim >= 1": all(dim >= 1 for dim in self.dims),
            "1 <= box <= 256": all(1 <= extent <= 256 for extent in self.box),
            "strides % 16 == 0": all(stride % 16 == 0 for stride in self.strides[1:]),
            "box[0] of whole 16-byte units": inner % 16 == 0,
            "box[0] within the swizzle": not self.swizzle or inner <= 16 << self.swizzle,
            "the swizzle known": self.swizzle in (0, 1, 2, 3),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise EmulationError(f"a tensor map must have {'; '.join(broken)}, but is {self.as_text()}.")

    def as_text(self) -> str:
        """Its numbers, without the data."""
        return f"dims={self.dims}, strides={self.strides}, box={self.box}, swizzle={self.swizzle}"


#: What a kernel may be given: tensors go by pointer; an int is an int32 unless it is a `ctypes.c_int64`.
Argument = torch.Tensor | TensorMap | int | float | ctypes.c_int64


class _TensorMap(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64), ("dims", ctypes.c_uint64 * 5), ("strides", ctypes.c_uint64 * 5),
        ("box", ctypes.c_uint32 * 5), ("rank", ctypes.c_int32), ("swizzle", ctypes.c_int32),
    ]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Argument(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32), ("buffer", ctypes.c_int32), ("integer", ctypes.c_int64),
        ("real", ctypes.c_double), ("map", _TensorMap),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("dynamic_bytes", ctypes.c_uint64), ("seed", ctypes.c_uint64),
        ("flush_denormals", ctypes.c_int32), ("num_buffers", ctypes.c_int32), ("num_arguments", ctypes.c_int32),
        ("error_bytes", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_Buffer)), ("arguments", ctypes.POINTER(_Argument)), ("error", ctypes.c_char_p),
    ]  # fmt: skip


class Program:
    """One kernel of a CUDA text, compiled by g++ when first made and kept by content in ``cache``.

    source: CUDA C++.  kernel: the name of an ``extern "C" __global__`` function in it.  cache: a folder; by default
    $QLA_EMULATOR_CACHE, else one in the temporary folder.

    Raises EmulationError if the text holds what is not modelled, with g++'s or the rewriter's words.
    """

    def __init__(self, source: str, kernel: str, cache: str | Path | None = None):
        text = f'#include "ptx.h"\n{rewrite(source)}\n{_ENTRY.format(kernel=kernel)}'
        self.kernel = kernel
        folder = _cache_folder(cache)
        machine = _compiled(folder, (SOURCES / "machine.cpp").read_text(), MACHINE_FLAGS, "-c", ".o", [])
        library = _compiled(folder, text, KERNEL_FLAGS, "-shared", ".so", [machine])
        self._run = ctypes.CDLL(str(library)).emu_run

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
        seed: int = 0,
        flush_denormals: bool = True,
        names: Sequence[str] | None = None,
    ) -> None:
        """Run all blocks of a grid, writing tensors in place.

        grid, block: up to three extents.  arguments: in the kernel's order.  shared_bytes: of dynamic shared memory.
        seed: of the schedule; 0 makes everything asynchronous late, 1 at once, others mix.  flush_denormals: as code
        compiled with ``--use_fast_math`` does.  names: of the arguments, for messages.

        Raises EmulationError when a thread did what it must not, or all threads wait.
        """
        names = names or [f"argument {i}" for i in range(len(arguments))]
        buffers: dict[tuple[int, int], tuple[int, str, torch.Tensor]] = {}

        def place(tensor: torch.Tensor, name: str) -> int:
            if not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise EmulationError(f"{name} must be a contiguous CPU tensor.")
            nbytes = tensor.numel() * tensor.element_size()
            key = (tensor.data_ptr(), nbytes) if nbytes else (0, len(buffers) + 1)
            for start, size in buffers:
                if (start, size) != key and start and start < key[0] + nbytes and key[0] < start + size:
                    raise EmulationError(f"{name} must not overlap a part of another tensor.")
            return buffers.setdefault(key, (len(buffers), name, tensor))[0]

        values = [_argument(value, name, place) for value, name in zip(arguments, names)]
        error = ctypes.create_string_buffer(ERROR_BYTES)
        memory = (_Buffer * max(1, len(buffers)))(
            *(_Buffer(name.encode(), t.data_ptr(), t.numel() * t.element_size()) for _, name, t in buffers.values())
        )
        launch = _Launch(
            _three(grid), _three(block), shared_bytes, seed, flush_denormals, len(buffers), len(values), ERROR_BYTES,
            memory, (_Argument * max(1, len(values)))(*values), ctypes.cast(error, ctypes.c_char_p),
        )  # fmt: skip
        if self._run(ctypes.byref(launch)):
            raise EmulationError(f"{self.kernel}, seed {seed}: {error.value.decode()}")


_ENTRY = """
template <typename... A, std::size_t... I>
static void emu_call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {{
  kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(arguments[I])...);
}}
template <typename... A>
static void emu_call(void (*kernel)(A...), void** arguments) {{
  emu_call(kernel, arguments, std::index_sequence_for<A...>());
}}
extern "C" void emu_kernel(void** arguments) {{ emu_call({kernel}, arguments); }}
"""


def compiler() -> str | None:
    """Path of g++, or None."""
    return shutil.which("g++")


def _argument(value: Argument, name: str, place) -> _Argument:
    match value:
        case torch.Tensor():
            return _Argument(ord("p"), place(value, name))
        case TensorMap():
            sizes = [ctypes.c_uint64 * 5, ctypes.c_uint64 * 5, ctypes.c_uint32 * 5]
            dims, strides, box = (kind(*x) for kind, x in zip(sizes, (value.dims, value.strides, value.box)))
            map_ = _TensorMap(0, dims, strides, box, len(value.dims), value.swizzle)
            return _Argument(ord("m"), place(value.tensor, name), 0, 0.0, map_)
        case ctypes.c_int64():
            return _Argument(ord("l"), -1, value.value)
        case int():
            return _Argument(ord("i"), -1, value)
        case float():
            return _Argument(ord("f"), -1, 0, value)
    raise EmulationError(f"{name} must be one of {Argument}, but is {type(value).__name__}.")


def _three(extents: Sequence[int]) -> ctypes.Array:
    return (ctypes.c_uint32 * 3)(*extents, *[1] * (3 - len(extents)))


def _cache_folder(cache: str | Path | None) -> Path:
    user = os.getuid()
    folder = Path(cache or os.environ.get(CACHE_VARIABLE) or Path(tempfile.gettempdir()) / f"qla-emulator-{user}")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != user:
        raise EmulationError(f"{folder} must belong to the user who runs it; set {CACHE_VARIABLE} to another folder.")
    return folder


def _headers() -> bytes:
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cuh", ".cpp"))
    return b"\0".join(path.read_bytes() for path in files)


def _compiled(folder: Path, text: str, flags: Sequence[str], mode: str, suffix: str, objects: list[Path]) -> Path:
    """The file that g++ makes of a text, from the folder if it is there; published by one rename."""
    gxx = compiler()
    if gxx is None:
        raise EmulationError("g++ must be on PATH to emulate a kernel; install it.")
    flags = (*FLAGS, *flags, mode, f"-I{SOURCES}", f"-I{SOURCES / 'include'}")
    digest = hashlib.sha256("\0".join((text, *flags)).encode() + _headers()).hexdigest()[:24]
    made = folder / f"{digest}{suffix}"
    if made.exists():
        return made
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, output = Path(scratch) / "kernel.cpp", Path(scratch) / f"made{suffix}"
        source.write_text(text)
        command = [gxx, *flags, "-o", str(output), str(source), *map(str, objects)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if "error" in line) or done.stderr
            raise EmulationError(f"g++ must compile the text, but it said:\n{said[:4000]}")
        os.replace(output, made)
    return made
