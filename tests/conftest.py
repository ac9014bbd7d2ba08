"""Fixtures and rules shared by all tests."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA card, and torch.cuda.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each implementation behind the public operator: the chunk form on the CPU, the kernels on a card."""
    return request.param


@pytest.fixture(scope="module")
def one_thread():
    """For many products of small tensors: threads that wait for each other on busy cores take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
