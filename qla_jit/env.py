"""Environment variables this package reads, and where its files live.  Read when called, never at import."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

CACHE_DIR = "QLA_CACHE_DIR"  # folder of compiled kernels
DATABASE = "QLA_DB"  # user tuning database
STRICT = "QLA_STRICT"  # 1: never compile, raise KernelMissingError instead


def cache_dir() -> Path:
    """Folder of compiled kernels: $QLA_CACHE_DIR, else the user's cache folder."""
    given = os.environ.get(CACHE_DIR)
    return Path(given) if given else Path(platformdirs.user_cache_dir("qla_jit")) / "kernels"


def database_path() -> Path:
    """User tuning database: $QLA_DB, else a file in the user's data folder."""
    given = os.environ.get(DATABASE)
    return Path(given) if given else Path(platformdirs.user_data_dir("qla_jit")) / "tuning.sqlite"


def strict() -> bool:
    """Whether compiling in the request path is forbidden ($QLA_STRICT=1)."""
    return os.environ.get(STRICT, "0") == "1"
