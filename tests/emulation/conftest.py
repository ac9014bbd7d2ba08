"""Kernels on the CPU emulator, each compiled once per session; all skip where there is no g++.

$QLA_EMULATOR_CACHE names a folder that keeps them for the next session.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import emulator  # noqa: E402
from emulator import program  # noqa: E402


def pytest_collection_modifyitems(items):
    if program.compiler() is not None:
        return
    skip = pytest.mark.skip(reason="needs g++ to compile kernels for the CPU, and none was found")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return os.environ.get(program.CACHE_VARIABLE) or tmp_path_factory.mktemp("emulator")


@pytest.fixture(scope="session")
def compiled(cache):
    """``emulator.kernel`` of a spec, kept."""
    return functools.cache(lambda spec: emulator.kernel(spec, cache))


@pytest.fixture
def program_of(cache):
    """A program from the text of the kernel ``run``; the headers are included."""

    def make(body: str, **options) -> program.Program:
        return program.Program(INCLUDES + body, "run", cache, **options)

    return make


INCLUDES = "".join(
    f"#include <{name}>\n"
    for name in (
        "tl_templates/cuda/common.h", "cuda_bf16.h", "cuda_fp16.h", "cuda.h", "tl_templates/cuda/instruction/wgmma.h",
        "tl_templates/cuda/intrin.h", "tl_templates/cuda/barrier.h", "tl_templates/cuda/copy_sm90.h",
    )
)  # fmt: skip
