"""Compiled kernels shared by all tests of a session, built two at a time before the first test that needs one.

$QLA_TEST_CACHE names a folder that keeps them for the next session; without it they go with the session.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from kernels import Kernel, build_into

from qla_jit import build, toolchain
from qla_jit.artifacts import Artifact, ArtifactStore

JOBS = 2
TIMEOUT_S = 600


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    tools = toolchain.current()
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.codegen)
            if tools.nvcc is None and "kernel" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="needs nvcc to compile, and none was found"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> ArtifactStore:
    given = os.environ.get("QLA_TEST_CACHE")
    return ArtifactStore(given or tmp_path_factory.mktemp("kernels") / "cache")


@pytest.fixture(scope="session")
def built(request, cache) -> dict:
    """Kernel → None, or why it did not build; every kernel that a selected test is parametrised with."""
    wanted = []
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        wanted += [value for name, value in params.items() if name == "kernel" and isinstance(value, Kernel)]
    wanted = sorted(dict.fromkeys(wanted), key=lambda k: not k.template.startswith("fused"))  # the slow ones first
    with ProcessPoolExecutor(JOBS, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {kernel: pool.submit(build_into, kernel, str(cache.root)) for kernel in wanted}
        return {kernel: future.result(TIMEOUT_S) for kernel, future in futures.items()}


@pytest.fixture
def artifact(kernel, built, cache) -> Artifact:
    """The compiled kernel of the test's ``kernel`` parameter; a build that failed fails the test."""
    assert built[kernel] is None, built[kernel]
    found = cache.get(kernel.spec, build.flags(kernel.spec))
    assert found is not None, f"{kernel} was built, but is not found: did a template change while the tests ran?"
    return found
