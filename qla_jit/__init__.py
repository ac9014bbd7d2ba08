"""qla_jit: Gated DeltaNet kernels, generated, tuned and cached per (arch, head dims, heads).

    import qla_jit
    o, state = qla_jit.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    op = qla_jit.compile(qla_jit.OpConfig(num_heads=16, num_value_heads=64))

Importing this package loads neither TileLang nor Optuna, opens no CUDA context and reads no file.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "OpConfig": "config",
    "Problem": "config",
    "Schedule": "schedule",
    "compile": "op",
    "CompiledOp": "op",
    "select_kernels": "op",
    "Workspace": "workspace",
    "workspace_bytes": "workspace",
    "chunk_gated_delta_rule": "api",
    "window_share_of": "gates",
    "WindowShare": "gates",
    "open_db": "db",
    "QlaError": "errors",
    "ConfigError": "errors",
    "InputError": "errors",
    "UnsupportedError": "errors",
    "GradientError": "errors",
    "InfeasibleError": "errors",
    "BuildError": "errors",
    "CompilerMissingError": "errors",
    "CacheError": "errors",
    "KernelMissingError": "errors",
    "DatabaseError": "errors",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'qla_jit' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
