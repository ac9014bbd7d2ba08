"""What compiles kernels here: TileLang's version and nvcc's, found without importing TileLang."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import CompilerMissingError

DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class Toolchain:
    """Versions that a kernel's bytes depend on; ``nvcc`` is None where none is found."""

    tilelang: str | None
    nvcc: str | None
    nvcc_path: str | None = None

    def as_dict(self) -> dict:
        values = asdict(self)
        values.pop("nvcc_path")
        return values

    def require(self) -> None:
        """Raise CompilerMissingError unless kernels can be built here."""
        missing = [name for name in ("tilelang", "nvcc") if getattr(self, name) is None]
        if missing:
            raise CompilerMissingError(
                f"TileLang and nvcc must be present to build a kernel, but {' and '.join(missing)} was not found. "
                "Kernels already in the cache, CPU tensors, replays and the database still work; install the CUDA "
                "toolkit (nvcc 12.8 or newer on PATH or under $CUDA_HOME) to build new ones."
            )


def _nvcc_path() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    places += [Path(found)] if found else []
    places.append(DEFAULT_NVCC)
    return next((str(p) for p in places if p.is_file() and os.access(p, os.X_OK)), None)


@functools.cache
def _nvcc_version(path: str) -> str | None:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:  # not a program for this machine: the same as no nvcc
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match.group(1) if match else None


@functools.cache
def _tilelang_version() -> str | None:
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None


def current() -> Toolchain:
    """The toolchain on this machine now."""
    path = _nvcc_path()
    return Toolchain(tilelang=_tilelang_version(), nvcc=_nvcc_version(path) if path else None, nvcc_path=path)
