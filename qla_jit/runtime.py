"""Load a compiled kernel and call it, with neither TileLang's Python package nor a compiler.

Only TileLang's shared libraries are used: TVM's runtime, and the library that encodes TMA descriptors.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from .artifacts import Artifact
from .errors import ToolError

LIBRARIES = ("libtvm_runtime.so", "libtvm_compiler.so", "libtilelang.so")


@functools.cache
def start() -> None:
    """Load the runtime libraries into the process, once; ToolError if they are not there or do not load."""
    found = importlib.util.find_spec("tilelang")
    if found is None or found.origin is None:
        raise ToolError("the tilelang package must be installed to run kernels, but it is not; pip install tilelang.")
    import tvm_ffi  # noqa: F401  the FFI types must exist before the runtime registers its own

    folder = Path(found.origin).parent / "lib"
    for name in LIBRARIES:
        try:
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ToolError(f"TileLang's {name} must load, but: {error}; reinstall tilelang.") from error


def load(artifact: Artifact) -> Callable[..., None]:
    """The kernel's entry: takes tensors and scalars in the order of `qla_jit.launch`, launches on torch's stream.

    Raises ToolError if the library does not fit the installed runtime.
    """
    start()
    import tvm_ffi

    try:
        return tvm_ffi.load_module(str(artifact.library))["main"]
    except Exception as error:
        raise ToolError(
            f"{artifact.library} must load in TileLang's runtime, but: {error}; delete {artifact.path} to rebuild it."
        ) from error
