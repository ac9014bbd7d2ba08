"""CUDA text compiled for the CPU, and its launches."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
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
#: By the last flag, what a kernel never wrote is huge.
KERNEL_FLAGS = ("-include", "ptx.h", "-O1", "-g1", "-ftrivial-auto-var-init=pattern")
MACHINE_FLAGS = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic")
RACE_FLAGS = ("-fsanitize=thread",)  # calls a hook of ours at every access; libtsan is not linked
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
            "all of it in the tensor": element + sum((dim - 1) * step for dim, step in zip(self.dims, self.strides))
            <= self.tensor.numel() * self.tensor.element_size(),
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
        ("flush_denormals", ctypes.c_int32), ("find_races", ctypes.c_int32),
        ("num_buffers", ctypes.c_int32), ("num_arguments", ctypes.c_int32), ("error_bytes", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("buffers", ctypes.POINTER(_Buffer)), ("arguments", ctypes.POINTER(_Argument)), ("error", ctypes.c_char_p),
    ]  # fmt: skip


class Program:
    """One kernel of a CUDA text, compiled by g++ when first made and kept by content in ``cache``.

    source: CUDA C++.  kernel: the name of an ``extern "C" __global__`` function in it.  cache: a folder; by default
    $QLA_EMULATOR_CACHE, else one in the temporary folder.  races: check that accesses to shared memory are ordered, and
    that every access to a tensor stays inside it; costs some time.

    Raises EmulationError if the text holds what is not modelled, with g++'s or the rewriter's words.
    """

    def __init__(self, source: str, kernel: str, cache: str | Path | None = None, races: bool = True):
        self.source, self.kernel, self.races = source, kernel, races
        text = f"{rewrite(source)}\n{_ENTRY.format(kernel=kernel)}"
        folder, flags = _cache_folder(cache), (*KERNEL_FLAGS, *(RACE_FLAGS if races else ()))
        objects = [
            _object(folder, path.read_text(), path.name, MACHINE_FLAGS) for path in sorted(SOURCES.glob("*.cpp"))
        ]
        self._library = _library(folder, [_object(folder, text, TEXT, flags), *objects])
        self._run = ctypes.CDLL(str(self._library)).emu_run

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
        seed: int = 0,
        flush_denormals: bool = True,
        names: Sequence[str] | None = None,
        allowed: Sequence[str] = (),
    ) -> None:
        """Run all blocks of a grid, writing tensors in place.

        grid, block: up to three extents.  arguments: in the kernel's order.  shared_bytes: of dynamic shared memory.
        seed: of the schedule; 0 makes everything asynchronous late, 1 at once, others mix.  flush_denormals: as code
        compiled with ``--use_fast_math`` does.  names: of the arguments, for messages.  allowed: regular
        expressions; races whose report has a match do not count.

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
            _three(grid), _three(block), shared_bytes, seed, flush_denormals, self.races, len(buffers), len(values),
            ERROR_BYTES, 0, memory, (_Argument * max(1, len(values)))(*values), ctypes.cast(error, ctypes.c_char_p),
        )  # fmt: skip
        if self._run(ctypes.byref(launch)):
            first, *races = re.split(r"\n(?=data race)", self._located(error.value.decode()))
            races = {
                race.partition("\n")[2]: race
                for race in races
                if not any(re.search(x, race, re.DOTALL) for x in allowed)
            }
            said = [text for text in (first, *races.values()) if text]
            if said:
                raise EmulationError("\n".join([f"{self.kernel}, seed {seed}: {said[0]}", *said[1:]]))

    def _located(self, message: str) -> str:
        """The message with lines of the CUDA text in place of code addresses, innermost first."""
        offsets = re.findall(_CODE, message)
        tool = shutil.which("addr2line")
        if tool is None or not offsets:
            return re.sub(_CODE, "", message)
        command = [tool, "-a", "-i", "-e", str(self._library), *offsets]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines: dict[int, list[int]] = {}
        for line in said.splitlines():
            if line.startswith("0x"):
                found = lines.setdefault(int(line, 16), [])
            elif match := re.search(rf"/{re.escape(TEXT)}:(\d+)", f"/{line}"):
                found.append(int(match.group(1)))
        text = self.source.splitlines()

        def name(run: re.Match) -> str:
            numbers = [n for offset in re.findall(_CODE, run.group()) for n in lines.get(int(offset, 16), [])]
            named = [f"line {n}: {text[n - 1].strip()}" for n in dict.fromkeys(numbers) if n <= len(text)]
            return "".join(f"\n    at {line}" for line in named)

        return re.sub(rf" ?(?:{_CODE.replace('(', '(?:')})+", name, message)


TEXT = "kernel.cu"  # what line numbers are of
_CODE = r"\[\+(0x[0-9a-f]+)\]"
_ENTRY = """
template <typename... A, std::size_t... I>
__attribute__((no_sanitize_thread))
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
    files = sorted(path for path in SOURCES.rglob("*") if path.suffix in (".h", ".cuh"))
    return b"\0".join(path.read_bytes() for path in files)


def _object(folder: Path, text: str, name: str, flags: Sequence[str]) -> Path:
    """The object file that g++ makes of a text; ``name``: of its file, for line numbers."""
    flags = (*FLAGS, *flags, "-c", f"-I{SOURCES}", f"-I{SOURCES / 'include'}")
    digest = hashlib.sha256("\0".join((text, *flags)).encode() + _headers()).hexdigest()[:24]
    return _made(folder / f"{digest}.o", flags, [], text, name)


def _library(folder: Path, objects: list[Path]) -> Path:
    """The shared library of some object files."""
    digest = hashlib.sha256("\0".join(path.name for path in objects).encode()).hexdigest()[:24]
    return _made(folder / f"{digest}.so", ("-shared", "-ldl"), objects, "", "")


def _made(file: Path, flags: Sequence[str], objects: list[Path], text: str, name: str) -> Path:
    """``file``, made by g++ unless it is there; published by one rename."""
    if file.exists():
        return file
    gxx = compiler()
    if gxx is None:
        raise EmulationError("g++ must be on PATH to emulate a kernel; install it.")
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        output = Path(scratch) / file.name
        inputs = [str(path) for path in objects]
        if text:
            inputs = ["-x", "c++", str(Path(scratch) / name)]
            (Path(scratch) / name).write_text(text)
        done = subprocess.run([gxx, *flags, *inputs, "-o", str(output)], capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join(line for line in done.stderr.splitlines() if "error" in line) or done.stderr
            raise EmulationError(f"g++ must compile the text, but it said:\n{said[:4000]}")
        os.replace(output, file)
    return file
